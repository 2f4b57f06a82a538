#pragma once

#include "tile_grid.h"

namespace dash::schedule {

// In which sequence a chain walks the query heads of its KV head (GQA). In a stretch of its visits, `together` heads
// at a time: a query tile in each of these heads, then the next tile; and then the next heads.
//
//   group of 4, together 2, visits q0 q1 q2:   h0q0 h1q0 h0q1 h1q1 h0q2 h1q2   h2q0 h3q0 h2q1 h3q1 h2q2 h3q2
//
// The more heads together, the better chains of unlike length stay in step; the fewer, the less of Q, dO and dQ is
// in use at a time, which for long sequences decides whether it stays in the L2 cache.
struct HeadOrder {
    int together;
    int split;  // the visits before it are walked in all heads, and then the others: two stretches
};

// Visits of a chain in one head, [visit, end), that follow each other in that sequence.
struct HeadRun {
    int head, visit, end;
};

// From a step of the chain on.
DASH_HD HeadRun head_run(HeadOrder order, int group, int visits, int step) {
    int begin = 0, end = order.split > 0 ? order.split : visits;
    if (step >= end * group) {
        step -= end * group;
        begin = end;
        end = visits;
    }
    int const first_head = step / (order.together * (end - begin)) * order.together;
    int const heads = min_of(order.together, group - first_head);
    step -= first_head * (end - begin);
    int const visit = begin + step / heads;
    return {first_head + step % heads, visit, heads == 1 ? end : visit + 1};
}

}  // namespace dash::schedule
