#pragma once

#include <cstdint>

namespace dash {

// What a CTA that waited too long for its turn leaves behind.
struct StuckReport {
    enum Sum : int32_t { query_tile = 0, kv_tile_parts = 1, row_statistics = 2 };
    Sum sum;
    int32_t batch, head, tile;
    int32_t kv_tile;        // of the waiting chain
    uint32_t turn, ticket;  // what it waited for, what it saw last
};

// Where it leaves it: in host memory, a slot for each device. CTAs often give up together, and one of them writes.
// Atomic operations on host memory are atomic for the CTAs of one device, and maybe not between devices.
struct StuckSlot {
    uint32_t claimed;   // by the CTA that writes
    uint32_t complete;  // the report can be read
    StuckReport report;
};

}  // namespace dash
