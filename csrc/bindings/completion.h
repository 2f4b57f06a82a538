#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "schedule/head_order.h"

namespace dash::bindings {

// Whether `ctas` persistent CTAs run the chains of `heads` heads to the end. False is a deadlock. Neighbouring heads
// are parts of one KV head, which add their dK and dV in turn; a chain of one walks as many query heads as `parts`
// says. `others` more CTAs are on the other side of the L2 cache. Then half of the heads belong to each side, and if
// side 1 is open, the others claim chains of those first.
//
// They claim as the kernel's loaders do: in the policy's order, the next chain when the last is done, and
// with `claim_ahead` already while it runs, as far as policy.cycle_end allows. A step of a chain is done
// in its turn only: when its rank is the query tile's ticket. A chain ends in its part's turn.
//
// There is no clock in here. A step whose turn has come keeps it until it is done, and without
// claim_ahead it makes no difference which CTA runs a chain, so all executions end alike and one decides.
// With claim_ahead this is the greediest: each CTA takes all it may before the next one takes anything.
template <typename Policy>
bool completes(Policy const& policy, int heads, int ctas, bool claim_ahead, std::vector<int> const& parts, int others,
               bool open) {
    struct Cta {
        int side;  // of the chain that it claimed last
        int claims[2], sides[2];
        int held = 0;
        int step = 0;  // of the chain claims[0]
    };
    int const q_tiles = policy.grid.q_tiles(), part_count = int(parts.size());
    int const most_heads = *std::max_element(parts.begin(), parts.end());
    int const sides = others > 0 ? 2 : 1, side_heads = heads / sides;
    int const side_claims = side_heads * policy.grid.kv_tiles();
    std::vector<int> tickets(size_t(heads) * most_heads * q_tiles, 0);
    std::vector<int> part_tickets(size_t(heads / part_count) * policy.grid.kv_tiles(), 0);
    std::vector<Cta> all_ctas(ctas + others);
    for (int i = 0; i < ctas + others; ++i) all_ctas[i].side = open && i >= ctas;
    int claimed[2] = {}, done = 0;

    auto const may_claim = [&](Cta const& cta) {
        if (cta.held == (claim_ahead && !Policy::kWaitsInLine ? 2 : 1)) return false;
        if (cta.held == 0) return true;
        int const cycle_end = policy.cycle_end(cta.claims[0], side_heads);
        return cycle_end == cta.claims[0] + 1 || claimed[cta.side] >= cycle_end;
    };
    // Returns whether anything was left.
    auto const claim = [&](Cta& cta) {
        if (claimed[cta.side] == side_claims && sides > 1) cta.side ^= 1;
        if (claimed[cta.side] == side_claims) return false;
        cta.sides[cta.held] = cta.side;
        cta.claims[cta.held++] = claimed[cta.side]++;
        return true;
    };
    // Takes all steps that are in turn. Returns whether there was one, or the chain has no steps left.
    auto const run = [&](Cta& cta) {
        schedule::Chain chain = policy.chain(cta.claims[0], side_heads);
        chain.head += cta.sides[0] * side_heads;
        int const part = chain.head % part_count, group = parts[part];
        int const visits = policy.visits(chain.kv_tile), way = chain.head % policy.ways();
        bool progress = false;
        for (; cta.step < group * visits; ++cta.step, progress = true) {
            schedule::HeadRun const here =
                schedule::head_run(policy.heads(chain.kv_tile, group), group, visits, cta.step);
            int const q_tile = policy.visit(chain.kv_tile, here.visit, way);
            int& ticket = tickets[(size_t(chain.head) * most_heads + here.head) * q_tiles + q_tile];
            if (policy.rank(chain.kv_tile, q_tile, way) != ticket) return progress;
            ++ticket;
        }
        int& part_ticket = part_tickets[size_t(chain.head / part_count) * policy.grid.kv_tiles() + chain.kv_tile];
        if (part_ticket != part) return progress;
        ++part_ticket;
        cta.claims[0] = cta.claims[1];
        cta.sides[0] = cta.sides[1];
        cta.step = 0;
        --cta.held;
        ++done;
        return true;
    };

    for (bool progress = true; progress;) {
        progress = false;
        for (Cta& cta : all_ctas) {
            while (may_claim(cta) && claim(cta)) {
            }
        }
        for (Cta& cta : all_ctas) {
            if (cta.held > 0) progress |= run(cta);
        }
    }
    return done == sides * side_claims;
}

}  // namespace dash::bindings
