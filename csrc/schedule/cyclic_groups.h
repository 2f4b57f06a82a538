#pragma once

#include "tile_grid.h"

namespace dash::schedule {

// Cyclic orders make chains wait for chains issued after them, so all chains of one cycle must be
// resident together. The bound holds on every full Hopper part (H20 has 78 SMs, H100 PCIe 114) and is
// a constant because the bits may not depend on the device.
constexpr int kMaxCyclicGroup = 64;

// About the number of SMs that share an order of issue on a full chip.
DASH_HD int chains_that_fill(TileGrid const& grid) {
    return grid.two_sides ? kChainsThatFillAChip / 2 : kChainsThatFillAChip;
}

// `members` KV tiles cut into groups of nearly equal size, each group rotating over the `span` query
// tiles that start at `origin`. Groups follow each other in every query tile's order. A group has no more
// members than there are query tiles: two at one query tile would wait for each other.
//
//   span 8, one group of 4: member a starts at 2 a. Neighbours are two tiles apart, and a signal has two steps to
//   cross the chip.
//
//   step      0   1   2   3   4   5   6   7
//   a = 0    q0  q1  q2  q3  q4  q5  q6  q7
//   a = 1    q2  q3  q4  q5  q6  q7  q0  q1      Query tile j is met at step (j - start(a)) mod span:
//   a = 2    q4  q5  q6  q7  q0  q1  q2  q3      first by the member whose start is the closest at or
//   a = 3    q6  q7  q0  q1  q2  q3  q4  q5      below j, then by the members before it, cyclically.
struct CyclicGroups {
    int members;
    int origin;
    int span;
    int group_size;
    int log_apart;  // neighbours start 1, 2 or 4 tiles apart: farther, the L2 cache would not hold what is in between

    DASH_HD CyclicGroups(int members_, int origin_, int span_, int group_size_)
        : members(members_),
          origin(origin_),
          span(span_),
          group_size(group_size_),
          log_apart(4 * group_size <= span   ? 2
                    : 2 * group_size <= span ? 1
                                             : 0) {}

    DASH_HD CyclicGroups(int members_, int origin_, int span_)
        : CyclicGroups(members_, origin_, span_, even_size(members_, span_)) {}

    DASH_HD int groups() const { return ceil_div(members, group_size); }
    // The place of a member in its group.
    DASH_HD int place(int member) const { return divide(member, group_size).rest; }
    DASH_HD int group_begin(int member) const { return member - place(member); }
    DASH_HD int size_at(int begin) const { return min_of(group_size, members - begin); }

    // The query tile where a member's cycle starts.
    DASH_HD int start(int member) const { return origin + (place(member) << log_apart); }

    // The place of `member` in the order of `q_tile`, of which only the members [0, visible) take part.
    DASH_HD int rank(int member, int q_tile, int visible) const {
        int const place = this->place(member), begin = member - place;
        int const size = size_at(begin);
        int const top = min_of(visible - begin, size) - 1;
        int const head = min_of((q_tile - origin) >> log_apart, top);  // the last place that starts at or below q_tile
        return begin + (place <= head ? head - place : head + 1 + top - place);
    }

    // Claims in groups: for each group, for each head of the block, its members. A group is contiguous,
    // so that as many resident CTAs as it has members are enough for progress.
    DASH_HD Chain chain(int claim, int heads_in_block) const {
        int const group = quotient(claim, group_size * heads_in_block);
        int const begin = group * group_size;
        Division const place = divide(claim - begin * heads_in_block, size_at(begin));
        return {place.quotient, begin + place.rest};
    }

    // The first claim after the cycle that `claim` belongs to.
    DASH_HD int cycle_end(int claim, int heads_in_block) const {
        Chain const c = chain(claim, heads_in_block);
        int const begin = group_begin(c.kv_tile);
        return begin * heads_in_block + (c.head + 1) * size_at(begin);
    }

  private:
    DASH_HD static int even_size(int members, int span) {
        int const groups = max_of(1, ceil_div(members, max_of(1, min_of(kMaxCyclicGroup, span))));
        return max_of(1, ceil_div(members, groups));
    }
};

// Heads are issued in blocks of nearly equal size, each of so many first chains or more, a few times as many as SMs
// share the order: the chains that follow, longest first, even out what an unfortunate number of them leaves over.
DASH_HD int heads_per_block(int heads, int first_chains_per_head, int chains) {
    int const blocks = max_of(1, heads * first_chains_per_head / chains);
    return quotient_up(heads, blocks);
}

// The block that a claim belongs to.
struct HeadBlock {
    int first_head;
    int heads;
    int first_claim;
    int claim;  // counted from first_claim

    DASH_HD HeadBlock(int claim_, int heads_, int heads_per_block, int chains_per_head) {
        first_head = quotient(claim_, heads_per_block * chains_per_head) * heads_per_block;
        heads = min_of(heads_per_block, heads_ - first_head);
        first_claim = first_head * chains_per_head;
        claim = claim_ - first_claim;
    }
};

}  // namespace dash::schedule
