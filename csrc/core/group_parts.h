#pragma once

#include "../schedule/tile_grid.h"

namespace dash {

// How the query heads of one KV head are shared out: to `count` chains, `heads` each, but the first one has what is
// left over. It comes first in the sum of dK and dV, so nobody waits for it longer than it works.
//
//   group of 7, heads 2:   0 | 1 2 | 3 4 | 5 6
struct GroupParts {
    int group, heads, count;

    DASH_HD explicit GroupParts(int group_ = 1, int heads_ = 1)
        : group(group_), heads(heads_), count(schedule::ceil_div(group_, heads_)) {}

    DASH_HD int begin(int part) const { return part > 0 ? group - (count - part) * heads : 0; }
    DASH_HD int size(int part) const { return part > 0 ? heads : group - (count - 1) * heads; }
};

}  // namespace dash
