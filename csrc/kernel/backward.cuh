#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "l2_sides.cuh"
#include "launch.cuh"
#include "loader.cuh"
#include "math.cuh"
#include "row_statistics.cuh"
#include "writer.cuh"

namespace dash {

// One persistent CTA an SM: warpgroup 0 moves data (a loader, two writers, one who works out
// row statistics), warpgroups 1 and 2 compute.
template <class Config, class Policy>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_kernel(__grid_constant__ KernelArguments const args, __grid_constant__ Policy const policy) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    auto& shared = *reinterpret_cast<typename Config::Shared*>(shared_bytes);

    if (threadIdx.x == 0) {
        shared.k_full.init(1);
        shared.v_full.init(1);
        shared.k_empty.init(Config::kMathThreads);
        shared.dv_full.init(Config::kMathThreads);
        for (auto& barrier : shared.q_full) barrier.init(1);
        for (auto& barrier : shared.q_empty) barrier.init(Config::kMathThreads);
        for (auto& barrier : shared.dout_full) barrier.init(1);
        for (auto& barrier : shared.dout_empty) barrier.init(Config::kMathThreads);
        for (auto& desk : shared.statistics_desk)
            for (auto& barrier : desk.full) barrier.init(1);
        for (auto& barrier : shared.dq_total_full) barrier.init(1);
        for (auto& barrier : shared.part_sum_full) barrier.init(1);
        for (auto& tile : shared.complete) tile.rows = 0;
        for (auto& barrier : shared.dq_full) barrier.init(Config::kMathThreads);
        for (auto& barrier : shared.dq_empty) barrier.init(32);
        for (auto& barrier : shared.chain_full) barrier.init(1);
        for (auto& barrier : shared.chain_empty) barrier.init(Config::kMathThreads + Config::kWriterWarps * 32);
        cutlass::arch::fence_barrier_init();
    } else if (threadIdx.x % 32 == 0 && threadIdx.x <= 64) {
        // While the prepare kernel is at work.
        int const block = threadIdx.x / 32 - 1;
        uint32_t& cycles = shared.cycles_to_block[block];
        cycles = args.sides > 1 ? cycles_to(args.measured, block, cycles) : 0;
    }
    __syncthreads();
    // The launch may overlap the end of the prepare kernel; what that kernel writes is needed from here on.
    cudaGridDependencySynchronize();

    int const warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp < 4) {
        cutlass::arch::warpgroup_reg_dealloc<Config::kServiceRegisters>();
        static_assert(Config::kFirstWriterWarp + Config::kWriterWarps == 4);
        if (warp == 1)
            RowStatistics<Config>(args, shared.statistics_desk[0], shared.rows).run(shared.side());
        else if (warp >= Config::kFirstWriterWarp)
            Writer<Config>(args, shared).run();
        else if (cute::elect_one_sync())
            Loader<Config, Policy>(args, policy, shared).run();
    } else {
        cutlass::arch::warpgroup_reg_alloc<Config::kMathRegisters>();
        // In the beginning all wait for statistics: the first math warps help, in memory that is not needed yet.
        if (warp < 4 + Config::kStatisticsHelpers)
            RowStatistics<Config>(args, shared.statistics_desk[warp - 3], shared.helper_rows(warp - 4))
                .run(shared.side(), tiles_a_helper(args, Config::kStatisticsHelpers));
        __syncwarp();
        Math<Config>(args, shared).run();
    }
}

template <class Element, int kHeadDim, class Policy>
cudaError_t launch_backward(KernelArguments const& args, int ctas, cudaStream_t stream) {
    using Configuration = Config<Element, kHeadDim>;
    auto* const kernel = &backward_kernel<Configuration, Policy>;
    constexpr int kSharedBytes = sizeof(typename Configuration::Shared);
    cudaError_t const status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (status != cudaSuccess) return status;
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = ctas;
    config.blockDim = Configuration::kThreads;
    config.dynamicSmemBytes = kSharedBytes;
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, args, Policy(args.grid));
}

}  // namespace dash
