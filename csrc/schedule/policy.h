#pragma once

// A policy is a struct made from a TileGrid. All members are pure functions of integers:
//
//   visits(kv_tile)            how many query tiles the chain of a KV tile visits in one head
//   ways()                     1, or 2 where the heads of a pair go different ways: head h goes way h % ways()
//   visit(kv_tile, step, way)  which query tile it visits at a step
//   rank(kv_tile, q_tile, way) the place of its contribution in the query tile's sum
//   heads(kv_tile, group)      the sequence in which the chain walks the query heads of a group (GQA)
//   chain(claim, heads)        the order in which chains are issued
//   cycle_end(claim, heads)    chains of one cycle wait for each other: the first claim after the cycle
//   kWaitsInLine               whole chains wait in line for each other, so a CTA whose chain waits had
//                              better not hold a second one that others are waiting for
//   slot(kv_tile)              the CTA, within a cycle, that the schedule has in mind for it
//   resident_ctas_needed()     the longest cycle
//   idle_ctas(ctas)            how many of the CTAs of an order of issue find no whole cycle, and nothing else
//
// A CTA may hold a second chain while one is running only if both are not of one cycle; since claims
// only grow, that is certain once the counter has reached cycle_end of the running claim. Then every
// chain waits only for chains that are running or were issued before: see docs/architecture.md.

#include "climbing.h"
#include "descending.h"
#include "naive.h"
#include "opposite_heads.h"
#include "rotating.h"
#include "schedule_id.h"
#include "symmetric_shift.h"

namespace dash::schedule {

// Calls `f` with the policy that a schedule's name stands for. The two shifts of DASH are the same without a mask; and
// where the causal shift has no square to climb in, it is the fold.
template <class F>
auto with_policy(ScheduleId schedule, TileGrid const& grid, F&& f) {
    switch (schedule) {
        case ScheduleId::naive:
            return f(Naive(grid));
        case ScheduleId::descending:
            return f(Descending(grid));
        case ScheduleId::shift:
            if (OppositeHeads::suits(grid)) return f(OppositeHeads(grid));
            if (Climbing::suits(grid)) return f(Climbing(grid));
            break;
        case ScheduleId::symmetric_shift:
            break;
    }
    return grid.causal ? f(SymmetricShift(grid)) : f(Rotating(grid));
}

}  // namespace dash::schedule
