#pragma once

#include "head_order.h"

namespace dash::schedule {

// FlashAttention-3's order: every chain climbs, every query tile collects KV tile 0 first.
//
//   step      0   1   2   3        Chain i meets query tile j while chain i-1 is there too, so it
//   KV 0     q0  q1  q2  q3        waits one reduction for each chain before it: (n-1) r in all.
//   KV 1     q0  q1  q2  q3
//   KV 2     q0  q1  q2  q3        A chain waits for chains issued before it only, so any number of
//   KV 3     q0  q1  q2  q3        resident CTAs makes progress.
struct Naive {
    static constexpr char const* kName = "naive";
    static constexpr bool kWaitsInLine = true;
    TileGrid grid;

    DASH_HD explicit Naive(TileGrid const& g) : grid(g) {}

    DASH_HD int ways() const { return 1; }
    DASH_HD int visits(int kv_tile) const { return grid.q_tiles() - grid.first_query(kv_tile); }
    DASH_HD int visit(int kv_tile, int step, int /*way*/) const { return grid.first_query(kv_tile) + step; }
    DASH_HD int rank(int kv_tile, int /*q_tile*/, int /*way*/) const { return kv_tile; }
    DASH_HD HeadOrder heads(int kv_tile, int group) const { return {group, visits(kv_tile), false}; }

    DASH_HD Chain chain(int claim, int /*heads*/) const { return chain_head_by_head(claim, grid.kv_tiles()); }
    DASH_HD int cycle_end(int claim, int /*heads*/) const { return claim + 1; }
    DASH_HD int slot(int kv_tile) const { return kv_tile; }
    DASH_HD int resident_ctas_needed() const { return 1; }
    DASH_HD int idle_ctas(int /*ctas*/) const { return 0; }
};

}  // namespace dash::schedule
