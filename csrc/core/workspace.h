#pragma once

#include <algorithm>
#include <cstdint>

#include "../schedule/policy.h"
#include "backward.h"
#include "group_parts.h"
#include "l2_sides.h"
#include "tile_shape.h"

namespace dash {

// How many query tiles, over all its query heads, a chain must keep when a group is cut into parts, since every part
// pays for a sum of dK and dV. Measured on H200 (docs/experiments.md). Fewer where SMs would be idle otherwise than
// where the cut serves the L2 cache, which at head dimension 64 has half as many bytes to hold.
constexpr int kShortestPart = 32;
constexpr int kShortestEvenPart = 64;  // and where it serves chains that would end unevenly
constexpr int shortest_part_for_cache(int head_dim) { return head_dim == 64 ? 256 : 128; }

// What a batch entry of so many chains of equal length costs, without a unit, both alone on the most common chip and
// among others: alone its last wave of chains is as long as the others, however few they are. Lengths are in query
// tiles.
inline int64_t cost_of_equal_chains(int64_t chains, int64_t length) {
    constexpr int kSms = 132;
    int64_t const alone = (chains + kSms - 1) / kSms * kSms, among_others = chains;
    return (alone + among_others) * length;
}

// How many CTAs share the query heads of one KV head, and how. With one, a CTA walks its KV tile over all query heads
// of the group and dK, dV never leave its registers. The group is cut, and dK, dV are summed in the order of the parts,
//   - where one batch entry alone would leave most SMs idle (MQA). Under a causal mask chains differ in length, and
//     a long one needs a short one beside it on its SM;
//   - where chains of the entry alone would end unevenly: without a mask where they are equal and a last wave of them
//     has few, under a causal mask where whole groups are not enough for a chip;
//   - under a causal mask, where chains are long: the short ones would soon be heads ahead of the long ones, and
//     Q, dO and dQ of all these heads are more than the L2 cache holds. Into pairs of heads, since in the second one
//     two chains come together again; a third one is worth less than a cut costs. Chains that wait in line keep
//     together anyway.
// The bits depend on the cut, so it knows neither the device at hand nor the batch around the entry.
inline GroupParts group_parts(int heads_q, int heads_k, schedule::TileGrid const& grid, int head_dim,
                              bool waits_in_line) {
    int const wanted = (grid.causal ? 2 : 1) * schedule::kChainsThatFillAChip;
    int const group = heads_q / heads_k;
    int64_t const chains = int64_t(heads_k) * grid.kv_tiles();
    // A sum of dK and dV takes about as long as so many query tiles.
    constexpr int kPartSum = 6;
    auto const cost = [&](GroupParts const& p) {
        return cost_of_equal_chains(chains * p.count, int64_t(p.heads) * grid.q_tiles() + (p.count > 1 ? kPartSum : 0));
    };
    GroupParts parts(group, group);
    for (int cut = 2; cut <= group; ++cut) {
        GroupParts const finer(group, schedule::ceil_div(group, cut));
        int64_t const tiles = int64_t(finer.heads) * grid.q_tiles();
        bool const idle = chains * parts.count < wanted && tiles >= kShortestPart;
        bool const long_chains =
            grid.causal && !waits_in_line && group > 3 && finer.heads > 1 && tiles >= shortest_part_for_cache(head_dim);
        bool const few = chains < schedule::kChainsThatFillAChip && chains * parts.count < 2 * wanted;
        bool const uneven = tiles >= kShortestEvenPart && (grid.causal ? few : cost(finer) < cost(parts));
        if (idle || long_chains || uneven) parts = finer;
    }
    return parts;
}

inline GroupParts group_parts(BackwardParams const& p, schedule::TileGrid const& grid) {
    bool const waits_in_line = schedule::with_policy(p.schedule, grid, [](auto const& q) { return q.kWaitsInLine; });
    return group_parts(p.heads_q, p.heads_k, grid, p.head_dim, waits_in_line);
}

inline schedule::TileGrid tile_grid(BackwardParams const& p) {
    TileShape const shape = tile_shape(p.head_dim);
    schedule::TileGrid grid = {p.seqlen_q,    p.seqlen_k,    shape.q_rows,
                               shape.kv_rows, p.causal != 0, schedule::heads_in_pairs(p.heads_q, p.heads_k)};
    grid.heads = p.heads_k * group_parts(p.heads_q, p.heads_k, grid, p.head_dim, false).count;
    return grid;
}

// One allocation, cut into eight. The fp32 sums are tiles in an order that suits the kernel; nobody else
// reads them. All of it begins at a multiple of `alignment`, for which there is room.
struct WorkspaceLayout {
    int64_t measured = 0;     // a place of nobody, to measure how far it is
    int64_t dq_sum;           // float (batch * heads_q, q_tiles, q_rows * head_dim)
    int64_t dkv_sum;          // float (batch * heads_k, kv_tiles, kPartPieces, ...), if parts > 1
    int64_t page_sides;       // bytes, one for each page of 2 MB of dq_sum
    int64_t dq_tickets;       // uint32 (batch * heads_q, q_tiles): reductions done
    int64_t dkv_tickets;      // uint32 (batch * heads_k, kv_tiles, kPartPieces): parts done
    int64_t claims;           // uint32 (7): CTAs on either side of the L2 cache; whether side 1 is open; chains
                              // claimed on either side; query tiles claimed there for their statistics
    int64_t statistics_done;  // uint32 (batch * heads_q): query tiles whose statistics are there
    int64_t counters;         // uint32 words from dq_tickets on, all cleared by prepare
    int64_t alignment;
    int64_t bytes;  // with what may be skipped in front
};

inline WorkspaceLayout workspace_layout(BackwardParams const& p) {
    TileShape const shape = tile_shape(p.head_dim);
    schedule::TileGrid const grid = tile_grid(p);
    int const parts = group_parts(p, grid).count;
    int64_t const q_tiles = int64_t(p.batch) * p.heads_q * grid.q_tiles();
    int64_t const kv_tiles = int64_t(p.batch) * p.heads_k * grid.kv_tiles();
    int64_t const dq_bytes = grid.kv_tiles() > 1 ? q_tiles * shape.q_rows * p.head_dim * 4 : 0;
    int64_t const dkv_bytes = parts > 1 ? kv_tiles * 2 * shape.kv_rows * p.head_dim * 4 : 0;
    WorkspaceLayout w;
    w.dq_sum = dq_bytes > 0 ? kSumPlace : 0;
    w.dkv_sum = w.dq_sum + dq_bytes;
    w.page_sides = w.dkv_sum + dkv_bytes;
    w.dq_tickets = w.page_sides + (std::min<int64_t>(dq_bytes / kPageBytes + 2, kMostPages) + 3) / 4 * 4;
    w.dkv_tickets = w.dq_tickets + q_tiles * 4;
    w.claims = w.dkv_tickets + (parts > 1 ? kv_tiles * kPartPieces * 4 : 0);
    w.statistics_done = w.claims + 28;
    int64_t const end = w.statistics_done + int64_t(p.batch) * p.heads_q * 4;
    w.counters = (end - w.dq_tickets) / 4;
    w.alignment = dq_bytes > 0 ? kSumPlace : kWorkspaceAlignment;
    w.bytes = end + w.alignment - kWorkspaceAlignment;
    return w;
}

}  // namespace dash
