#pragma once

#include "cyclic_groups.h"
#include "folded_blocks.h"
#include "head_order.h"

namespace dash::schedule {

// The causal triangle folded into a rectangle. (DASH's symmetric shift.) With n KV tiles and h = n / 2:
//
//                  KV 0 .. h-1   KV h .. n-1
//   query tiles        \                        1  KV k < h rotates over the dense rectangle R, whose
//   before H      T     \                          query tiles see all of KV 0 .. h-1;
//                 --------+                     2  then climbs its part of the triangle T;
//   query tiles           | \                   3  KV k >= h, on the CTA that ended first, descends
//   from H on     R       |   \  U                 from the last query tile through U.
//
// KV k is long where KV n-1-k is short, so a CTA that takes one of each does the same work as all
// others, and at every moment all CTAs are at different query tiles.
//
// Ranks: before H the highest visible KV tile of a group first, since it ends its part of R at the same
// time as the others but starts T the furthest on; from H on the rotation's order, then KV h, h+1, ...
//
// No deadlock: 1 waits within 1, 2 within its group's 1 and 2 and groups before, 3 for lower KV tiles.
struct SymmetricShift {
    static constexpr char const* kName = "symmetric_shift";
    static constexpr bool kWaitsInLine = false;
    TileGrid grid;
    int lower;   // h: KV tiles below it rotate, the others descend
    int corner;  // H: the first query tile of the rectangle
    CyclicGroups cycle;
    int block_heads;

    DASH_HD explicit SymmetricShift(TileGrid const& g)
        : grid(g),
          lower(ceil_div(g.kv_tiles(), 2)),
          corner(lower < g.kv_tiles() ? g.first_query(lower) : g.q_tiles()),
          cycle(lower, corner, g.q_tiles() - corner),
          block_heads(max_of(1, min_of(g.ctas_an_order, chains_that_fill(g)) / cycle.group_size)) {}

    DASH_HD int ways() const { return 1; }
    DASH_HD int visits(int kv_tile) const { return grid.q_tiles() - grid.first_query(kv_tile); }

    DASH_HD int visit(int kv_tile, int step, int /*way*/) const {
        if (kv_tile >= lower) return grid.q_tiles() - 1 - step;
        if (step >= cycle.span) return grid.first_query(kv_tile) + step - cycle.span;
        int const q_tile = cycle.start(kv_tile) + step;
        return q_tile < grid.q_tiles() ? q_tile : q_tile - cycle.span;
    }

    DASH_HD int rank(int kv_tile, int q_tile, int /*way*/) const {
        if (kv_tile >= lower) return kv_tile;
        if (q_tile >= corner) return cycle.rank(kv_tile, q_tile, lower);
        int const begin = cycle.group_begin(kv_tile);
        int const visible_end = min_of(grid.contributors(q_tile), begin + cycle.size_at(begin));
        return begin + visible_end - 1 - kv_tile;
    }

    // The rectangle, in which all are in step, head by head; then the rest of the chain in the same way.
    DASH_HD HeadOrder heads(int kv_tile, int /*group*/) const {
        return {1, kv_tile < lower ? cycle.span : visits(kv_tile), false};
    }

    DASH_HD Chain chain(int claim, int heads) const {
        Stretch const stretch = blocks(heads).stretch(claim);
        claim -= stretch.first_claim;
        if (stretch.rotating) {
            Chain const c = cycle.chain(claim, stretch.heads);
            return {stretch.first_head + c.head, c.kv_tile};
        }
        Division const place = divide(claim, stretch.heads);
        return {stretch.first_head + place.rest, lower + place.quotient};
    }
    DASH_HD int cycle_end(int claim, int heads) const {
        Stretch const stretch = blocks(heads).stretch(claim);
        if (!stretch.rotating) return claim + 1;
        return stretch.first_claim + cycle.cycle_end(claim - stretch.first_claim, stretch.heads);
    }
    // Whether chains that rotate end one after the other, as they began to climb, so that those that descend follow
    // them in step. With many more keys than queries they end at the same time.
    DASH_HD bool folds() const { return corner > 0; }
    // Then a block has as many heads as have first cycles that fit on the CTAs, at least one, so that as far as may be
    // no cycle waits for a part of its CTAs, and the least is in use at a time.
    DASH_HD int heads_that_fit() const { return block_heads; }
    // Whether these cycles take a full chip, or one side of it, and are all of the rotating chains.
    DASH_HD bool fills() const {
        return folds() && lower == cycle.group_size && heads_that_fit() * lower == chains_that_fill(grid);
    }
    // If heads are left over, the last two blocks are one with them. What does not fold is in blocks of three chips'
    // or sides' worth of first cycles.
    DASH_HD FoldedBlocks blocks(int heads) const {
        int const upper = grid.kv_tiles() - lower;
        if (!folds()) {
            int const per_block = heads_per_block(heads, cycle.group_size, 3 * chains_that_fill(grid));
            return {lower, upper, heads, per_block, quotient(heads - 1, per_block), false};
        }
        Division const all = divide(heads, heads_that_fit());
        int const last = all.rest == 0 ? all.quotient - 1 : max_of(0, all.quotient - 2);
        return {lower, upper, heads, heads_that_fit(), last, !fills()};
    }
    DASH_HD int slot(int kv_tile) const {
        return kv_tile < lower ? cycle.place(kv_tile) : grid.kv_tiles() - 1 - kv_tile;
    }
    DASH_HD int resident_ctas_needed() const { return max_of(1, min_of(cycle.group_size, cycle.members)); }
    DASH_HD int idle_ctas(int /*ctas*/) const { return 0; }
};

}  // namespace dash::schedule
