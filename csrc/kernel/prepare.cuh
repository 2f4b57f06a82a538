#pragma once

#include <cuda_runtime.h>
#include <cutlass/numeric_types.h>

#include <cmath>
#include <cstdint>

#include "../core/backward.h"
#include "../schedule/tile_grid.h"

namespace dash {

struct PrepareArguments {
    MatrixView out, dout, dq;
    float const* lse;
    schedule::TileGrid grid;
    int heads_q;
    uint32_t* counters;
    int64_t counter_words;
    float4* dq_sum;  // to be cleared, or null: an ordered sum starts with a store
    int64_t dq_sum_quads;
};

constexpr int kPrepareRows = 32;
constexpr int kPrepareThreads = 256;

// For every pair of neighbouring queries: (LSE, LSE, D, D) into the first 16 bytes of the first one's dQ
// row, LSE in base 2 and D = sum(O * dO). It lies there until the query tile's last contributor writes dQ.
// Also clears what the main kernel counts with, and writes dQ where nobody contributes.
//
// A block takes 32 queries of one head; a row's 16-byte pieces lie on neighbouring lanes.
template <class Element, int kHeadDim>
__global__ void __launch_bounds__(kPrepareThreads) prepare_kernel(__grid_constant__ PrepareArguments const args) {
    constexpr int kElements = 8;  // in 16 bytes
    constexpr int kLanes = kHeadDim / kElements;
    constexpr int kPasses = kPrepareRows * kLanes / kPrepareThreads;
    constexpr float kLog2e = 1.4426950408889634f;
    int const head = blockIdx.y, batch = blockIdx.z;
    int const piece = threadIdx.x % kLanes;
    int const first_row = blockIdx.x * kPrepareRows + threadIdx.x / kLanes;

    int64_t const thread =
        ((int64_t(batch) * gridDim.y + head) * gridDim.x + blockIdx.x) * kPrepareThreads + threadIdx.x;
    int64_t const threads = int64_t(gridDim.x) * gridDim.y * gridDim.z * kPrepareThreads;
    for (int64_t i = thread; i < args.counter_words; i += threads) args.counters[i] = 0;
    if (args.dq_sum)
        for (int64_t i = thread; i < args.dq_sum_quads; i += threads) args.dq_sum[i] = float4{};

    auto const row_of = [&](MatrixView const& view, int row) {
        return static_cast<Element*>(view.data) + batch * view.batch_stride + head * view.head_stride +
               row * view.row_stride;
    };
    // All loads first, so that their latencies pass together.
    uint4 out[kPasses], dout[kPasses];
    float lse[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
        int const row = first_row + pass * (kPrepareThreads / kLanes);
        out[pass] = dout[pass] = uint4{};
        lse[pass] = INFINITY;
        if (row < args.grid.seqlen_q) {
            lse[pass] = __ldg(args.lse + (int64_t(batch) * args.heads_q + head) * args.grid.seqlen_q + row) * kLog2e;
            out[pass] = __ldg(reinterpret_cast<uint4 const*>(row_of(args.out, row)) + piece);
            dout[pass] = __ldg(reinterpret_cast<uint4 const*>(row_of(args.dout, row)) + piece);
        }
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
        int const row = first_row + pass * (kPrepareThreads / kLanes);
        auto const* o = reinterpret_cast<Element const*>(&out[pass]);
        auto const* g = reinterpret_cast<Element const*>(&dout[pass]);
        float d = 0;
#pragma unroll
        for (int i = 0; i < kElements; ++i) d = fmaf(float(o[i]), float(g[i]), d);
#pragma unroll
        for (int lane = kLanes / 2; lane > 0; lane /= 2) d += __shfl_xor_sync(0xffffffffu, d, lane);

        // A query that sees no key has probability 0 everywhere: 2^(S - inf).
        if (lse[pass] == -INFINITY) lse[pass] = INFINITY;
        float const next_d = __shfl_down_sync(0xffffffffu, d, kLanes);
        float const next_lse = __shfl_down_sync(0xffffffffu, lse[pass], kLanes);

        if (row >= args.grid.seqlen_q) continue;
        if (args.grid.contributors(row / args.grid.q_rows) == 0)
            reinterpret_cast<uint4*>(row_of(args.dq, row))[piece] = uint4{};
        else if (piece == 0 && row % 2 == 0)
            *reinterpret_cast<float4*>(row_of(args.dq, row)) = float4{lse[pass], next_lse, d, next_d};
    }
}

}  // namespace dash
