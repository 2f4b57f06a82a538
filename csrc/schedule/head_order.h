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

// A chain's way through its visits in that sequence: where it is, and on to the next stop.
struct HeadWalk {
    int group, visits;
    HeadOrder order;
    int begin, end;  // of the stretch of visits
    int first_head;  // of those that are walked together
    int head, visit;

    HeadWalk() = default;
    DASH_HD HeadWalk(HeadOrder order_, int group_, int visits_)
        : group(group_),
          visits(visits_),
          order(order_),
          begin(0),
          end(order_.split > 0 ? order_.split : visits_),
          first_head(0),
          head(0),
          visit(0) {}

    DASH_HD void next() {
        if (++head < min_of(first_head + order.together, group)) return;
        head = first_head;
        if (++visit < end) return;
        visit = begin;
        first_head += order.together;
        if (first_head >= group) {
            first_head = 0;
            begin = visit = end;
            end = visits;
        }
        head = first_head;
    }
};

}  // namespace dash::schedule
