#pragma once

#include "climbing.h"

namespace dash::schedule {

// Where all chains climb from the diagonal (climbing.h) and heads come in pairs, an even head may climb and an odd one
// descend:
//
//   step  0   1   2   3   4
//   SM 0  q3 |q3  q2  q1  q0   KV 3 of the even head, KV 0 of the odd one
//   SM 1  q2  q3 |q3  q2  q1   KV 2 | KV 1       The even head climbs; in the odd head the lowest KV tile is
//   SM 2  q1  q2  q3 |q3  q2   KV 1 | KV 2       ahead. At every step all chains of a head are at different query
//   SM 3  q0  q1  q2  q3 |q3   KV 0 | KV 3       tiles, whole heads long, and all SMs end together.
//
// It is better than bands where a KV tile has as many keys as a query tile has queries, since neighbours that climb are
// then one query tile apart, which is less than a turn takes; and where there are few KV tiles, since bands of them are
// short.
//
// In each block of heads first the chains of the even heads are issued, the highest KV tile of each, then the next
// lower one of each; and then those of the odd heads, the lowest KV tile first. So a chain waits for chains issued
// before it only:
//
//   4 KV tiles, blocks of two heads:   h0 KV 3, 2, 1, 0   h1 KV 0, 1, 2, 3   h2 KV 3, ...
struct OppositeHeads {
    static constexpr char const* kName = "opposite_heads";
    static constexpr bool kWaitsInLine = false;
    static constexpr int kFewKvTiles = 8;
    TileGrid grid;
    int pairs;  // of heads: about so many to a block

    // Even heads with about so many chains as fill the SMs, or, where neighbouring chains of a head are one query tile
    // apart, twice as many: then of two neighbours one starts about a step before the other, and a turn takes about a
    // step.
    DASH_HD explicit OppositeHeads(TileGrid const& g) : grid(g) {
        int const kv_tiles = g.kv_tiles(), chains = chains_that_fill(g) * (g.q_rows == g.kv_rows ? 2 : 1);
        pairs = max_of(1, (chains + kv_tiles / 2) / max_of(1, kv_tiles));
    }

    DASH_HD static bool suits(TileGrid const& g) {
        return Climbing::suits(g) && g.paired && (g.q_rows == g.kv_rows || g.kv_tiles() <= kFewKvTiles);
    }

    DASH_HD int ways() const { return 2; }
    DASH_HD int visits(int kv_tile) const { return grid.q_tiles() - grid.first_query(kv_tile); }
    DASH_HD int visit(int kv_tile, int step, int way) const {
        return way == 0 ? grid.first_query(kv_tile) + step : grid.q_tiles() - 1 - step;
    }
    DASH_HD int rank(int kv_tile, int q_tile, int way) const {
        return way == 0 ? grid.contributors(q_tile) - 1 - kv_tile : kv_tile;
    }
    DASH_HD HeadOrder heads(int kv_tile, int /*group*/) const { return {1, visits(kv_tile), false}; }

    DASH_HD Chain chain(int claim, int heads) const {
        int const kv_tiles = grid.kv_tiles(), block = heads_per_block(heads);
        int const first = quotient(claim, block * kv_tiles) * block;
        int const in_block = min_of(block, heads - first), even = (in_block + 1) / 2;
        int place = claim - first * kv_tiles;
        int const way = place < even * kv_tiles ? 0 : 1;
        if (way == 1) place -= even * kv_tiles;
        int const width = way == 0 ? even : in_block - even;
        Division const row_of_heads = divide(place, width);
        int const row = row_of_heads.quotient;
        return {first + 2 * row_of_heads.rest + way, way == 0 ? kv_tiles - 1 - row : row};
    }
    DASH_HD int cycle_end(int claim, int /*heads*/) const { return claim + 1; }
    DASH_HD int slot(int kv_tile) const { return kv_tile; }
    DASH_HD int resident_ctas_needed() const { return 1; }
    DASH_HD int idle_ctas(int /*ctas*/) const { return 0; }

  private:
    // Blocks of nearly equal size: a small one at the end would leave SMs idle.
    DASH_HD int heads_per_block(int heads) const {
        int const all = ceil_div(heads, 2);
        int const blocks = max_of(1, quotient(all, pairs));
        return 2 * quotient_up(all, blocks);
    }
};

}  // namespace dash::schedule
