#pragma once

#include "cyclic_groups.h"
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
// others, and at every moment all CTAs are at different query tiles. Without a mask R is everything and
// this is the plain shift.
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

    DASH_HD explicit SymmetricShift(TileGrid const& g)
        : grid(g),
          lower(g.causal ? ceil_div(g.kv_tiles(), 2) : g.kv_tiles()),
          corner(!g.causal              ? 0
                 : lower < g.kv_tiles() ? g.first_query(lower)
                                        : g.q_tiles()),
          cycle(lower, corner, g.q_tiles() - corner) {}

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
        HeadBlock const block = this->block(claim, heads);
        int const upper_claim = block.claim - lower * block.heads;
        if (upper_claim < 0) {
            Chain const c = cycle.chain(block.claim, block.heads);
            return {block.first_head + c.head, c.kv_tile};
        }
        Division const place = divide(upper_claim, block.heads);
        return {block.first_head + place.rest, lower + place.quotient};
    }
    DASH_HD int cycle_end(int claim, int heads) const {
        HeadBlock const block = this->block(claim, heads);
        return block.claim < lower * block.heads ? block.first_claim + cycle.cycle_end(block.claim, block.heads)
                                                 : claim + 1;
    }
    // How many heads have as many first chains as fill the SMs that share an order of issue, if those of a head are one
    // cycle. 0: no number does.
    DASH_HD int filling_heads() const {
        if (!grid.causal || lower != cycle.group_size) return 0;
        Division const heads = divide(chains_that_fill(grid), max_of(1, lower));
        return heads.rest == 0 ? heads.quotient : 0;
    }
    // These heads are a block: on so many SMs each CTA takes one chain of either kind, they end together, and the least
    // is in use at a time. If some heads are left over, the last blocks are one with them. Elsewhere larger blocks even
    // out what does not fill the SMs; without a mask they are those of shift.
    DASH_HD HeadBlock block(int claim, int heads) const {
        int const filling = filling_heads();
        if (filling > 0) {
            Division const blocks = divide(heads, filling);
            int const last_head = blocks.rest == 0 ? heads : max_of(0, blocks.quotient - 2) * filling;
            return {claim, heads, filling, last_head, grid.kv_tiles()};
        }
        int const chains = grid.causal ? chains_that_fill(grid) : kChainsThatFillAChip;
        return {claim, heads, heads_per_block(heads, cycle.group_size, 3 * chains), grid.kv_tiles()};
    }
    DASH_HD int slot(int kv_tile) const {
        return kv_tile < lower ? kv_tile - cycle.group_begin(kv_tile) : grid.kv_tiles() - 1 - kv_tile;
    }
    DASH_HD int resident_ctas_needed() const { return max_of(1, min_of(cycle.group_size, cycle.members)); }
};

}  // namespace dash::schedule
