#pragma once

#include "arguments.cuh"
#include "config.cuh"
#include "ptx.cuh"

namespace dash {

// A call of printf would cost the whole kernel its register plan, so the last words go to host memory
// that outlives the trap; the host side prints them.
__device__ __forceinline__ void report_stuck(StuckReport* report, StuckReport const& words) {
    *report = words;
    __threadfence_system();
    __trap();
}

// Returns when the ticket stands at `turn`. What was written before is then visible to this
// thread. `where()` gives the report all that is known beside turn and ticket, and is not asked before it is needed.
template <class Where>
__device__ __forceinline__ void wait_for_turn(KernelArguments const& args, uint32_t const* ticket, uint32_t turn,
                                              Where&& where) {
    constexpr uint32_t kLooksATime = 4096;  // the global timer is slow to read: a look takes longer than a turn
    uint64_t start = 0;
    for (uint32_t looks = 0;; ++looks) {
        uint32_t const seen = ptx::load_acquire(ticket);
        if (seen == turn) return;
        if (looks % kLooksATime != kLooksATime - 1) continue;
        uint64_t const now = ptx::global_timer_ns();
        if (start == 0) {
            start = now;
        } else if (now - start > args.wait_limit_ns) {
            StuckReport report = where();
            report.turn = turn;
            report.ticket = seen;
            report_stuck(args.stuck, report);
        }
    }
}

}  // namespace dash
