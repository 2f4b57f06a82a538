#pragma once

#include "arguments.cuh"
#include "config.cuh"
#include "fragments.cuh"
#include "ordering.cuh"

namespace dash {

// The end of a chain: dK and dV go from registers to global memory. If several CTAs share the query
// heads of the KV head, their sums are added first, in the order of the parts.
template <class Config>
struct GradientStore {
    using Element = typename Config::Element;
    static constexpr int kBlocks = Config::kHeadDim / 8;

    KernelArguments const& args;
    Work const& work;
    int const warpgroup;

    __device__ GradientStore(KernelArguments const& a, Work const& w, int wg) : args(a), work(w), warpgroup(wg) {}

    template <class Gradient>
    __device__ void store(Gradient& dk, Gradient& dv) {
        if (args.parts > 1 && !add_parts(dk, dv)) return;
        store_rows(dk, args.dk, args.scale);
        store_rows(dv, args.dv, 1.0f);
    }

  private:
    // Returns whether this part is the last and holds the total.
    template <class Gradient>
    __device__ bool add_parts(Gradient& dk, Gradient& dv) {
        int64_t const tile = (int64_t(work.batch) * args.heads_k + work.kv_head) * args.grid.kv_tiles() + work.kv_tile;
        uint32_t* const ticket = args.dkv_tickets + tile;
        bool const speaker = threadIdx.x == 128;  // the first math thread
        bool const last = work.part + 1 == args.parts;
        if (speaker && work.part > 0)
            wait_for_turn(ticket, work.part, args.wait_limit_ns, args.stuck, StuckReport::kv_tile_parts, work.batch,
                          work.kv_head, work.kv_tile, work.kv_tile);
        sync_math();
        auto* sum = reinterpret_cast<float4*>(args.dkv_sum + tile * 2 * Config::kDkvTileFloats) +
                    warpgroup * kBlocks * 128 + threadIdx.x % 128;
        add_gradient(dk, sum, last);
        add_gradient(dv, sum + Config::kDkvTileFloats / 4, last);
        sync_math();
        if (speaker && !last) ptx::add_release(ticket, 1);
        return last;
    }

    template <class Gradient>
    __device__ void add_gradient(Gradient& gradient, float4* sum, bool last) {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
            if (work.part > 0) {
                float4 const before = __ldcg(sum + b * 128);
                gradient(4 * b) += before.x, gradient(4 * b + 1) += before.y;
                gradient(4 * b + 2) += before.z, gradient(4 * b + 3) += before.w;
            }
            if (!last)
                __stcg(sum + b * 128,
                       make_float4(gradient(4 * b), gradient(4 * b + 1), gradient(4 * b + 2), gradient(4 * b + 3)));
        }
    }

    template <class Gradient>
    __device__ void store_rows(Gradient const& gradient, MatrixView const& view, float scale) {
        int const lane = threadIdx.x % 32;
        int const row = work.kv_tile * Config::kKvRows + warpgroup * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
        Element* const target = static_cast<Element*>(view.data) + work.batch * view.batch_stride +
                                work.kv_head * view.head_stride + row * view.row_stride;
#pragma unroll
        for (int first = 0; first < kBlocks; first += 4)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint32_t words[4];
#pragma unroll
                for (int b = 0; b < 4; ++b) {
                    int const r = 4 * (first + b) + 2 * half;
                    words[b] = ptx::pack<Element>(gradient(r) * scale, gradient(r + 1) * scale);
                }
                store_blocks<Element>(words, target + half * 8 * view.row_stride + first * 8,
                                      row + half * 8 < args.grid.seqlen_k);
            }
    }

    __device__ static void sync_math() {
        cutlass::arch::NamedBarrier::sync(Config::kMathThreads, uint32_t(WarpBarrier::math));
    }
};

}  // namespace dash
