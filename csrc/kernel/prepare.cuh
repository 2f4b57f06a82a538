#pragma once

#include <cuda_runtime.h>
#include <cutlass/numeric_types.h>

#include <cstdint>

#include "../core/backward.h"
#include "l2_sides.cuh"

namespace dash {

struct PrepareArguments {
    uint32_t* counters;
    int64_t counter_words;
    float4* dq_sums;
    int64_t quads_to_clear;     // of them: an ordered sum starts with a store
    unsigned char* measured;    // a place of nobody
    unsigned char* page_sides;  // of the pages that the sums lie in
    int pages;                  // 0: their sides do not matter
    uint32_t first_place;
    MatrixView dq;
    int heads_q;
    int64_t blind_rows;  // of dQ, over all heads and batch entries: of query tiles that see no key
    int blind_rows_a_head;
};

constexpr int kPrepareThreads = 256;

// Finds out which side of the L2 cache pages of memory are on. Side 0 is where the first block of `measured` is; so a
// page begins on side 0 if the same one of its first two blocks is the nearer one to this SM. Two warps, one for each
// of these blocks, measure a page, and the last two `measured`.
constexpr int kPagesABlock = kPrepareThreads / 32 / 2 - 1;

__device__ __forceinline__ void measure_pages(PrepareArguments const& args) {
    __shared__ uint32_t cycles[kPagesABlock + 1][2];
    int const first_page = blockIdx.x * kPagesABlock;
    if (first_page >= args.pages) return;
    int const measured = threadIdx.x / 64, page = first_page + measured;
    uint32_t const place = page > 0 ? page * kPlacesAPage : args.first_place;
    bool const is_page = measured < kPagesABlock;
    if (threadIdx.x % 32 == 0 && (!is_page || page < args.pages)) {
        unsigned char* const sum =
            reinterpret_cast<unsigned char*>(args.dq_sums) + int64_t(place - args.first_place) * kSumPlace;
        uint32_t& result = cycles[measured][threadIdx.x / 32 % 2];
        result = cycles_to(is_page ? sum : args.measured, threadIdx.x / 32 % 2, result);
    }
    __syncthreads();
    auto const second_is_nearer = [&](int of) { return uint32_t(cycles[of][1] < cycles[of][0]); };
    if (threadIdx.x % 64 == 0 && is_page && page < args.pages)
        args.page_sides[page] = second_is_nearer(kPagesABlock) ^ second_is_nearer(measured) ^ side_by_number(place);
}

// Clears what the main kernel counts with, and writes dQ where nobody contributes.
template <class Element, int kHeadDim>
__global__ void __launch_bounds__(kPrepareThreads) prepare_kernel(__grid_constant__ PrepareArguments const args) {
    // The main kernel may set up while this one runs; it waits for its end where it needs it.
    cudaTriggerProgrammaticLaunchCompletion();
    int64_t const thread = int64_t(blockIdx.x) * kPrepareThreads + threadIdx.x;
    int64_t const threads = int64_t(gridDim.x) * kPrepareThreads;
    for (int64_t i = thread; i < args.counter_words; i += threads) args.counters[i] = 0;
    for (int64_t i = thread; i < args.quads_to_clear; i += threads) args.dq_sums[i] = float4{};

    measure_pages(args);

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
