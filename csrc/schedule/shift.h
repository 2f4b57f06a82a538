#pragma once

#include "cyclic_groups.h"
#include "head_order.h"

namespace dash::schedule {

// Every KV tile starts elsewhere and goes round, so that no two of a group are ever at the same query
// tile: without a mask no reduction waits. (DASH's shift; the paper's order is the case of equally many
// query and KV tiles.) Picture: cyclic_groups.h.
//
// Under a causal mask a chain keeps the cycle's order and leaves out what it does not see; that is
// valid but not free of stalls, and symmetric_shift is the better choice.
//
// No deadlock: (step on the full cycle, member) grows along every chain and along every query tile's
// order, and groups wait for groups issued before them only.
struct Shift {
    static constexpr char const* kName = "shift";
    static constexpr bool kWaitsInLine = false;
    TileGrid grid;
    CyclicGroups cycle;

    DASH_HD explicit Shift(TileGrid const& g) : grid(g), cycle(g.kv_tiles(), 0, g.q_tiles()) {}

    DASH_HD int visits(int kv_tile) const { return grid.q_tiles() - grid.first_query(kv_tile); }

    DASH_HD int visit(int kv_tile, int step) const {
        int const first = grid.first_query(kv_tile);
        int const q_tile = max_of(first, cycle.start(kv_tile)) + step;
        return q_tile < grid.q_tiles() ? q_tile : q_tile - grid.q_tiles() + first;
    }

    DASH_HD int rank(int kv_tile, int q_tile) const { return cycle.rank(kv_tile, q_tile, grid.contributors(q_tile)); }

    // Without a mask all chains have equally many visits, and are in step whatever the order.
    DASH_HD HeadOrder heads(int kv_tile, int group) const { return {grid.causal ? group : 1, visits(kv_tile)}; }

    DASH_HD Chain chain(int claim, int heads) const {
        HeadBlock const block(claim, heads, heads_per_block(heads, cycle.group_size), grid.kv_tiles());
        Chain const c = cycle.chain(block.claim, block.heads);
        return {block.first_head + c.head, c.kv_tile};
    }
    DASH_HD int cycle_end(int claim, int heads) const {
        HeadBlock const block(claim, heads, heads_per_block(heads, cycle.group_size), grid.kv_tiles());
        return block.first_claim + cycle.cycle_end(block.claim, block.heads);
    }
    DASH_HD int slot(int kv_tile) const { return kv_tile - cycle.group_begin(kv_tile); }
    DASH_HD int resident_ctas_needed() const { return min_of(cycle.group_size, cycle.members); }
};

}  // namespace dash::schedule
