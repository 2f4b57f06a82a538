#pragma once

#include "head_order.h"

namespace dash::schedule {

// Query tiles from the last to the first. Under a causal mask every chain starts together at the last
// query tile and the short chains (high KV tiles) end first, which frees their CTAs for the long
// chains of the next head. (DASH, section on the causal mask.)
//
//   step      0   1   2   3
//   KV 0     q3  q2  q1  q0
//   KV 1     q3  q2  q1
//   KV 2     q3  q2
//   KV 3     q3
//
// A chain waits for chains issued before it only.
struct Descending {
    static constexpr char const* kName = "descending";
    static constexpr bool kWaitsInLine = true;
    TileGrid grid;

    DASH_HD explicit Descending(TileGrid const& g) : grid(g) {}

    DASH_HD int ways() const { return 1; }
    DASH_HD int visits(int kv_tile) const { return grid.q_tiles() - grid.first_query(kv_tile); }
    DASH_HD int visit(int /*kv_tile*/, int step, int /*way*/) const { return grid.q_tiles() - 1 - step; }
    DASH_HD int rank(int kv_tile, int /*q_tile*/, int /*way*/) const { return kv_tile; }
    DASH_HD HeadOrder heads(int kv_tile, int group) const { return {group, visits(kv_tile), false}; }

    DASH_HD Chain chain(int claim, int /*heads*/) const { return chain_head_by_head(claim, grid.kv_tiles()); }
    DASH_HD int cycle_end(int claim, int /*heads*/) const { return claim + 1; }
    DASH_HD int slot(int kv_tile) const { return kv_tile; }
    DASH_HD int resident_ctas_needed() const { return 1; }
    DASH_HD int idle_ctas(int /*ctas*/) const { return 0; }
};

}  // namespace dash::schedule
