#pragma once

#include <cute/algorithm/gemm.hpp>

#include "arguments.cuh"
#include "config.cuh"
#include "fragments.cuh"
#include "gradient_store.cuh"

namespace dash {

// Role: a warpgroup that computes, for its 64 of the KV tile's rows, one query tile after the other:
//
//   S^T = K Q^T    P = exp2(scale log2(e) S - LSE)    dV += P^T dO
//   dP^T = V dO^T  dS = P (dP - D)                    dK += dS^T Q      dQ = dS K  (both warpgroups)
template <class Config>
struct Math {
    using Shared = typename Config::Shared;
    using Element = typename Config::Element;
    using QPlace = typename Config::QPlace;
    using DoutPlace = typename Config::DoutPlace;
    static constexpr int kScoreBlocks = Config::kQRows / 8;

    using Scores = decltype(cute::partition_fragment_C(
        typename Config::MmaScores{}, cute::Shape<cute::Int<Config::kKvRows>, cute::Int<Config::kQRows>>{}));
    using Gradient = decltype(cute::partition_fragment_C(
        typename Config::MmaDk{}, cute::Shape<cute::Int<Config::kKvRows>, cute::Int<Config::kHeadDim>>{}));
    using DqBlock = decltype(cute::partition_fragment_C(
        typename Config::MmaDq{}, cute::Shape<cute::Int<Config::kQRows>, cute::Int<Config::kHeadDim>>{}));
    using Weights = decltype(cute::make_tensor<Element>(cute::partition_shape_A(
        typename Config::MmaDv{}, cute::Shape<cute::Int<Config::kKvRows>, cute::Int<Config::kQRows>>{})));

    KernelArguments const& args;
    Shared& shared;

    // Asked for anew at each use: a value derived from it is then not kept over the loop, where every
    // register counts.
    __device__ static int lane() { return ptx::thread_index() % 32; }
    __device__ static int warp() { return ptx::thread_index() / 32 % 4; }  // within the warpgroup
    // 0 or 1. The shuffle tells the compiler that it is one number for the warp: descriptors that depend on it
    // stay in uniform registers.
    __device__ static int warpgroup() { return __shfl_sync(0xffffffffu, ptx::thread_index() / 128 - 1, 0); }

    __device__ Math(KernelArguments const& a, Shared& s) : args(a), shared(s) {}

    __device__ void run() {
        using namespace cute;
        Tensor k = make_tensor(make_smem_ptr(shared.k), typename Config::KvLayout{});
        Tensor kt = make_tensor(make_smem_ptr(shared.k), typename Config::KvTransposed{});
        Tensor v = make_tensor(make_smem_ptr(shared.v), typename Config::KvLayout{});
        Tensor q = make_tensor(make_smem_ptr(shared.q[0]), typename Config::QLayout{});
        Tensor qt = make_tensor(make_smem_ptr(shared.q[0]), typename Config::QTransposed{});
        Tensor dout = make_tensor(make_smem_ptr(shared.dout[0]), typename Config::DoutLayout{});
        Tensor doutt = make_tensor(make_smem_ptr(shared.dout[0]), typename Config::DoutTransposed{});
        Tensor dst = make_tensor(make_smem_ptr(shared.ds), typename Config::DsTransposed{});
        Tensor ds = make_tensor(make_smem_ptr(shared.ds), typename Config::DsLayout{});

        typename Config::MmaScores mma_scores;
        typename Config::MmaDv mma_dv;
        typename Config::MmaDk mma_dk;
        typename Config::MmaDq mma_dq;
        auto const key_operand = [&](auto const& tile) {
            return warpgroup_slice(mma_scores).partition_fragment_A(tile);
        };
        auto const query_operand = [&](auto const& tiles) {
            return warpgroup_slice(mma_scores).partition_fragment_B(tiles);
        };
        auto const column_operand = [&](auto const& tiles) {
            return warpgroup_slice(mma_dv).partition_fragment_B(tiles);
        };

        Gradient dk, dv;
        Scores s;
        DqBlock dq;
        uint32_t step = 0;

        auto const issue_scores = [&] {
            QPlace const place(step);
            shared.q_full[place.slot].wait(place.parity);
            issue(mma_scores, key_operand(k), query_operand(q)(_, _, _, place.slot), s, true);
        };
        // P of a tile, slice by slice, and dV right behind: the tensor cores start on the first 16 queries
        // while the exponentials of the others are under way.
        auto const weigh = [&](Weights& p, int kv_tile, bool masked, SliceStatistics ahead) {
            DoutPlace const place(step);
            uint32_t const stage = QPlace(step).slot;
            if (masked) mask(s, kv_tile, shared.q_tile[stage]);
            Tensor dout_columns = column_operand(doutt)(_, _, _, place.slot);
            warpgroup_fence_operand(dv);
            mma_dv.accumulate_ = GMMA::ScaleOut::One;
            CUTE_UNROLL
            for (int slice = 0; slice < kScoreBlocks / 2; ++slice) {
                SliceStatistics const lse = ahead;
                if (slice + 1 < kScoreBlocks / 2) ahead = load_statistics<0>(stage, slice + 1);
                probabilities(s, p, lse, slice);
                warpgroup_arrive();
                gemm(mma_dv, p(_, _, slice), dout_columns(_, _, slice), dv);
            }
            warpgroup_commit_batch();
        };
        auto const issue_dp = [&](Scores& dp) {
            issue(mma_scores, key_operand(v), query_operand(dout)(_, _, _, DoutPlace(step).slot), dp, true);
        };
        // dS = P (dP - D) of a tile, and dK behind it in the same way, if dS stays in registers.
        auto const differentiate = [&](Scores const& dp, Weights& weights, SliceStatistics ahead) {
            uint32_t const stage = QPlace(step).slot;
            Tensor q_columns = column_operand(qt)(_, _, _, stage);
            warpgroup_fence_operand(dk);
            mma_dv.accumulate_ = GMMA::ScaleOut::One;
            CUTE_UNROLL
            for (int slice = 0; slice < kScoreBlocks / 2; ++slice) {
                SliceStatistics const d = ahead;
                if (slice + 1 < kScoreBlocks / 2) ahead = load_statistics<1>(stage, slice + 1);
                score_gradients(s, dp, weights, d, slice);
                if constexpr (Config::kDkFromRegisters) {
                    warpgroup_arrive();
                    gemm(mma_dv, weights(_, _, slice), q_columns(_, _, slice), dk);
                }
            }
            if constexpr (Config::kDkFromRegisters) warpgroup_commit_batch();
        };
        // dK, if dS does not stay in registers, and dQ, from the dS in shared memory.
        auto const issue_dk_dq = [&](uint32_t of_step) {
            if constexpr (!Config::kDkFromRegisters)
                issue(mma_dk, warpgroup_slice(mma_dk).partition_fragment_A(ds),
                      column_operand(qt)(_, _, _, QPlace(of_step).slot), dk);
            issue(mma_dq, warpgroup_slice(mma_dq).partition_fragment_A(dst),
                  warpgroup_slice(mma_dq).partition_fragment_B(kt), dq, true);
        };

        // The order of a tile j, so that the tensor cores have something to do beside the arithmetic:
        //
        //   issue dP(j)
        //   dS(j), slice by slice       dK(j) right behind (or further down, see kDkFromRegisters)
        //   issue S(j+1)                publish dS(j) under it
        //   issue dQ(j)
        //   P(j+1), slice by slice      dV(j+1) right behind
        //   stage dQ(j) under dV(j+1)
        allow_ds();
        for (uint32_t chain_count = 0;; ++chain_count) {
            typename Config::ChainPlace const chain(chain_count);
            shared.chain_full[chain.slot].wait(chain.parity);
            Work const& work = shared.work[chain.slot];
            if (work.batch < 0) return;
            clear(dk);
            clear(dv);

            shared.k_full.wait(chain_count & 1);
            issue_scores();
            bool masked = prepare_weights(step, work.kv_tile);
            SliceStatistics ahead = load_statistics<0>(QPlace(step).slot, 0);
            warpgroup_wait<0>();
            warpgroup_fence_operand(s);
            {
                Weights p;
                weigh(p, work.kv_tile, masked, ahead);
                warpgroup_wait<0>();
            }
            shared.v_full.wait(chain_count & 1);
            uint32_t const end = step + work.steps;
            while (true) {
                Weights weights;
                {
                    Scores dp;
                    issue_dp(dp);
                    ahead = load_statistics<1>(QPlace(step).slot, 0);
                    warpgroup_wait<0>();
                    warpgroup_fence_operand(dp);
                    release(shared.dout_empty[DoutPlace(step).slot]);
                    differentiate(dp, weights, ahead);
                }
                if (++step == end) {
                    publish_ds(weights);
                    issue_dk_dq(step - 1);
                    break;
                }
                issue_scores();
                publish_ds(weights);
                issue_dk_dq(step - 1);
                masked = prepare_weights(step, work.kv_tile);
                ahead = load_statistics<0>(QPlace(step).slot, 0);
                warpgroup_wait<Config::kDkFromRegisters ? 1 : 2>();
                warpgroup_fence_operand(s);
                {
                    Weights p;
                    weigh(p, work.kv_tile, masked, ahead);
                    warpgroup_wait<1>();
                    release(shared.q_empty[QPlace(step - 1).slot]);
                    warpgroup_fence_operand(dq);
                    allow_ds();
                    stage_dq(dq, step - 1);
                    warpgroup_wait<0>();
                }
            }
            warpgroup_wait<0>();
            warpgroup_fence_operand(dk);
            warpgroup_fence_operand(dv);
            warpgroup_fence_operand(dq);
            release(shared.q_empty[QPlace(step - 1).slot]);
            release(shared.kv_empty);
            allow_ds();
            stage_dq(dq, step - 1);

            GradientStore<Config>(args, work, warpgroup()).store(dk, dv);
            release(shared.chain_empty[chain_count % Config::kChainSlots]);
        }
    }

  private:
    template <class Mma>
    __device__ static auto warpgroup_slice(Mma const& mma) {
        return mma.get_slice(warpgroup() * 128);
    }

    // Starts a product of all k slices of `a` and `b`. The results are in `c` after a warpgroup_wait.
    template <class Mma, class A, class B, class C>
    __device__ static void issue(Mma mma, A const& a, B const& b, C& c, bool clear = false) {
        using namespace cute;
        warpgroup_fence_operand(c);
        warpgroup_arrive();
        mma.accumulate_ = clear ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
        CUTE_UNROLL
        for (int i = 0; i < size<2>(a); ++i) {
            gemm(mma, a(_, _, i), b(_, _, i), c);
            mma.accumulate_ = GMMA::ScaleOut::One;
        }
        warpgroup_commit_batch();
    }

    // What can be done before S is there: waits for dO and tells whether the tile needs the mask.
    __device__ bool prepare_weights(uint32_t step, int kv_tile) {
        DoutPlace const place(step);
        shared.dout_full[place.slot].wait(place.parity);
        return args.grid.needs_mask(kv_tile, shared.q_tile[QPlace(step).slot]);
    }

    // The log-sum-exp (part 0) or D (part 1) of this lane's queries in a slice, in pairs of neighbours.
    // Loaded a slice ahead, since the latency of shared memory is longer than a slice's arithmetic.
    struct SliceStatistics {
        float2 pair[2];
    };
    template <int kPart>
    __device__ SliceStatistics load_statistics(uint32_t stage, int slice) {
        float4 const* const first = &shared.statistics[stage][8 * slice + lane() % 4];
        return {{reinterpret_cast<float2 const*>(first)[kPart], reinterpret_cast<float2 const*>(first + 4)[kPart]}};
    }

    // P of 16 queries, in place and as an operand.
    __device__ void probabilities(Scores& s, Weights& p, SliceStatistics const& lse, int slice) {
        cute::Tensor words = cute::recast<uint32_t>(p);
        float const scale = args.scale_log2;
#pragma unroll
        for (int b = 0; b < 2; ++b)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int const r = 8 * slice + 4 * b + 2 * half;
                s(r) = ptx::exp2(fmaf(s(r), scale, -lse.pair[b].x));
                s(r + 1) = ptx::exp2(fmaf(s(r + 1), scale, -lse.pair[b].y));
                words(r / 2) = ptx::pack<Element>(s(r), s(r + 1));
            }
    }

    // dS = P (dP - D) of 16 queries, as an operand.
    __device__ void score_gradients(Scores const& p, Scores const& dp, Weights& ds, SliceStatistics const& d,
                                    int slice) {
        cute::Tensor words = cute::recast<uint32_t>(ds);
#pragma unroll
        for (int b = 0; b < 2; ++b)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int const r = 8 * slice + 4 * b + 2 * half;
                words(r / 2) = ptx::pack<Element>(p(r) * (dp(r) - d.pair[b].x), p(r + 1) * (dp(r + 1) - d.pair[b].y));
            }
    }

    // Takes out the pairs that must not meet: this lane's two keys see the queries from `first` on.
    __device__ void mask(Scores& s, int kv_tile, int q_tile) {
        int const key = kv_tile * Config::kKvRows + warpgroup() * 64 + warp() * 16 + lane() / 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int const row = key + 8 * half;
            int first = args.grid.causal ? row - args.grid.offset() - q_tile * Config::kQRows : 0;
            if (row >= args.grid.seqlen_k) first = Config::kQRows;
            first -= lane() % 4 * 2;
#pragma unroll
            for (int b = 0; b < kScoreBlocks; ++b)
#pragma unroll
                for (int c = 0; c < 2; ++c)
                    if (8 * b + c < first) s(4 * b + 2 * half + c) = -INFINITY;
        }
    }

    // A score fragment's registers, in order, are the registers of the next product's A operand.
    __device__ static void pack(Scores const& from, Weights& to) {
        cute::Tensor words = cute::recast<uint32_t>(to);
#pragma unroll
        for (int i = 0; i < cute::size(words); ++i) words(i) = ptx::pack<Element>(from(2 * i), from(2 * i + 1));
    }

    // Lets the other warpgroup write its next dS: this one has read the last.
    __device__ static void allow_ds() {
        cutlass::arch::NamedBarrier::arrive(Config::kMathThreads, uint32_t(WarpBarrier::ds_free) + 1 - warpgroup());
    }

    // Writes this warpgroup's dS^T to shared memory and returns when the other has written its own.
    __device__ void publish_ds(Weights const& ds) {
        cutlass::arch::NamedBarrier::sync(Config::kMathThreads, uint32_t(WarpBarrier::ds_free) + warpgroup());
        cute::Tensor target = cute::make_tensor(cute::make_smem_ptr(shared.ds), typename Config::DsLayout{});
        cute::Tensor words = cute::recast<uint32_t const>(ds);
        int const row = warpgroup() * 64 + warp() * 16 + lane() % 16;
        int const column = lane() / 16 * 8;
#pragma unroll
        for (int b = 0; b < kScoreBlocks; b += 2)
            cute::SM90_U32x4_STSM_N::copy(words(2 * b), words(2 * b + 1), words(2 * b + 2), words(2 * b + 3),
                                          *reinterpret_cast<cute::uint128_t*>(&target(row, column + 8 * b)));
        cutlass::arch::fence_view_async_shared();
        cutlass::arch::NamedBarrier::sync(Config::kMathThreads, uint32_t(WarpBarrier::math));
    }

    // Hands a dQ block to the writers.
    __device__ void stage_dq(DqBlock const& dq, uint32_t step) {
        typename Config::DqPlace const place(step);
        shared.dq_empty[place.slot].wait(place.parity ^ 1);
        float* const tile = shared.dq[place.slot];
        constexpr bool kSplitColumns = Config::kQRows == 64;  // how the two warpgroups share the tile
        int const row = (kSplitColumns ? 0 : warpgroup() * 64) + warp() * 16 + lane() / 4;
        int const column = (kSplitColumns ? warpgroup() * 64 : 0) + lane() % 4 * 2;
#pragma unroll
        for (int b = 0; b < 8; ++b)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                *reinterpret_cast<float2*>(tile + StagedTile<Config>::offset(row + 8 * half, column + 8 * b)) =
                    make_float2(dq(4 * b + 2 * half), dq(4 * b + 2 * half + 1));
        cutlass::arch::fence_view_async_shared();
        release(shared.dq_full[step % Config::kWriterWarps]);
    }

    // Every thread arrives for itself. One arrival a warp measured no faster, and racecheck cannot follow it.
    // Without __syncwarp ptxas finds too few registers for asynchronous products (C7512).
    __device__ static void release(typename Config::Barrier& barrier) {
        __syncwarp();
        barrier.arrive();
    }
};

}  // namespace dash
