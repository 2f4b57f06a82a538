#pragma once

#include "../core/stuck_report.h"
#include "ptx.cuh"

namespace dash {

// A call of printf would cost the whole kernel its register plan, so the last words go to host memory
// that outlives the trap; the host side prints them.
__device__ __forceinline__ void report_stuck(StuckReport* report, StuckReport const& words) {
    *report = words;
    __threadfence_system();
    __trap();
}

// Returns when `turn` contributions have landed. What they wrote is then visible to this thread.
__device__ __forceinline__ void wait_for_turn(uint32_t const* ticket, uint32_t turn, uint64_t limit_ns,
                                              StuckReport* report, StuckReport::Sum sum, int batch, int head, int tile,
                                              int kv_tile) {
    constexpr uint32_t kLooksATime = 4096;  // the global timer is slow to read: a look takes longer than a turn
    uint64_t start = 0;
    for (uint32_t looks = 0, seen; (seen = ptx::load_acquire(ticket)) != turn; ++looks) {
        if (looks % kLooksATime != kLooksATime - 1) continue;
        uint64_t const now = ptx::global_timer_ns();
        if (start == 0)
            start = now;
        else if (now - start > limit_ns)
            report_stuck(report, {sum, batch, head, tile, kv_tile, turn, seen});
    }
}

}  // namespace dash
