#pragma once

#include "ptx.cuh"

namespace dash {

// The accumulator of a WGMMA with 64 rows. For every block of 8 columns, lane l of warp w holds
//
//   register 4 b + 0, 1:  row 16 w + l / 4,      columns 8 b + 2 (l % 4) + 0, 1
//   register 4 b + 2, 3:  row 16 w + l / 4 + 8,  the same columns
//
// Sums of dK and dV in global memory keep this order ("fragment order"): their register quadruples, as
// float4, are [warpgroup][block][thread of the warpgroup], so that a warp always touches 512 contiguous bytes.

// Four lanes of a row hold column pairs of four blocks each; afterwards lane i holds block i whole.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4]) {
    int const place = threadIdx.x % 4;
    constexpr uint32_t kAllLanes = 0xffffffffu;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        bool const odd = place & 1;
        uint32_t const got = __shfl_xor_sync(kAllLanes, odd ? words[i] : words[i + 1], 1);
        words[i] = odd ? got : words[i];
        words[i + 1] = odd ? words[i + 1] : got;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        bool const high = place & 2;
        uint32_t const got = __shfl_xor_sync(kAllLanes, high ? words[i] : words[i + 2], 2);
        words[i] = high ? got : words[i];
        words[i + 2] = high ? words[i + 2] : got;
    }
}

// Writes four blocks (32 columns) of one row of every quad, 16 bytes a lane. `first` points to the row at
// the first of the columns.
template <class Element>
__device__ __forceinline__ void store_blocks(uint32_t (&words)[4], Element* first, bool valid) {
    transpose_quad(words);
    if (valid) ptx::store_global(first + threadIdx.x % 4 * 8, words[0], words[1], words[2], words[3]);
}

// A staged dQ tile: rows of fp32, of which the pieces of 16 bytes are permuted so that accesses by an
// accumulator's quads don't meet in a bank. Its sum in global memory has the same order.
template <class Config>
struct StagedTile {
    __device__ static int offset(int row, int column) { return row * Config::kHeadDim + (column ^ (row % 4 * 8)); }
};

}  // namespace dash
