#pragma once

#include "arguments.cuh"
#include "config.cuh"
#include "ptx.cuh"

namespace dash {

// A call of printf would cost the whole kernel its register plan, so the last words go to host memory
// that outlives the trap; the host side prints them.
__device__ __forceinline__ void report_stuck(StuckSlot* slot, StuckReport const& report) {
    auto* const complete = static_cast<uint32_t volatile*>(&slot->complete);
    if (atomicCAS(&slot->claimed, 0u, 1u) == 0) {
        slot->report = report;
        __threadfence_system();
        *complete = 1;
        __threadfence_system();
    }
    while (*complete == 0) {
    }
    __trap();
}

// How long a CTA waits. Its end comes after two limits, in the second of which no counter of the launch has moved:
// others may be slow, in a debugger or under a checker. And a machine that stood still for an hour was not waiting:
// nobody looked, so it counts as the longest gap between two looks.
struct Patience {
    static constexpr int kUnit = 10;  // time is counted in 2^10 ns, which 32 bits hold for an hour
    static constexpr uint32_t kLongestGap = 100'000'000 >> kUnit;

    uint32_t last_look = 0, waited = 0, progress = 0;

    // To be asked every few milliseconds.
    __device__ bool is_over(KernelArguments const& args) {
        auto const now = uint32_t(ptx::global_timer_ns() >> kUnit);
        if (last_look != 0) waited += min(now - last_look, kLongestGap);
        last_look = now;
        if (waited <= args.wait_limit) return false;
        waited = 0;
        uint32_t const before = progress;
        progress = 0;
#pragma unroll 1
        for (uint32_t i = 0; i < args.counter_words; ++i) progress += ptx::load_relaxed(args.dq_tickets + i);
        return progress == before;
    }
};

// What Patience is asked with, for a wait of `ns` in all.
inline uint32_t patience_limit(uint64_t ns) {
    uint64_t const limit = ns / 2 >> Patience::kUnit;
    return uint32_t(limit < (1u << 31) ? limit : 1u << 31);
}

// Returns when the ticket stands at `turn`. What was written before is then visible to this
// thread. `where()` gives the report all that is known beside turn and ticket, and is not asked before it is needed.
template <class Where>
__device__ __forceinline__ void wait_for_turn(KernelArguments const& args, uint32_t const* ticket, uint32_t turn,
                                              Where&& where) {
    constexpr uint32_t kLooksATime = 4096;  // the global timer is slow to read: a look takes longer than a turn
    Patience patience;
    for (uint32_t looks = 0;; ++looks) {
        uint32_t const seen = ptx::load_acquire(ticket);
        if (seen == turn) return;
        if (looks % kLooksATime != kLooksATime - 1 || !patience.is_over(args)) continue;
        StuckReport report = where();
        report.turn = turn;
        report.ticket = seen;
        report_stuck(args.stuck, report);
    }
}

}  // namespace dash
