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
//
// A chain that turns walks every other head back, from the last visit of the stretch to the first one, so that chains
// of unlike length which were close together at the end of a head are so in the next one:
//
//   group of 3, together 1, turns:             h0q0 h0q1 h0q2   h1q2 h1q1 h1q0   h2q0 h2q1 h2q2
struct HeadOrder {
    int together;
    int split;  // the visits before it are walked in all heads, and then the others: two stretches
    bool turns;
};

// Visits of a chain in one head that follow each other in that sequence: visit, visit + by, ..., but not end.
struct HeadRun {
    int head, visit, end, by;
    bool enters;  // the chain has not been in this head before
};

// From a step of the chain on.
DASH_HD HeadRun head_run(HeadOrder order, int group, int visits, int step) {
    if (group == 1) return {0, step, visits, 1, step == 0};
    int begin = 0, end = order.split > 0 ? order.split : visits;
    if (step >= end * group) {
        step -= end * group;
        begin = end;
        end = visits;
    }
    int const first_head = quotient(step, order.together * (end - begin)) * order.together;
    int const heads = min_of(order.together, group - first_head);
    step -= first_head * (end - begin);
    Division const visit_and_head = heads == 1 ? Division{step, 0} : divide(step, heads);
    int const place = visit_and_head.quotient, head = first_head + visit_and_head.rest;
    bool const enters = begin == 0 && place == 0;
    if (order.turns && head % 2 == 1) {
        int const visit = end - 1 - place;
        return {head, visit, heads == 1 ? begin - 1 : visit - 1, -1, enters};
    }
    int const visit = begin + place;
    return {head, visit, heads == 1 ? end : visit + 1, 1, enters};
}

}  // namespace dash::schedule
