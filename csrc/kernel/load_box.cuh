#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/arch/copy_sm90_tma.hpp>

namespace dash {

// Asks for the rows of one head from `row` on, as many as the map's box has. They arrive as panels of 64 columns, one
// after the other; rows past the end of the tensor are filled with zeros.
__device__ __forceinline__ void load_box(CUtensorMap const& map, cutlass::arch::ClusterTransactionBarrier& full,
                                         void* target, int row, int head, int batch) {
    constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    cute::SM90_TMA_LOAD_5D::copy(&map, reinterpret_cast<uint64_t*>(&full), kHint, target, 0, row, 0, head, batch);
}

}  // namespace dash
