#pragma once

#include <cuda.h>

#include "../core/backward.h"
#include "../core/group_parts.h"
#include "../core/stuck_report.h"
#include "../schedule/policy.h"

namespace dash {

constexpr float kLog2e = 1.4426950408889634f;

struct KernelArguments {
    // Descriptors for bulk tensor copies: (feature of a panel, row, panel, head, batch).
    CUtensorMap q, k, v, dout, dv;
    CUtensorMap out_rows, dout_rows;  // a few rows at a time, for the statistics
    CUtensorMap statistics;           // the rows of dQ seen as fp32
    CUtensorMap sums[2];  // the sums of dQ in halves: those that begin with either set of blocks (core/l2_sides.h)

    schedule::TileGrid grid;
    int q_tiles, kv_tiles;  // the grid would have to divide
    int blind_tiles;        // query tiles that see no key: the first ones
    int batch, heads_q, heads_k;
    GroupParts parts;  // of the query heads of a KV head
    int sides;         // of the L2 cache: 1 or 2. Each has its share of what follows:
    int chain_heads;   // batch * heads_k * parts / sides: what the schedule calls heads
    int chains;        // chain_heads * kv_tiles
    int q_heads;       // batch * heads_q / sides
    uint32_t dq_sums;  // q_heads * q_tiles

    uint32_t first_place;  // of the sums in its page
    int cycle_ctas;        // how many must run at the same time
    bool ordered;
    float scale;
    float scale_log2;     // scale * log2(e)
    uint32_t wait_limit;  // see Patience
    StuckSlot* stuck;

    float const* lse;
    float const* dlse;        // or null
    unsigned char* measured;  // a place of nobody: see kernel/l2_sides.cuh
    int pages;                // that sums of dQ lie in; 0: their sides do not matter
    unsigned char const* page_sides;
    float* dkv_sum;
    uint32_t* dq_tickets;    // the first of all counters
    uint32_t counter_words;  // of all that follow
    uint32_t* dkv_tickets;
    uint32_t* seats;              // CTAs on each side, and whether side 1 is open
    uint32_t* claims;             // of each side
    uint32_t* statistics_claims;  // of each side
    uint32_t* statistics_done;
    MatrixView dq, dk;
};

}  // namespace dash
