#pragma once

#include "../schedule/tile_grid.h"

namespace dash {

// Queries and keys a tile, by head dimension. Both fit two KV-resident accumulators (dK, dV), the
// scores and one dQ tile into 240 registers a thread; docs/architecture.md has the count.
struct TileShape {
    int q_rows;
    int kv_rows;
};

constexpr DASH_HD TileShape tile_shape(int head_dim) {
    return head_dim == 64 ? TileShape{128, 128} : TileShape{64, 128};
}

// How many rows of O and dO are read at a time for the row statistics.
constexpr int kStatisticsRows = 16;

// How many pairs of queries have their statistics, 16 bytes, in one row of dQ.
constexpr DASH_HD int statistics_pairs_a_row(int head_dim) { return head_dim / 8; }

// In how many pieces the parts of a KV tile add their dK and dV.
constexpr int kPartPieces = 4;

}  // namespace dash
