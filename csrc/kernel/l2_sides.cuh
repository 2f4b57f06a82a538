#pragma once

#include "../core/l2_sides.h"
#include "ptx.cuh"

namespace dash {

// How many cycles this SM is away from a block of a place: of a few atomic operations the fastest. They add nothing,
// and few SMs share a word, so that it hardly matters who else looks. Side 0 is where the first block of the place is
// that KernelArguments::measured points to. It is nobody's sum, since a CTA may come, and look, when sums are under
// way. `landing` is in shared memory.
__device__ __forceinline__ uint32_t cycles_to(void* place, int block, uint32_t volatile& landing) {
    unsigned char* const address = static_cast<unsigned char*>(place) + block * kSideBlock + ptx::sm_id() % 128 * 32;
    uint32_t fastest = ~0u;
#pragma unroll 1
    for (int i = 0; i < 3; ++i) {
        uint32_t const begin = ptx::clock();
        // A store waits for what it stores, and so does the clock behind it.
        landing = ptx::fetch_add_relaxed(reinterpret_cast<uint32_t*>(address), 0);
        uint32_t const cycles = ptx::clock() - begin;
        fastest = cycles < fastest ? cycles : fastest;
    }
    return fastest;
}

// Takes the next of `count` things of a side, or, if there is none left, of the other one, and notes which. Returns a
// negative number if there is none on either.
__device__ __forceinline__ int claim(uint32_t* claims, int count, int sides, int& side) {
    for (; sides > 0; --sides) {
        int const number = int(atomicAdd(claims + side, 1u));
        if (number < count) return number;
        if (sides > 1) side ^= 1;
    }
    return -1;
}

// The parity that a place's number gives its first block. The number counts from the begin of a page.
__device__ __forceinline__ uint32_t side_by_number(uint32_t place) { return __popc(place & kPlaceSideBits) & 1; }

}  // namespace dash
