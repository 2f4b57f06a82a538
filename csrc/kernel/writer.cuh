#pragma once

#include "arguments.cuh"
#include "config.cuh"
#include "fragments.cuh"
#include "ordering.cuh"

namespace dash {

// Role: three warps that take turns at adding staged dQ tiles to their sums, in the order of the
// schedule, and at turning a sum that is complete into dQ. A contribution, until it has landed and the
// next CTA knows, takes about as long as the math warps take for a tile: one warp alone would hold them up.
template <class Config>
struct Writer {
    using Shared = typename Config::Shared;
    using Element = typename Config::Element;

    KernelArguments const& args;
    Shared& shared;
    int const writer;  // 0 ... kWriterWarps - 1
    uint32_t totals_read = 0;

    __device__ Writer(KernelArguments const& a, Shared& s, int w) : args(a), shared(s), writer(w) {}

    __device__ void run() {
        uint32_t step = 0;
        for (uint32_t chain_count = 0;; ++chain_count) {
            typename Config::ChainPlace const place(chain_count);
            shared.chain_full[place.slot].wait(place.parity);
            Work const& work = shared.work[place.slot];
            if (work.batch < 0) return;
#pragma unroll 1
            for (uint32_t const end = step + work.steps; step < end; ++step)
                if (int(step % Config::kWriterWarps) == writer) write_tile(work, step);
            shared.chain_empty[chain_count % Config::kChainSlots].arrive();
        }
    }

  private:
    __device__ static int lane() { return ptx::thread_index() % 32; }

    __device__ void write_tile(Work const& work, uint32_t step) {
        shared.dq_full[writer].wait(typename Config::WriterPlace(step).parity);
        float* const staged = shared.dq[step % Config::kDqStages];
        StepSlot const& slot = shared.step[step % Config::kStepSlots];
        bool complete = false;
        if (lane() == 0) complete = contribute(work, slot, staged);
        complete = __shfl_sync(0xffffffffu, complete, 0);
        __syncwarp();  // a shuffle alone orders no memory: the total came by lane 0
        if (complete) finish(work.batch, slot, staged);
        shared.dq_empty[step % Config::kDqStages].arrive();
    }

    // Adds the staged tile when its turn has come. Returns whether that was the last contribution; the
    // total is then in the tile's place.
    __device__ bool contribute(Work const& work, StepSlot const& slot, float* staged) {
        if (slot.contributors == 1) return true;
        constexpr uint32_t kBytes = Config::kDqTileFloats * sizeof(float);
        int64_t const tile = (int64_t(work.batch) * args.heads_q + slot.q_head) * args.grid.q_tiles() + slot.q_tile;
        float* const sum = args.dq_sum + tile * Config::kDqTileFloats;
        uint32_t* const ticket = args.dq_tickets + tile;

        int const rank = slot.rank;
        if (rank > 0) {
            wait_for_turn(ticket, rank, args.wait_limit_ns, args.stuck, StuckReport::query_tile, work.batch,
                          slot.q_head, slot.q_tile, work.kv_tile);
            ptx::fence_proxy_async_global();
        }
        cutlass::arch::fence_view_async_shared();  // what the math warps staged, for the copy
        if (rank == 0)
            cute::SM90_BULK_COPY_S2G::copy(staged, sum, kBytes);
        else
            ptx::bulk_reduce_add(sum, staged, kBytes);
        ptx::bulk_commit();
        ptx::bulk_wait_complete();
        ptx::fence_proxy_async_global();

        bool last = rank + 1 == slot.contributors;
        if (rank < 0)
            last = int(ptx::fetch_add_acq_rel(ticket, 1)) + 1 == slot.contributors;
        else if (!last)
            ptx::add_release(ticket, 1);
        if (!last) return false;
        ptx::fence_proxy_async_global();
        auto& full = shared.dq_total_full[writer];
        full.arrive_and_expect_tx(kBytes);
        cute::SM90_BULK_COPY_G2S::copy(sum, reinterpret_cast<uint64_t*>(&full), staged, kBytes);
        full.wait(totals_read++ & 1);
        return true;
    }

    // Scales, converts and writes a complete tile, 8 columns of a row at a time.
    __device__ void finish(int batch, StepSlot const& slot, float const* total) {
        constexpr int kPiecesARow = Config::kHeadDim / 8;
        Element* const dq =
            static_cast<Element*>(args.dq.data) + batch * args.dq.batch_stride + slot.q_head * args.dq.head_stride;
#pragma unroll 1
        for (int piece = lane(); piece < Config::kDqTileFloats / 8; piece += 32) {
            int const row = piece / kPiecesARow;
            int const column = piece % kPiecesARow * 8;
            auto const a = *reinterpret_cast<float4 const*>(total + StagedTile<Config>::offset(row, column));
            auto const b = *reinterpret_cast<float4 const*>(total + StagedTile<Config>::offset(row, column + 4));
            float const scale = args.scale;
            uint4 const words{
                ptx::pack<Element>(a.x * scale, a.y * scale), ptx::pack<Element>(a.z * scale, a.w * scale),
                ptx::pack<Element>(b.x * scale, b.y * scale), ptx::pack<Element>(b.z * scale, b.w * scale)};
            int const query = slot.q_tile * Config::kQRows + row;
            if (query < args.grid.seqlen_q) *reinterpret_cast<uint4*>(dq + query * args.dq.row_stride + column) = words;
        }
    }
};

}  // namespace dash
