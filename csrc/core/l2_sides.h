#pragma once

#include <cstdint>

#include "../schedule/cyclic_groups.h"

namespace dash {

// The L2 cache of a Hopper chip has two sides, each with half of the SMs and half of the memory next to it. What an SM
// adds to memory on the other side goes through the link between them, which is slower and costs more energy. So half
// of the KV heads belong to each side: their chains are claimed by its SMs first, and their sums of dQ lie in its
// memory. Bits know nothing of it: an SM that has nothing left to claim helps the other side, and a side that was
// taken for the other one only costs time.
//
// Memory changes sides every 4 KB. On H200, measured by the time that atomic operations take (304 cycles near, 500
// far), a block's side is the parity of these bits of its address,
constexpr uint32_t kSideBits = 0xab000;
// and of a bit for its page of 2 MB, which belongs to the physical address: each call measures it anew. So a place of
// 64 KB has room for a sum of either side:
//
//   block of 4 KB    0 1 2 3 4 5 6 7   8 9 . . . . . 15
//   one side         # . . # # . . #   . # # . . # # .
//   the other one    . # # . . # # .   # . . # # . . #
//
// In half a place these are two sets of four blocks: {0, 3, 4, 7} and {1, 2, 5, 6}. Whoever has one of them in the
// first half has the other one in the second.
constexpr uint32_t kSideBlock = 4096;
constexpr uint32_t kSumPlace = 16 * kSideBlock;
constexpr uint32_t kPageBytes = 2 << 20;
constexpr int kPlacesAPage = kPageBytes / kSumPlace;
constexpr uint32_t kPlaceSideBits = kSideBits / kSumPlace & (kPlacesAPage - 1);
static_assert((kSideBits / kSideBlock & 15) == 0b1011, "the sets of blocks");

// Of more pages, 4 GB, the sides are not measured.
constexpr int kMostPages = 2048;

// On how many sides a call of so many KV heads, each cut into parts, runs. On one if the heads do not fall into halves
// (of pairs, where a schedule sends the heads of a pair different ways), if there are too few chains to be worth a
// measurement, if a side might not have the CTAs that a cycle of chains needs at a time, or if cycles would leave more
// than a tenth of a side idle and less of both sides together.
template <class Policy>
int l2_sides(int64_t heads, int parts, Policy const& policy, int cycle_ctas, int ctas_a_side) {
    int const kv_tiles = policy.grid.kv_tiles();
    bool const halves = heads % (2 * policy.ways()) == 0;
    bool const worth_it = kv_tiles > 1 && heads * parts * kv_tiles >= 3 * schedule::kChainsThatFillAChip;
    if (!halves || !worth_it || cycle_ctas > ctas_a_side) return 1;
    int const idle = policy.idle_ctas(ctas_a_side);
    return 10 * idle > ctas_a_side && policy.idle_ctas(2 * ctas_a_side) < 2 * idle ? 1 : 2;
}

// How many CTAs each side should have at the least: if it has half of the SMs, and those that are left to others are
// all its. Progress does not rest on it, but on side_1_opens.
inline int ctas_a_side(int sms, int sm_margin) { return sms / 2 - sm_margin; }

// The grid as the orders of issue, one or two, are made from it.
inline schedule::TileGrid issued_on(int sides, int ctas, schedule::TileGrid grid) {
    grid.two_sides = sides > 1;
    grid.ctas_an_order = ctas / sides;
    return grid;
}

// Whether CTAs begin with the chains of side 1, by how many have come on either side. Chains of a cycle wait for each
// other: with too few CTAs each side would wait for the other one's. It is decided once; if not, those of side 1 begin
// on side 0. Who finds nothing left goes over to the other side.
DASH_HD bool side_1_opens(int cycle_ctas, int ctas_on_0, int ctas_on_1) {
    return schedule::min_of(ctas_on_0, ctas_on_1) >= cycle_ctas;
}

}  // namespace dash
