#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "../core/backward.h"
#include "../core/l2_sides.h"
#include "driver.cuh"

namespace dash {

inline auto encode_tensor_map() {
    static auto* const function = driver_function<decltype(cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled", 12000);
    if (!function) throw std::runtime_error("the CUDA driver has no cuTensorMapEncodeTiled; it needs CUDA 12");
    return function;
}

// A map of five dimensions for boxes of all of them. Strides are in bytes, from the second dimension on.
inline CUtensorMap encode(char const* name, CUtensorMapDataType type, void* data, cuuint64_t const (&sizes)[5],
                          cuuint64_t const (&strides)[4], cuuint32_t const (&box)[5], CUtensorMapSwizzle swizzle) {
    cuuint32_t const steps[] = {1, 1, 1, 1, 1};
    CUtensorMap map;
    CUresult const status =
        encode_tensor_map()(&map, type, 5, data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                            CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS)
        throw std::invalid_argument(std::string(name) + ": the driver refuses its tensor map (error " +
                                    std::to_string(status) + "); pointer and strides must be multiples of 16 bytes");
    return map;
}

struct Extent {
    int columns, rows, panels, heads, batch;
};

// A map for boxes of `box_rows` rows of one head: panels of `columns` columns, one after the other. Its dimensions are
// (column, row, panel, head, batch). Strides count elements of `element_bytes`.
inline CUtensorMap tensor_map(char const* name, MatrixView const& view, Extent const& extent, int box_rows,
                              CUtensorMapDataType type, int element_bytes, CUtensorMapSwizzle swizzle) {
    cuuint64_t const sizes[] = {cuuint64_t(extent.columns), cuuint64_t(extent.rows), cuuint64_t(extent.panels),
                                cuuint64_t(extent.heads), cuuint64_t(extent.batch)};
    // The stride of a dimension of size one is never used, but it has to be valid.
    auto const bytes = [&](int64_t stride, int size) { return size > 1 ? cuuint64_t(stride * element_bytes) : 16; };
    cuuint64_t const strides[] = {bytes(view.row_stride, extent.rows), bytes(extent.columns, extent.panels),
                                  bytes(view.head_stride, extent.heads), bytes(view.batch_stride, extent.batch)};
    cuuint32_t const box[] = {cuuint32_t(extent.columns), cuuint32_t(box_rows), cuuint32_t(extent.panels), 1, 1};
    return encode(name, type, view.data, sizes, strides, box, swizzle);
}

// A map for halves of the sums of dQ, 16 KB each, by their number; for those in one set of the blocks of their side of
// the L2 cache, or, with one side, for all of them, one after the other. Its dimensions are (1 KB, 4 KB, block, pair of
// blocks, half).
inline CUtensorMap sum_map(float* sums, uint32_t count, int set, int sides) {
    uint32_t const halves = sides > 1 ? kSumPlace / 2 : 4 * kSideBlock;
    uint32_t const next_block = sides == 1 || set == 1 ? kSideBlock : 3 * kSideBlock;
    cuuint64_t const sizes[] = {256, 4, 2, 2, std::max<cuuint64_t>(2 * cuuint64_t(count), 1)};
    cuuint64_t const strides[] = {1024, next_block, halves / 2, halves};
    cuuint32_t const box[] = {256, 4, 2, 2, 1};
    auto* const first = reinterpret_cast<unsigned char*>(sums) + (sides > 1 ? set * kSideBlock : 0);
    return encode("workspace", CU_TENSOR_MAP_DATA_TYPE_FLOAT32, first, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_NONE);
}

}  // namespace dash
