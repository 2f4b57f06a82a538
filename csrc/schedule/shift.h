#pragma once

#include "cyclic_groups.h"
#include "head_order.h"
#include "opposite_heads.h"

namespace dash::schedule {

// Every KV tile starts elsewhere and goes round, so that no two of a group are ever at the same query
// tile: without a mask no reduction waits. (DASH's shift; the paper's order is the case of equally many
// query and KV tiles.) Picture: cyclic_groups.h.
//
// Under a causal mask on a square the diagonal itself puts every chain elsewhere. All climb from it:
//
//   step      0   1   2   3        The chain of the highest KV tile is the first at every query tile and
//   KV 3     q3                    is issued first, so that each waits for chains issued before it only,
//   KV 2     q2  q3                and on any number of SMs. A chain may start as late as its neighbour is
//   KV 1     q1  q2  q3            ahead (the query tiles in a KV tile) before those below it wait, where a
//   KV 0     q0  q1  q2  q3        rotation would pass a late start on to the whole group.
//
// KV tiles are cut into bands, each of half of what is left, and a band of all heads of a block is issued before
// the next: the longer chains first, and ever shorter ones even out what they leave over.
//
// If heads come in pairs, an even head may climb and an odd one descend. It is better where a KV tile has as many keys
// as a query tile has queries, since neighbours that climb are then one query tile apart, which is less than a turn
// takes; and where there are few KV tiles, since bands of them are short:
//
//   step  0   1   2   3   4
//   SM 0  q3 |q3  q2  q1  q0   KV 3 of the even head, KV 0 of the odd one
//   SM 1  q2  q3 |q3  q2  q1   KV 2 | KV 1       The even head as above; in the odd head the lowest KV tile is
//   SM 2  q1  q2  q3 |q3  q2   KV 1 | KV 2       ahead. At every step all chains of a head are at different query
//   SM 3  q0  q1  q2  q3 |q3   KV 0 | KV 3       tiles, whole heads long, and all SMs end together.
//
// Under other causal masks a chain keeps the cycle's order and leaves out what it does not see; that is
// valid but not free of stalls.
//
// No deadlock: (step on the full cycle, member) grows along every chain and along every query tile's
// order, and groups wait for groups issued before them only.
struct Shift {
    static constexpr char const* kName = "shift";
    static constexpr bool kWaitsInLine = false;
    static constexpr int kFewKvTiles = 8;
    TileGrid grid;
    CyclicGroups cycle;
    bool climbs;
    bool opposite;  // in odd heads chains descend
    OppositeHeads pairs;

    DASH_HD explicit Shift(TileGrid const& g)
        : grid(g),
          cycle(g.kv_tiles(), 0, g.q_tiles()),
          climbs(g.causal && g.offset() == 0 && g.q_rows <= g.kv_rows),
          opposite(climbs && g.paired && (g.q_rows == g.kv_rows || g.kv_tiles() <= kFewKvTiles)),
          pairs(g.kv_tiles(), chains_that_fill(g) * (g.q_rows == g.kv_rows ? 2 : 1)) {}

    DASH_HD int ways() const { return opposite ? 2 : 1; }

    DASH_HD int visits(int kv_tile) const { return grid.q_tiles() - grid.first_query(kv_tile); }

    DASH_HD int visit(int kv_tile, int step, int way) const {
        int const first = grid.first_query(kv_tile);
        if (way == 1) return grid.q_tiles() - 1 - step;
        if (climbs) return first + step;
        int const q_tile = max_of(first, cycle.start(kv_tile)) + step;
        return q_tile < grid.q_tiles() ? q_tile : q_tile - grid.q_tiles() + first;
    }

    DASH_HD int rank(int kv_tile, int q_tile, int way) const {
        if (way == 1) return kv_tile;
        int const visible = grid.contributors(q_tile);
        if (!climbs) return cycle.rank(kv_tile, q_tile, visible);
        int const begin = band_begin(kv_tile);
        return begin + min_of(visible, band_end(begin)) - 1 - kv_tile;
    }

    // Without a mask all chains have equally many visits, and are in step whatever the order. Chains that climb are
    // ahead of those who wait for them; at the top they are the closest together, and there they turn.
    DASH_HD HeadOrder heads(int kv_tile, int group) const {
        return {grid.causal && !climbs ? group : 1, visits(kv_tile), climbs};
    }

    DASH_HD Chain chain(int claim, int heads) const {
        if (opposite) return pairs.chain(claim, heads);
        HeadBlock const block = this->block(claim, heads);
        if (climbs) {
            int const begin = band_begin(quotient(block.claim, block.heads));
            int const end = band_end(begin);
            Division const place = divide(block.claim - begin * block.heads, end - begin);
            return {block.first_head + place.quotient, end - 1 - place.rest};
        }
        Chain const c = cycle.chain(block.claim, block.heads);
        return {block.first_head + c.head, c.kv_tile};
    }
    DASH_HD int cycle_end(int claim, int heads) const {
        if (climbs) return claim + 1;
        HeadBlock const block = this->block(claim, heads);
        return block.first_claim + cycle.cycle_end(block.claim, block.heads);
    }
    DASH_HD int chains_at_first() const { return climbs ? band_end(0) : cycle.group_size; }
    DASH_HD int slot(int kv_tile) const {
        return kv_tile - (climbs ? band_begin(kv_tile) : cycle.group_begin(kv_tile));
    }
    DASH_HD int resident_ctas_needed() const { return climbs ? 1 : min_of(cycle.group_size, cycle.members); }

  private:
    DASH_HD HeadBlock block(int claim, int heads) const {
        return {claim, heads, heads_per_block(heads, chains_at_first(), 3 * kChainsThatFillAChip), grid.kv_tiles()};
    }
    // A band's end, and the begin of the one that a KV tile is in.
    DASH_HD int band_end(int begin) const {
        if (opposite) return grid.kv_tiles();
        return begin + min_of(kMaxCyclicGroup, ceil_div(grid.kv_tiles() - begin, 2));
    }
    DASH_HD int band_begin(int kv_tile) const {
        int begin = 0;
        for (int end = band_end(0); end <= kv_tile; end = band_end(end)) begin = end;
        return begin;
    }
};

}  // namespace dash::schedule
