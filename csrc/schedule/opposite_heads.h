#pragma once

#include "cyclic_groups.h"

namespace dash::schedule {

// The order of issue where the heads of a pair go opposite ways under a causal mask: in each block of heads first the
// chains of the even heads, the highest KV tile of each, then the next lower one of each; and then those of the odd
// heads, the lowest KV tile first. The chain that ends first is followed by the longest one, so that all SMs end
// together.
//
//   4 KV tiles, blocks of two heads:   h0 KV 3, 2, 1, 0   h1 KV 0, 1, 2, 3   h2 KV 3, ...
struct OppositeHeads {
    int kv_tiles;
    int pairs;  // of heads: about so many to a block

    // Even heads with about so many chains: as many as fill the SMs, or, where neighbouring chains of a head are one
    // query tile apart, twice as many: then of two neighbours one starts about a step before the other, and a turn
    // takes about a step.
    DASH_HD OppositeHeads(int kv_tiles_, int chains)
        : kv_tiles(kv_tiles_), pairs(max_of(1, (chains + kv_tiles_ / 2) / max_of(1, kv_tiles_))) {}

    DASH_HD Chain chain(int claim, int heads) const {
        int const block = heads_per_block(heads);
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

  private:
    // Blocks of nearly equal size: a small one at the end would leave SMs idle.
    DASH_HD int heads_per_block(int heads) const {
        int const all = ceil_div(heads, 2);
        int const blocks = max_of(1, quotient(all, pairs));
        return 2 * quotient_up(all, blocks);
    }
};

}  // namespace dash::schedule
