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

    schedule::TileGrid grid;
    int q_tiles, kv_tiles;  // the grid would have to divide
    int blind_tiles;        // query tiles that see no key: the first ones
    int batch, heads_q, heads_k;
    GroupParts parts;  // of the query heads of a KV head
    int chain_heads;   // batch * heads_k * parts: what the schedule calls heads
    int chains;
    bool ordered;
    float scale;
    float scale_log2;  // scale * log2(e)
    uint64_t wait_limit_ns;
    StuckReport* stuck;

    float const* lse;
    float* dq_sum;
    float* dkv_sum;
    uint32_t* dq_tickets;
    uint32_t* dkv_tickets;
    uint32_t* claims;
    uint32_t* statistics_claims;
    uint32_t* statistics_done;
    MatrixView dq, dk;
};

}  // namespace dash
