#pragma once

#include "arguments.cuh"
#include "config.cuh"
#include "fragments.cuh"
#include "l2_sides.cuh"
#include "ordering.cuh"

namespace dash {

// Role: two warps, one a staging buffer, that add dQ tiles to their sums in the order of the schedule and fetch a
// sum that is complete. A contribution, until it has landed and the next CTA knows, takes about as long as the
// math warps take for a tile: one warp alone would hold them up.
template <class Config>
struct Writer {
    using Shared = typename Config::Shared;
    using Element = typename Config::Element;

    KernelArguments const& args;
    Shared& shared;

    __device__ Writer(KernelArguments const& a, Shared& s) : args(a), shared(s) {
        if (lane() == 0) notes().chains = notes().totals_read = 0;
        __syncwarp();
    }

    __device__ void run() {
        read_page_sides();
        // How often buffers were used, but for the uses by parts, which are a multiple of the buffers' period.
        uint32_t use = 0;
        while (begin_chain(use)) {
            uint32_t const end = notes().end;
#pragma unroll 1
            for (; use < end; ++use)
                if (is_mine(use)) write_tile(use);
            if (args.parts.count > 1)
#pragma unroll 1
                for (int half = 0; half < kPartPieces; ++half)
                    if (is_mine(use + half)) pass_part(half, use + half);
            shared.chain_empty[(notes().chains - 1) % Config::kChainSlots].arrive();
        }
    }

  private:
    __device__ static int lane() { return ptx::thread_index() % 32; }
    // And the number of its buffer. Asked for where it is needed: registers are few.
    __device__ static int writer() { return ptx::thread_index() / 32 - Config::kFirstWriterWarp; }

    __device__ WriterNotes& notes() { return shared.writer_notes[writer()]; }
    __device__ Work const& work() { return notes().work; }

    // Which side of the L2 cache each page of the sums is on.
    __device__ void read_page_sides() {
        for (int begin = 0; begin < args.pages; begin += 32) {
            int const page = begin + lane();
            uint32_t const word = __ballot_sync(0xffffffffu, page < args.pages && args.page_sides[page] != 0);
            if (lane() == 0) notes().page_sides[begin / 32] = word;
        }
        __syncwarp();
    }

    // Waits for the next chain. Returns false if there is none.
    __device__ bool begin_chain(uint32_t use) {
        typename Config::ChainPlace const place(notes().chains);
        shared.chain_full[place.slot].wait(place.parity);
        __syncwarp();
        if (lane() == 0) {
            notes().work = shared.work[place.slot];
            notes().end = use + work().steps;
            ++notes().chains;
        }
        __syncwarp();
        return work().batch >= 0;
    }

    __device__ bool is_mine(uint32_t use) const { return int(use % Config::kDqStages) == writer(); }

    __device__ void write_tile(uint32_t use) {
        shared.dq_full[writer()].wait(typename Config::DqPlace(use).parity);
        if (lane() == 0) {
            StepSlot const slot =
                ptx::load_shared<StepSlot>(cute::cast_smem_ptr_to_uint(&shared.step[use % Config::kStepSlots]));
            shared.complete[writer()].rows = 0;
            if (contribute(slot, shared.dq[writer()])) leave_total(slot);
        }
        __syncwarp();
        shared.dq_empty[writer()].arrive();
    }

    // Adds the staged tile when its turn has come. Returns whether that was the last contribution; the
    // total is then in the tile's place.
    __device__ bool contribute(StepSlot const& slot, float* staged) {
        if (slot.contributors == 1) return true;
        uint32_t* const ticket = args.dq_tickets + slot.sum;
        SumPlace const place = place_of(slot.sum);

        int const rank = slot.rank;
        if (rank > 0) {
            wait_for_turn(args, ticket, rank, [&] {
                return StuckReport{StuckReport::query_tile, work().batch, q_head(slot), slot.q_tile, work().kv_tile};
            });
            ptx::fence_proxy_async_global();
        }
        add(staged, place, rank == 0);

        bool last = rank + 1 == slot.contributors;
        if (rank < 0)
            last = int(ptx::fetch_add_acq_rel(ticket, 1)) + 1 == slot.contributors;
        else if (!last)
            ptx::add_release(ticket, 1);
        if (!last) return false;
        ptx::fence_proxy_async_global();
        auto& full = shared.dq_total_full[writer()];
        full.arrive_and_expect_tx(Config::kDqTileFloats * sizeof(float));
        for_halves(staged, place, [&](CUtensorMap const* map, float* half, int number) {
            constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
            cute::SM90_TMA_LOAD_5D::copy(map, reinterpret_cast<uint64_t*>(&full), kHint, half, 0, 0, 0, 0, number);
        });
        full.wait(notes().totals_read++ & 1);
        return true;
    }

    // The sum of a query tile: its number among those of its side, and with which set of blocks it begins. On one side
    // there are no sets, and both maps are the same.
    struct SumPlace {
        uint32_t number, set;
    };
    __device__ SumPlace place_of(uint32_t sum) {
        uint32_t const side = sum >= args.dq_sums, number = sum - side * args.dq_sums;
        uint32_t const place = args.first_place + number;
        uint32_t const page = min(place / kPlacesAPage, uint32_t(kMostPages - 1));
        uint32_t const page_side = notes().page_sides[page / 32] >> page % 32 & 1;
        return {number, side_by_number(place) ^ page_side ^ side};
    }

    template <class F>
    __device__ void for_halves(float* staged, SumPlace const& place, F&& f) {
        f(&args.sums[place.set], staged, 2 * place.number);
        f(&args.sums[place.set ^ 1], staged + Config::kDqTileFloats / 2, 2 * place.number + 1);
    }

    __device__ void add(float* staged, SumPlace const& place, bool first) {
        cutlass::arch::fence_view_async_shared();  // what the math warps staged, for the copy
        if (first)
            for_halves(staged, place, [](CUtensorMap const* map, float const* half, int number) {
                cute::SM90_TMA_STORE_5D::copy(map, half, 0, 0, 0, 0, number);
            });
        else
            for_halves(staged, place, [](CUtensorMap const* map, float const* half, int number) {
                cute::SM90_TMA_REDUCE_ADD_5D::copy(map, half, 0, 0, 0, 0, number);
            });
        wait_until_added();
    }

    __device__ void add(float const* staged, float* sum, uint32_t bytes, bool first) {
        cutlass::arch::fence_view_async_shared();  // what the math warps staged, for the copy
        if (first)
            cute::SM90_BULK_COPY_S2G::copy(staged, sum, bytes);
        else
            ptx::bulk_reduce_add(sum, staged, bytes);
        wait_until_added();
    }

    // Returns when a sum has landed.
    __device__ static void wait_until_added() {
        ptx::bulk_commit();
        ptx::bulk_wait_complete();
        ptx::fence_proxy_async_global();
    }

    // Half of a part's dK or dV: adds it to the sum or, in the last part, brings the math warps the sum of the others.
    __device__ void pass_part(int half, uint32_t use) {
        shared.dq_full[writer()].wait(typename Config::DqPlace(use).parity);
        if (lane() == 0) {
            constexpr uint32_t kBytes = Config::kPartFloats * sizeof(float);
            // All chains are fewer than 2^30.
            uint32_t const piece =
                ((work().batch * args.heads_k + work().kv_head) * args.kv_tiles + work().kv_tile) * kPartPieces + half;
            uint32_t* const ticket = args.dkv_tickets + piece;
            shared.complete[writer()].rows = 0;
            auto& sum_full = shared.part_sum_full[writer()];
            if (work().part > 0) {
                wait_for_turn(args, ticket, work().part, [&] {
                    return StuckReport{StuckReport::kv_tile_parts, work().batch, work().kv_head, work().kv_tile,
                                       work().kv_tile};
                });
                ptx::fence_proxy_async_global();
            }
            float* const sum = args.dkv_sum + int64_t(piece) * Config::kPartFloats;
            if (work().part + 1 == args.parts.count) {
                cutlass::arch::fence_view_async_shared();  // what was staged here before may have gone nowhere
                sum_full.arrive_and_expect_tx(kBytes);
                cute::SM90_BULK_COPY_G2S::copy(sum, reinterpret_cast<uint64_t*>(&sum_full), shared.dq[writer()],
                                               kBytes);
            } else {
                add(shared.dq[writer()], sum, kBytes, work().part == 0);
                ptx::add_release(ticket, 1);
                sum_full.arrive();
            }
        }
        __syncwarp();
        shared.dq_empty[writer()].arrive();
    }

    __device__ int q_head(StepSlot const& slot) { return int(slot.sum / args.q_tiles) - work().batch * args.heads_q; }

    // Tells the math warps, who convert and write the tile when they come back to the buffer.
    __device__ void leave_total(StepSlot const& slot) {
        CompleteTile<Element>& tile = shared.complete[writer()];
        int const first_row = slot.q_tile * Config::kQRows;
        tile.dq = static_cast<Element*>(args.dq.data) + work().batch * args.dq.batch_stride +
                  q_head(slot) * args.dq.head_stride + first_row * args.dq.row_stride;
        tile.rows = args.grid.seqlen_q - first_row;
    }
};

}  // namespace dash
