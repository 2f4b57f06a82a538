#pragma once

#include <cute/algorithm/gemm.hpp>

#include "arguments.cuh"
#include "config.cuh"
#include "fragments.cuh"
#include "part_sum.cuh"

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
    using DqPlace = typename Config::DqPlace;
    static constexpr int kScoreBlocks = Config::kQRows / 8;
    static constexpr int kSlices = Config::kQRows / 16;  // of a tile's queries, as one product step takes them

    using Scores = decltype(cute::partition_fragment_C(
        typename Config::MmaScores{}, cute::Shape<cute::Int<Config::kKvRows>, cute::Int<Config::kQRows>>{}));
    using Gradient = decltype(cute::partition_fragment_C(
        typename Config::MmaGradient{}, cute::Shape<cute::Int<Config::kKvRows>, cute::Int<Config::kHeadDim>>{}));
    using DqBlock = decltype(cute::partition_fragment_C(
        typename Config::MmaDq{}, cute::Shape<cute::Int<Config::kQRows>, cute::Int<Config::kHeadDim>>{}));
    using Weights = decltype(cute::make_tensor<Element>(cute::partition_shape_A(
        typename Config::MmaGradient{}, cute::Shape<cute::Int<Config::kKvRows>, cute::Int<Config::kQRows>>{})));

    KernelArguments const& args;
    Shared& shared;
    // 0 or 1. The shuffle tells the compiler that it is one number for the warp: descriptors that depend on it
    // stay in uniform registers.
    int const warpgroup_number = __shfl_sync(0xffffffffu, threadIdx.x / 128 - 1, 0);
    // This lane's places in shared memory, in the first stage.
    uint32_t const ds_place = place_in(shared.ds);
    uint32_t const dq_place = dq_address();
    uint32_t const statistics_place = cute::cast_smem_ptr_to_uint(&shared.statistics[0][threadIdx.x % 4]);

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

        typename Config::MmaScores mma_scores;
        typename Config::MmaGradient mma_gradient;
        typename Config::MmaDq mma_dq;
        auto const key_operand = [&](auto const& tile) {
            return warpgroup_slice(mma_scores).partition_fragment_A(tile);
        };
        auto const query_operand = [&](auto const& tiles) {
            return warpgroup_slice(mma_scores).partition_fragment_B(tiles);
        };
        auto const column_operand = [&](auto const& tiles) {
            return warpgroup_slice(mma_gradient).partition_fragment_B(tiles);
        };

        Gradient dk, dv;
        Scores s;
        uint32_t step = 0;

        QueryTile tile;
        Lookahead lse;
        // What is read from shared memory for the tile's mask and P is read in front of the product, which leaves
        // shared memory little time for others.
        auto const issue_scores = [&] {
            QPlace const place(step);
            shared.q_full[place.slot].wait(place.parity);
            tile = load_tile(place.slot);
            lse.template start<0>(*this, place.slot);
            issue(mma_scores, key_operand(k), query_operand(q)(_, _, _, place.slot), s, true);
        };
        // P of some slices of a tile, and dV right behind: the tensor cores start on the first 16 queries while
        // the exponentials of the others are under way.
        auto const weigh = [&](Weights& p, int first, int end) {
            Tensor dout_columns = column_operand(doutt)(_, _, _, DoutPlace(step).slot);
            warpgroup_fence_operand(dv);
            mma_gradient.accumulate_ = GMMA::ScaleOut::One;
            CUTE_UNROLL
            for (int slice = first; slice < end; ++slice) {
                probabilities(s, p, lse.template next<0>(*this, QPlace(step).slot, slice), slice);
                warpgroup_arrive();
                gemm(mma_gradient, p(_, _, slice), dout_columns(_, _, slice), dv);
            }
            warpgroup_commit_batch();
        };
        auto const issue_dp = [&](Scores& dp) {
            issue(mma_scores, key_operand(v), query_operand(dout)(_, _, _, DoutPlace(step).slot), dp, true);
        };
        // dS = P (dP - D) of a tile, and dK behind it in the same way.
        auto const differentiate = [&](Scores const& dp, Weights& ds, Lookahead& d) {
            uint32_t const stage = QPlace(step).slot;
            Tensor q_columns = column_operand(qt)(_, _, _, stage);
            warpgroup_fence_operand(dk);
            mma_gradient.accumulate_ = GMMA::ScaleOut::One;
            CUTE_UNROLL
            for (int slice = 0; slice < kSlices; ++slice) {
                score_gradients(s, dp, ds, d.template next<1>(*this, stage, slice), slice);
                warpgroup_arrive();
                gemm(mma_gradient, ds(_, _, slice), q_columns(_, _, slice), dk);
            }
            warpgroup_commit_batch();
        };
        auto const issue_dq = [&](DqBlock& dq) {
            await_ds();
            issue(mma_dq, warpgroup_slice(mma_dq).partition_fragment_A(dst),
                  warpgroup_slice(mma_dq).partition_fragment_B(kt), dq, true);
        };

        // The order of a tile j, so that the tensor cores have something to do beside the arithmetic:
        //
        //   issue dP(j), under dV(j)
        //   dS(j), slice by slice           dK(j) right behind
        //   publish dS(j), issue S(j+1)
        //   issue dQ(j), under S(j+1)
        //   half of P(j+1)                  its dV right behind
        //   stage dQ(j), under that dV
        //   the other half of P(j+1)        its dV right behind
        //
        // dP and dQ are declared where a tile begins with them: declared further out, ptxas would keep registers
        // for them all the way round.
        barrier_arrive(WarpBarrier::ds_empty);
        for (uint32_t chain_count = 0;; ++chain_count) {
            typename Config::ChainPlace const chain(chain_count);
            shared.chain_full[chain.slot].wait(chain.parity);
            Work const& work = shared.work[chain.slot];
            if (work.batch < 0) break;
            clear(dk);
            clear(dv);

            shared.k_full.wait(chain_count & 1);
            issue_scores();
            wait_for_dout(step);
            warpgroup_wait<0>();
            warpgroup_fence_operand(s);
            if (tile.masked) mask(s, work.kv_tile, tile.tile);
            {
                Weights p;
                weigh(p, 0, kSlices);
                warpgroup_wait<0>();
            }
            shared.v_full.wait(chain_count & 1);
            uint32_t const end = step + work.steps;
            while (true) {
                Weights ds;
                {
                    Scores dp;
                    Lookahead d;
                    d.template start<1>(*this, QPlace(step).slot);
                    issue_dp(dp);
                    warpgroup_wait<0>();
                    warpgroup_fence_operand(dp);
                    release(shared.dout_empty[DoutPlace(step).slot]);
                    differentiate(dp, ds, d);
                }
                DqBlock dq;
                // Published in both branches: a branch between dK's products and the stores makes ptxas serialise.
                if (++step == end) {
                    publish_ds(ds);
                    issue_dq(dq);
                    warpgroup_wait<0>();
                    warpgroup_fence_operand(dq);
                    barrier_arrive(WarpBarrier::ds_empty);
                    stage_dq(dq, step - 1, kNotFree, dq_address());
                    break;
                }
                publish_ds(ds);
                issue_scores();
                issue_dq(dq);
                warpgroup_wait<2>();
                release(shared.q_empty[QPlace(step - 1).slot]);
                wait_for_dout(step);
                warpgroup_wait<1>();
                warpgroup_fence_operand(s);
                int const complete_rows = ask_for_dq_stage(step - 1);
                if (tile.masked) mask(s, work.kv_tile, tile.tile);
                Weights p;
                weigh(p, 0, kSlices / 2);
                warpgroup_wait<1>();
                warpgroup_fence_operand(dq);
                barrier_arrive(WarpBarrier::ds_empty);
                stage_dq(dq, step - 1, complete_rows, dq_place);
                weigh(p, kSlices / 2, kSlices);
            }
            warpgroup_fence_operand(dk);
            warpgroup_fence_operand(dv);
            release(shared.q_empty[QPlace(step - 1).slot]);
            release(shared.k_empty);
            if (args.parts.count > 1) {
                empty_dq_stage(step, kNotFree, dq_address());
                empty_dq_stage(step + 1, kNotFree, dq_address());
                sync_math();  // what follows uses the buffers in another order
                PartSum<Config>(shared, warpgroup(), work.part + 1 == args.parts.count, step).pass(dk, dv);
            }
            hand_over(dv);
            if (work.part + 1 == args.parts.count) store_dk(work, dk);
            release(shared.chain_empty[chain_count % Config::kChainSlots]);
        }
        empty_dq_stage(step, kNotFree, dq_address());
        empty_dq_stage(step + 1, kNotFree, dq_address());
    }

  private:
    // The empty instruction hides where the number comes from: what is derived from it is then computed where it
    // is needed and not kept over the loop, where every register counts.
    __device__ int warpgroup() const {
        int number = warpgroup_number;
        asm volatile("" : "+r"(number));
        return number;
    }
    __device__ static int lane() { return ptx::thread_index() % 32; }
    __device__ static int warp() { return ptx::thread_index() / 32 % 4; }  // within the warpgroup

    template <class Mma>
    __device__ auto warpgroup_slice(Mma const& mma) const {
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

    __device__ void wait_for_dout(uint32_t step) {
        DoutPlace const place(step);
        shared.dout_full[place.slot].wait(place.parity);
    }

    __device__ QueryTile load_tile(uint32_t stage) {
        int2 const words = ptx::load_shared<int2>(cute::cast_smem_ptr_to_uint(&shared.q_tile[stage]));
        return {words.x, words.y};
    }

    // The log-sum-exp (part 0) or D (part 1) of this lane's queries in a slice, in pairs of neighbours.
    struct SliceStatistics {
        float2 pair[2];
    };
    template <int kPart>
    __device__ SliceStatistics load_statistics(uint32_t stage, int slice) {
        uint32_t const first = statistics_place + stage * sizeof(shared.statistics[0]) + slice * 128 + kPart * 8;
        return {{ptx::load_shared<float2>(first), ptx::load_shared<float2>(first + 64)}};
    }

    // The statistics of the next slices: the latency of shared memory is longer than a slice's arithmetic.
    struct Lookahead {
        static constexpr int kAhead = Config::kQRows == 64 ? 4 : 2;
        SliceStatistics slices[kAhead];

        template <int kPart>
        __device__ void start(Math& math, uint32_t stage) {
#pragma unroll
            for (int i = 0; i < kAhead; ++i) slices[i] = math.template load_statistics<kPart>(stage, i);
        }
        template <int kPart>
        __device__ SliceStatistics next(Math& math, uint32_t stage, int slice) {
            SliceStatistics const statistics = slices[slice % kAhead];
            if (slice + kAhead < kSlices)
                slices[slice % kAhead] = math.template load_statistics<kPart>(stage, slice + kAhead);
            return statistics;
        }
    };

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

    // This lane's place in a tile of the warpgroups' 128 rows. A row is 128 bytes a panel of 64 columns, whose eight
    // pieces are permuted by the row's number, as tensor cores and tensor maps have them. A lane stores rows of
    // matrices of 8 x 8.
    __device__ uint32_t place_in(Element const* panels) const {
        int const row = warpgroup() * 64 + warp() * 16 + lane() % 16;
        return cute::cast_smem_ptr_to_uint(panels) + row * 128 + (lane() / 16 ^ row % 8) * 16;
    }

    // Stores `kBlocks` blocks of 8 columns of this warpgroup's rows from there; word(i) is the i-th pair of numbers.
    template <int kBlocks, class Word>
    __device__ static void store_panels(uint32_t place, Word&& word) {
#pragma unroll
        for (int b = 0; b < kBlocks; b += 2)
            ptx::store_matrices((place ^ b % 8 * 16) + b / 8 * Config::kKvRows * 128, word(2 * b), word(2 * b + 1),
                                word(2 * b + 2), word(2 * b + 3));
    }

    __device__ static void sync_math() {
        cutlass::arch::NamedBarrier::sync(Config::kMathThreads, uint32_t(WarpBarrier::math));
    }

    // Writes this warpgroup's dS^T to shared memory and tells the other.
    __device__ void publish_ds(Weights const& ds) {
        cute::Tensor words = cute::recast<uint32_t const>(ds);
        barrier_sync(WarpBarrier::ds_empty);
        store_panels<kScoreBlocks>(ds_place, [&](int i) { return words(i); });
        barrier_arrive(WarpBarrier::ds_full);
    }

    // Returns when both halves of dS^T are in shared memory, for the tensor cores to read. The fence stands here
    // and not at the stores: there it would wait for them.
    __device__ void await_ds() {
        barrier_sync(WarpBarrier::ds_full);
        cutlass::arch::fence_view_async_shared();
    }

    // A pair of barriers, one a warpgroup: each arrives at the other's and waits at its own.
    __device__ void barrier_arrive(WarpBarrier pair) {
        cutlass::arch::NamedBarrier::arrive(Config::kMathThreads, uint32_t(pair) + 1 - warpgroup());
    }
    __device__ void barrier_sync(WarpBarrier pair) {
        cutlass::arch::NamedBarrier::sync(Config::kMathThreads, uint32_t(pair) + warpgroup());
    }

    // How the two warpgroups share a dQ tile: this lane's row and the first of its columns.
    static constexpr bool kSplitColumns = Config::kQRows == 64;
    __device__ int dq_row() const { return (kSplitColumns ? 0 : warpgroup() * 64) + warp() * 16 + lane() / 4; }
    __device__ int dq_column() const { return kSplitColumns ? warpgroup() * 64 : 0; }
    __device__ uint32_t dq_address() const {
        return cute::cast_smem_ptr_to_uint(shared.dq[0]) +
               StagedTile<Config>::offset(dq_row(), dq_column() + lane() % 4 * 2) * 4;
    }

    // Whether the next buffer for dQ is free and, if it is, how many rows of a complete tile lie there. Asked ahead:
    // an answer takes as long as a few products.
    static constexpr int kNotFree = -1;
    __device__ int ask_for_dq_stage(uint32_t use) {
        DqPlace const stage(use);
        return shared.dq_empty[stage.slot].test_wait(stage.parity ^ 1) ? shared.complete[stage.slot].rows : kNotFree;
    }

    // Waits until a buffer is free, and writes the complete tile that may lie there. A thread reads what it stages
    // there itself afterwards, so nobody has to wait for others. `rows`: what was answered ahead; `first`: this lane's
    // place in the first buffer (in the loop it is kept, and elsewhere worked out: registers).
    __device__ void empty_dq_stage(uint32_t use, int rows, uint32_t first) {
        DqPlace const stage(use);
        if (rows == kNotFree) {
            shared.dq_empty[stage.slot].wait(stage.parity ^ 1);
            rows = shared.complete[stage.slot].rows;
        }
        if (rows > 0) write_complete_tile(stage.slot, rows, first + stage.slot * sizeof(shared.dq[0]));
    }

    __device__ void write_complete_tile(uint32_t slot, int rows, uint32_t place) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int const row = dq_row() + half * 8;
            Element* const target = shared.complete[slot].dq + row * args.dq.row_stride + dq_column();
#pragma unroll
            for (int first = 0; first < 8; first += 4) {
                uint32_t words[4];
#pragma unroll
                for (int b = 0; b < 4; ++b) {
                    float2 const sums = ptx::load_shared<float2>(dq_piece(place, first + b, half));
                    words[b] = ptx::pack<Element>(sums.x * args.scale, sums.y * args.scale);
                }
                store_blocks<Element>(words, target + first * 8, row < rows);
            }
        }
    }

    // Hands a dQ block to the writers, whose fence makes it visible to the bulk copy. `use`: how often buffers were
    // used before; `rows`: what was answered ahead.
    __device__ void stage_dq(DqBlock const& dq, uint32_t use, int rows, uint32_t first) {
        empty_dq_stage(use, rows, first);
        DqPlace const stage(use);
        uint32_t const place = first + stage.slot * sizeof(shared.dq[0]);
#pragma unroll
        for (int b = 0; b < 8; ++b)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                ptx::store_shared(dq_piece(place, b, half), dq(4 * b + 2 * half), dq(4 * b + 2 * half + 1));
        release(shared.dq_full[stage.slot]);
    }

    // Of block b of a lane's row, or the row 8 below; `place`: of its first block.
    __device__ static uint32_t dq_piece(uint32_t place, int b, int half) {
        return (place ^ b % 4 * 32) + b / 4 * 128 + half * 8 * Config::kHeadDim * 4;
    }

    // Hands dV to the loader in the place of V, of which each warpgroup reads its own rows only.
    __device__ void hand_over(Gradient const& dv) {
        store_panels<Config::kHeadDim / 8>(place_in(shared.v),
                                           [&](int i) { return ptx::pack<Element>(dv(2 * i), dv(2 * i + 1)); });
        release(shared.dv_full);
    }

    // Writes dK from the registers. By the way of shared memory it would keep the next K waiting, which is needed
    // first: the two gradients together take a few thousand cycles to leave.
    __device__ void store_dk(Work const& work, Gradient const& dk) {
        int const row = work.kv_tile * Config::kKvRows + warpgroup() * 64 + warp() * 16 + lane() / 4;
        Element* const target = static_cast<Element*>(args.dk.data) + work.batch * args.dk.batch_stride +
                                work.kv_head * args.dk.head_stride + row * args.dk.row_stride;
#pragma unroll
        for (int first = 0; first < Config::kHeadDim / 8; first += 4)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint32_t words[4];
#pragma unroll
                for (int b = 0; b < 4; ++b) {
                    int const r = 4 * (first + b) + 2 * half;
                    words[b] = ptx::pack<Element>(dk(r) * args.scale, dk(r + 1) * args.scale);
                }
                store_blocks<Element>(words, target + half * 8 * args.dk.row_stride + first * 8,
                                      row + half * 8 < args.grid.seqlen_k);
            }
    }

    // Every thread arrives for itself. One arrival a warp measured no faster, and racecheck cannot follow it.
    // Without __syncwarp ptxas finds too few registers for asynchronous products (C7512).
    __device__ static void release(typename Config::Barrier& barrier) {
        __syncwarp();
        barrier.arrive();
    }
};

}  // namespace dash
