#pragma once

#include <cuda_runtime.h>
#include <cutlass/numeric_types.h>

#include <cstdint>

#include "../core/backward.h"

namespace dash {

struct PrepareArguments {
    uint32_t* counters;
    int64_t counter_words;
    float4* dq_sum;  // to be cleared, or null: an ordered sum starts with a store
    int64_t dq_sum_quads;
    MatrixView dq;
    int heads_q;
    int64_t blind_rows;  // of dQ, over all heads and batch entries: of query tiles that see no key
    int blind_rows_a_head;
};

constexpr int kPrepareThreads = 256;

// Clears what the main kernel counts with, and writes dQ where nobody contributes.
template <class Element, int kHeadDim>
__global__ void __launch_bounds__(kPrepareThreads) prepare_kernel(__grid_constant__ PrepareArguments const args) {
    // The main kernel may set up while this one runs; it waits for its end where it needs it.
    cudaTriggerProgrammaticLaunchCompletion();
    int64_t const thread = int64_t(blockIdx.x) * kPrepareThreads + threadIdx.x;
    int64_t const threads = int64_t(gridDim.x) * kPrepareThreads;
    for (int64_t i = thread; i < args.counter_words; i += threads) args.counters[i] = 0;
    for (int64_t i = thread; i < args.dq_sum_quads; i += threads) args.dq_sum[i] = float4{};

    constexpr int kPieces = kHeadDim / 8;  // of 16 bytes
    for (int64_t i = thread; i < args.blind_rows * kPieces; i += threads) {
        int64_t const row = i / kPieces, head = row / args.blind_rows_a_head;
        Element* const dq = static_cast<Element*>(args.dq.data) + head / args.heads_q * args.dq.batch_stride +
                            head % args.heads_q * args.dq.head_stride +
                            row % args.blind_rows_a_head * args.dq.row_stride;
        reinterpret_cast<uint4*>(dq)[i % kPieces] = uint4{};
    }
}

}  // namespace dash
