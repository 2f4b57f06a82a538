#pragma once

#include "arguments.cuh"
#include "config.cuh"
#include "fragments.cuh"
#include "ordering.cuh"

namespace dash {

// Role: three warps that add staged dQ tiles to their sums, in the order of the schedule, and turn a
// sum that is complete into dQ.
template <class Config>
struct Writer {
    using Shared = typename Config::Shared;
    using Element = typename Config::Element;

    KernelArguments const& args;
    Shared& shared;

    __device__ Writer(KernelArguments const& a, Shared& s) : args(a), shared(s) {}

    __device__ void run() {
        RingIndex chain_index, step_index;
        for (;; ++chain_index) {
            shared.chain_full[chain_index.slot()].wait(chain_index.parity());
            Work const& work = shared.work[chain_index.slot()];
            if (work.batch < 0) return;
#pragma unroll 1
            for (int left = work.steps; left > 0; --left, ++step_index) write_tile(work, step_index);
            __syncwarp();
            if (thread() % 32 == 0) shared.chain_empty[chain_index.slot()].arrive();
        }
    }

  private:
    __device__ void write_tile(Work const& work, RingIndex index) {
        uint32_t const buffer = index.slot();
        shared.dq_full[buffer].wait(index.parity());
        StepSlot const& step = shared.step[index.count % Config::kStepSlots];
        if (thread() == 0) shared.complete[buffer] = contribute(work, step, shared.dq[buffer]);
        sync_writers();
        if (shared.complete[buffer]) {
            finish(work.batch, step, shared.dq[buffer]);
            sync_writers();
        }
        if (thread() == 0) shared.dq_empty[buffer].arrive();
    }

    // Adds the staged tile when its turn has come. Returns whether that was the last contribution; the
    // total is then in the tile's place.
    __device__ bool contribute(Work const& work, StepSlot const& step, float* staged) {
        if (step.contributors == 1) return true;
        constexpr uint32_t kBytes = Config::kDqTileFloats * sizeof(float);
        int64_t const tile = (int64_t(work.batch) * args.heads_q + step.q_head) * args.grid.q_tiles() + step.q_tile;
        float* const sum = args.dq_sum + tile * Config::kDqTileFloats;
        uint32_t* const ticket = args.dq_tickets + tile;

        int const rank = step.rank;
        if (rank > 0)
            wait_for_turn(ticket, rank, args.wait_limit_ns, args.stuck, StuckReport::query_tile, work.batch,
                          step.q_head, step.q_tile, work.kv_tile);
        ptx::fence_proxy_async();
        if (rank == 0)
            cute::SM90_BULK_COPY_S2G::copy(staged, sum, kBytes);
        else
            ptx::bulk_reduce_add(sum, staged, kBytes);
        ptx::bulk_commit();
        ptx::bulk_wait_complete();
        ptx::fence_proxy_async();

        bool last = rank + 1 == step.contributors;
        if (rank < 0)
            last = int(ptx::fetch_add_acq_rel(ticket, 1)) + 1 == step.contributors;
        else if (!last)
            ptx::add_release(ticket, 1);
        if (!last) return false;
        ptx::fence_proxy_async();
        shared.dq_total_full.arrive_and_expect_tx(kBytes);
        cute::SM90_BULK_COPY_G2S::copy(sum, reinterpret_cast<uint64_t*>(&shared.dq_total_full), staged, kBytes);
        shared.dq_total_full.wait(shared.totals++ & 1);
        return true;
    }

    // Scales, converts and writes the rows of a complete tile, 8 rows and 32 columns a warp at a time.
    __device__ void finish(int batch, StepSlot const& step, float const* total) {
        constexpr int kTurnsAWarp = 2 * 2;  // upper and lower rows, 32 columns each
        int const lane = thread() % 32;
        Element* const dq = static_cast<Element*>(args.dq.data) + batch * args.dq.batch_stride +
                            step.q_head * args.dq.head_stride;
#pragma unroll 1
        for (int turn = thread() / 32; turn < Config::kMathWarps * kTurnsAWarp; turn += Config::kWriterWarps) {
            int const warp = turn / kTurnsAWarp;  // the math warp whose fragments these are
            int const half = turn & 1;
            int const block = turn / 2 % 2 * 4;
            auto const* fragments = reinterpret_cast<float2 const*>(total) +
                                    (((warp / 4 * 8 + block) * 128) + warp % 4 * 32 + lane) * 2 + half;
            uint32_t words[4];
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                float2 const f = fragments[b * 256];
                words[b] = ptx::pack<Element>(f.x * args.scale, f.y * args.scale);
            }
            constexpr bool kSplitColumns = Config::kQRows == 64;  // how the two warpgroups share the tile
            int const row = step.q_tile * Config::kQRows + (kSplitColumns ? 0 : warp / 4 * 64) + warp % 4 * 16 +
                            half * 8 + lane / 4;
            int const column = (kSplitColumns ? warp / 4 * 64 : 0) + block * 8;
            store_blocks<Element>(words, dq + row * args.dq.row_stride + column, row < args.grid.seqlen_q);
        }
    }

    __device__ static int thread() { return ptx::thread_index() - 32; }  // 0 ... kWriterThreads - 1

    __device__ void sync_writers() {
        cutlass::arch::NamedBarrier::sync(Config::kWriterThreads, uint32_t(WarpBarrier::writers));
    }
};

}  // namespace dash
