#pragma once

#include "host_device.h"

namespace dash::schedule {

DASH_HD int min_of(int a, int b) { return a < b ? a : b; }
DASH_HD int max_of(int a, int b) { return a > b ? a : b; }
DASH_HD int ceil_div(int a, int b) { return (a + b - 1) / b; }

// About the number of SMs of a full chip. It shapes the order of issue, and decides into how many parts a group of
// query heads is cut (core/workspace.h), so the bits depend on it: a constant.
constexpr int kChainsThatFillAChip = 128;

struct Division {
    int quotient, rest;
};

// n by d for 0 <= n, 0 < d. On the GPU in a fraction of the time that the operators take there: a chain's claim
// asks for a dozen of them. The estimate is off by one at most, unless the quotient is in the millions.
DASH_HD Division divide(int n, int d) {
#ifdef __CUDA_ARCH__
    int quotient = int(__fdividef(float(n), float(d)));
    int rest = n - quotient * d;
    for (; rest < 0; rest += d) --quotient;
    for (; rest >= d; rest -= d) ++quotient;
    return {quotient, rest};
#else
    return {n / d, n % d};
#endif
}
DASH_HD int quotient(int n, int d) { return divide(n, d).quotient; }
DASH_HD int quotient_up(int n, int d) { return quotient(n + d - 1, d); }

// Which KV tiles meet which query tiles in one head.
//
// Query r sees key c when c < seqlen_k and, under a causal mask, c <= r + (seqlen_k - seqlen_q): the
// mask's lower right corner sits on the matrix's lower right corner.
//
//             KV tile 0  1  2  3
//   query tile 0      #               Two facts make every formula of the policies short: the KV tiles
//              1      #  #            that a query tile sees are a prefix [0, contributors), and the
//              2      #  #  #         query tiles that a KV tile sees are a suffix [first_query, q_tiles).
//              3      #  #  #  #
struct TileGrid {
    int seqlen_q = 0;
    int seqlen_k = 0;
    int q_rows = 1;   // queries a tile
    int kv_rows = 1;  // keys a tile
    bool causal = false;
    bool paired = false;     // heads_in_pairs: the schedule may let the heads of a pair go different ways
    int heads = 1;           // of a batch entry, as chains count them: parts of the query heads of a KV head
    bool two_sides = false;  // of the L2 cache (core/l2_sides.h): each has an order of issue for its half of the heads
    int ctas_an_order = kChainsThatFillAChip;  // that share an order of issue

    DASH_HD int q_tiles() const { return ceil_div(seqlen_q, q_rows); }
    DASH_HD int kv_tiles() const { return ceil_div(seqlen_k, kv_rows); }
    DASH_HD int offset() const { return seqlen_k - seqlen_q; }

    // The first query tile with a query that sees a key of this KV tile.
    DASH_HD int first_query(int kv_tile) const {
        if (!causal) return 0;
        int const first_row = max_of(0, kv_tile * kv_rows - offset());
        return min_of(first_row / q_rows, q_tiles());
    }

    // How many KV tiles add to this query tile's dQ: the KV tiles 0 ... contributors - 1.
    DASH_HD int contributors(int q_tile) const {
        if (!causal) return kv_tiles();
        int const last_row = min_of((q_tile + 1) * q_rows, seqlen_q) - 1;
        int const visible_keys = max_of(0, last_row + offset() + 1);
        return min_of(ceil_div(visible_keys, kv_rows), kv_tiles());
    }

    // Whether some pair of this tile pair must not meet: past the last key, or above the diagonal.
    DASH_HD bool needs_mask(int kv_tile, int q_tile) const {
        int const end_key = (kv_tile + 1) * kv_rows;
        return end_key > seqlen_k || (causal && end_key - 1 > q_tile * q_rows + offset());
    }
};

// Heads come in pairs: an even number of them a batch entry, each with its own K and V.
DASH_HD bool heads_in_pairs(int heads_q, int heads_k) { return heads_q == heads_k && heads_q % 2 == 0; }

// One claim of work: a KV tile of a head, to be walked over its query tiles without interruption.
struct Chain {
    int head;
    int kv_tile;
};

// The order of issue head by head, the first KV tile first.
DASH_HD Chain chain_head_by_head(int claim, int kv_tiles) {
    Division const place = divide(claim, kv_tiles);
    return {place.quotient, place.rest};
}

}  // namespace dash::schedule
