#pragma once

#include <cstddef>
#include <vector>

#include "schedule/head_order.h"

namespace dash::bindings {

// Whether `ctas` persistent CTAs run the chains of `heads` heads to the end. False is a deadlock. Each chain walks
// `group` query heads; `parts` neighbouring heads are parts of one KV head, which add their dK and dV in turn.
//
// They claim as the kernel's loaders do: in the policy's order, the next chain when the last is done, and
// with `claim_ahead` already while it runs, as far as policy.cycle_end allows. A step of a chain is done
// in its turn only: when its rank is the query tile's ticket. A chain ends in its part's turn.
//
// There is no clock in here. A step whose turn has come keeps it until it is done, and without
// claim_ahead it makes no difference which CTA runs a chain, so all executions end alike and one decides.
// With claim_ahead this is the greediest: each CTA takes all it may before the next one takes anything.
template <typename Policy>
bool completes(Policy const& policy, int heads, int ctas, bool claim_ahead, int group, int parts) {
    struct Cta {
        int claims[2];
        int held = 0;
        int step = 0;  // of the chain claims[0]
    };
    int const q_tiles = policy.grid.q_tiles();
    int const all_claims = heads * policy.grid.kv_tiles();
    std::vector<int> tickets(size_t(heads) * group * q_tiles, 0);
    std::vector<int> part_tickets(size_t(heads / parts) * policy.grid.kv_tiles(), 0);
    std::vector<Cta> all_ctas(ctas);
    int claimed = 0, done = 0;

    auto const may_claim = [&](Cta const& cta) {
        if (claimed == all_claims || cta.held == (claim_ahead && !Policy::kWaitsInLine ? 2 : 1)) return false;
        if (cta.held == 0) return true;
        int const cycle_end = policy.cycle_end(cta.claims[0], heads);
        return cycle_end == cta.claims[0] + 1 || claimed >= cycle_end;
    };
    // Takes all steps that are in turn. Returns whether there was one, or the chain has no steps left.
    auto const run = [&](Cta& cta) {
        schedule::Chain const chain = policy.chain(cta.claims[0], heads);
        int const visits = policy.visits(chain.kv_tile), way = chain.head % policy.ways();
        bool progress = false;
        for (; cta.step < group * visits; ++cta.step, progress = true) {
            schedule::HeadRun const stop =
                schedule::head_run(policy.heads(chain.kv_tile, group), group, visits, cta.step);
            int const q_tile = policy.visit(chain.kv_tile, stop.visit, way);
            int& ticket = tickets[(size_t(chain.head) * group + stop.head) * q_tiles + q_tile];
            if (policy.rank(chain.kv_tile, q_tile, way) != ticket) return progress;
            ++ticket;
        }
        int& part_ticket = part_tickets[size_t(chain.head / parts) * policy.grid.kv_tiles() + chain.kv_tile];
        if (part_ticket != chain.head % parts) return progress;
        ++part_ticket;
        cta.claims[0] = cta.claims[1];
        cta.step = 0;
        --cta.held;
        ++done;
        return true;
    };

    for (bool progress = true; progress;) {
        progress = false;
        for (Cta& cta : all_ctas) {
            while (may_claim(cta)) cta.claims[cta.held++] = claimed++;
        }
        for (Cta& cta : all_ctas) {
            if (cta.held > 0) progress |= run(cta);
        }
    }
    return done == all_claims;
}

}  // namespace dash::bindings
