#pragma once

#include "cyclic_groups.h"
#include "head_order.h"

namespace dash::schedule {

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
struct Climbing {
    static constexpr char const* kName = "climbing";
    static constexpr bool kWaitsInLine = false;
    TileGrid grid;

    DASH_HD explicit Climbing(TileGrid const& g) : grid(g) {}

    // Neighbours on the diagonal are at different query tiles.
    DASH_HD static bool suits(TileGrid const& g) { return g.causal && g.offset() == 0 && g.q_rows <= g.kv_rows; }

    DASH_HD int ways() const { return 1; }
    DASH_HD int visits(int kv_tile) const { return grid.q_tiles() - grid.first_query(kv_tile); }
    DASH_HD int visit(int kv_tile, int step, int /*way*/) const { return grid.first_query(kv_tile) + step; }
    DASH_HD int rank(int kv_tile, int q_tile, int /*way*/) const {
        int const begin = band_begin(kv_tile);
        return begin + min_of(grid.contributors(q_tile), band_end(begin)) - 1 - kv_tile;
    }

    // A chain is ahead of those that wait for it. At the top all are the closest together, and there they turn.
    DASH_HD HeadOrder heads(int kv_tile, int /*group*/) const { return {1, visits(kv_tile), true}; }

    DASH_HD Chain chain(int claim, int heads) const {
        int const per_block = heads_per_block(heads, band_end(0), 3 * kChainsThatFillAChip);
        HeadBlock const block(claim, heads, per_block, grid.kv_tiles());
        int const begin = band_begin(quotient(block.claim, block.heads));
        int const end = band_end(begin);
        Division const place = divide(block.claim - begin * block.heads, end - begin);
        return {block.first_head + place.quotient, end - 1 - place.rest};
    }
    DASH_HD int cycle_end(int claim, int /*heads*/) const { return claim + 1; }
    DASH_HD int slot(int kv_tile) const { return kv_tile - band_begin(kv_tile); }
    DASH_HD int resident_ctas_needed() const { return 1; }
    DASH_HD int idle_ctas(int /*ctas*/) const { return 0; }

  private:
    // A band's end, and the begin of the one that a KV tile is in.
    DASH_HD int band_end(int begin) const {
        return begin + min_of(kMaxCyclicGroup, ceil_div(grid.kv_tiles() - begin, 2));
    }
    DASH_HD int band_begin(int kv_tile) const {
        int begin = 0;
        for (int end = band_end(0); end <= kv_tile; end = band_end(end)) begin = end;
        return begin;
    }
};

}  // namespace dash::schedule
