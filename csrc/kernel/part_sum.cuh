#pragma once

#include "config.cuh"
#include "fragments.cuh"

namespace dash {

// The math warps' side of a sum over parts: several CTAs share the query heads of a KV head, and their dK and dV are
// added in global memory, in the order of the parts. All but the last hand theirs to the writers, half a gradient at
// a time; the last gets the sums of the others by the same buffers and has the totals in its registers afterwards.
template <class Config>
struct PartSum {
    static constexpr int kBlocks = Config::kHeadDim / 16;  // of a half

    typename Config::Shared& shared;
    int const warpgroup;
    bool const last;
    uint32_t use;  // how often buffers were used before

    __device__ PartSum(typename Config::Shared& s, int wg, bool l, uint32_t u)
        : shared(s), warpgroup(wg), last(l), use(u) {}

    template <class Gradient>
    __device__ void pass(Gradient& dk, Gradient& dv) {
        pass_half<0>(dv);
        pass_half<1>(dv);
        pass_half<2>(dk);
        pass_half<3>(dk);
    }

  private:
    template <int kHalf, class Gradient>
    __device__ void pass_half(Gradient& gradient) {
        typename Config::DqPlace const stage(use + kHalf);
        constexpr int kFirst = kHalf % 2 * kBlocks * 4;
        uint32_t const place = cute::cast_smem_ptr_to_uint(shared.dq[stage.slot]) +
                               (warpgroup * kBlocks * 128 + ptx::thread_index() % 128) * 16;
        // Also if nothing is stored: the parity of part_sum_full says nothing before the writer was here the last time.
        shared.dq_empty[stage.slot].wait(stage.parity ^ 1);
        if (last) {
            shared.dq_full[stage.slot].arrive();
            shared.part_sum_full[stage.slot].wait(kHalf / 2);  // two a chain in each buffer
#pragma unroll
            for (int b = 0; b < kBlocks; ++b) {
                float4 const sum = ptx::load_shared<float4>(place + b * 128 * 16);
                gradient(kFirst + 4 * b) += sum.x;
                gradient(kFirst + 4 * b + 1) += sum.y;
                gradient(kFirst + 4 * b + 2) += sum.z;
                gradient(kFirst + 4 * b + 3) += sum.w;
            }
        } else {
#pragma unroll
            for (int b = 0; b < kBlocks; ++b)
                ptx::store_shared_quad(place + b * 128 * 16, gradient(kFirst + 4 * b), gradient(kFirst + 4 * b + 1),
                                       gradient(kFirst + 4 * b + 2), gradient(kFirst + 4 * b + 3));
            shared.dq_full[stage.slot].arrive();
        }
    }
};

}  // namespace dash
