#pragma once

#include <cstdint>

namespace dash {

// What a CTA that waited too long for its turn leaves behind, in host memory.
struct StuckReport {
    enum Sum : int32_t { none = 0, query_tile = 1, kv_tile_parts = 2, row_statistics = 3 };
    Sum sum;  // none: nothing happened
    int32_t batch, head, tile;
    int32_t kv_tile;        // of the waiting chain
    uint32_t turn, ticket;  // what it waited for, what it saw last
};

}  // namespace dash
