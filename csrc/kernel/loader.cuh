#pragma once

#include "arguments.cuh"
#include "config.cuh"
#include "l2_sides.cuh"
#include "load_box.cuh"
#include "ordering.cuh"

namespace dash {

// Role: one thread that claims chains, follows the schedule and keeps the stages full.
template <class Config, class Policy>
struct Loader {
    using Shared = typename Config::Shared;
    using TransferBarrier = typename Config::TransferBarrier;

    KernelArguments const& args;
    Shared& shared;
    Policy const& the_policy;

    __device__ Loader(KernelArguments const& a, Policy const& p, Shared& s) : args(a), shared(s), the_policy(p) {}

    __device__ void run() {
        prefetch_descriptors();
        LoaderNotes& notes = shared.loader_notes;
        notes.side = first_side();
        uint32_t step = 0;
        for (notes.chains = 0; begin_chain(); ++notes.chains) {
            Work const& work = shared.work[typename Config::ChainPlace(notes.chains).slot];
            for (notes.left = work.steps; notes.left > 0;) {
                int visit = begin_run(work);
#pragma unroll 1
                while (load(visit, step)) ++step;
                ++step;
                // After the first query tile, whose stages are free before the last chain is done with its K and V.
                if (notes.left == work.steps - 1) load_key_value(work, notes.chains);
            }
        }
        if (notes.chains > 0) send_dv(notes.chains - 1);
    }

  private:
    // Asked anew each time, so that nothing that is worked out from the sizes is kept in registers in between.
    __device__ Policy policy() const {
        Policy policy = the_policy;
        policy.grid.q_rows = Config::kQRows;  // constants, so that the policy divides by shifting
        policy.grid.kv_rows = Config::kKvRows;
        asm volatile("" : "+r"(policy.grid.seqlen_q), "+r"(policy.grid.seqlen_k));
        return policy;
    }

    // Claims a chain and tells everybody. Returns whether there was one.
    __device__ bool begin_chain() {
        int const claim = next_claim(shared.loader_notes.chains);
        typename Config::ChainPlace const place(shared.loader_notes.chains);
        Work& work = shared.work[place.slot];
        if (claim < 0) {
            work.batch = -1;
            shared.chain_full[place.slot].arrive();
            return false;
        }
        work.claim = claim;
        schedule::Chain const chain = policy().chain(claim, args.chain_heads);
        work.kv_tile = chain.kv_tile;
        schedule::Division const kv_head =
            schedule::divide(shared.loader_notes.side * args.chain_heads + chain.head, args.parts.count);
        work.part = kv_head.rest;
        schedule::Division const batch = schedule::divide(kv_head.quotient, args.heads_k);
        work.batch = batch.quotient;
        work.kv_head = batch.rest;
        work.first_q_head = work.kv_head * args.parts.group + args.parts.begin(work.part);
        work.steps = policy().visits(chain.kv_tile) * args.parts.size(work.part);
        prefetch_key_value(work);
        shared.chain_full[place.slot].arrive();
        return true;
    }

    // The next visits in one head. The first one of a chain stands alone: K and V come behind it.
    __device__ int begin_run(Work const& work) {
        LoaderNotes& notes = shared.loader_notes;
        int const done = work.steps - notes.left, heads = args.parts.size(work.part);
        schedule::HeadRun const run =
            schedule::head_run(policy().heads(work.kv_tile, heads), heads, policy().visits(work.kv_tile), done);
        notes.end = done == 0 ? run.visit + run.by : run.end;
        notes.left -= (notes.end - run.visit) * run.by;
        notes.kv_tile_and_ways = 4 * work.kv_tile + (run.by < 0 ? 2 : 0) + (work.first_q_head & (policy().ways() - 1));
        notes.q_head = work.first_q_head + run.head;
        notes.batch = work.batch;
        if (run.enters) wait_for_statistics(work, notes.q_head);
        return run.visit;
    }

    // Goes on to the next visit, and returns whether it is one of the run.
    __device__ bool load(int& visit, uint32_t step) {
        int4 const words = ptx::load_shared<int4>(cute::cast_smem_ptr_to_uint(&shared.loader_notes));
        int const kv_tile = words.x >> 2, way = words.x & 1, q_head = words.y, batch = words.z;
        int const q_tile = policy().visit(kv_tile, visit, way);
        int const rank = args.ordered ? policy().rank(kv_tile, q_tile, way) : -1;
        // All chains are fewer than 2^30, and so the query tiles than 2^31.
        uint32_t const sum = (batch * args.heads_q + q_head) * args.q_tiles + q_tile;
        // dO first: its buffer is free earlier.
        load_dout(batch, q_head, q_tile, step);
        load_query(batch, kv_tile, q_head, {sum, q_tile, rank, policy().grid.contributors(q_tile)}, step);
        visit += 1 - (words.x & 2);
        return visit != words.w;
    }

    // The side of the L2 cache on which this CTA begins to claim: on side 1 all that are there, or nobody.
    __device__ int first_side() {
        int const side = shared.side();
        if (args.sides == 1 || args.cycle_ctas == 1) return side;
        atomicAdd(args.seats + side, 1u);
        if (side == 0) return 0;
        constexpr int kLooks = 64;  // some 20 us, in which a launch that has the chip to itself is complete
        constexpr uint32_t kUndecided = 0, kClosed = 1, kOpen = 2;
        uint32_t vote = kClosed;
        for (int look = 0; look < kLooks; ++look)
            if (side_1_opens(args.cycle_ctas, int(ptx::load_relaxed(args.seats)),
                             int(ptx::load_relaxed(args.seats + 1)))) {
                vote = kOpen;
                break;
            }
        uint32_t const before = atomicCAS(args.seats + 2, kUndecided, vote);
        return int((before == kUndecided ? vote : before) - kClosed);
    }

    // Waits until a slot is free, then claims. Returns a negative number if there is nothing left on either side. The
    // next chain may be claimed while the running one is in flight, unless both could be of one cycle and wait for each
    // other (see schedule/policy.h).
    __device__ int next_claim(uint32_t chain_count) {
        typename Config::ChainPlace const place(chain_count);
        shared.chain_empty[place.slot].wait(place.parity ^ 1);
        int& side = shared.loader_notes.side;
        if (chain_count > 0) {
            typename Config::ChainPlace const previous(chain_count - 1);
            int const running = shared.work[previous.slot].claim;
            int const cycle_end = policy().cycle_end(running, args.chain_heads);
            bool const one_cycle = cycle_end > running + 1 && int(ptx::load_relaxed(args.claims + side)) < cycle_end;
            if (Policy::kWaitsInLine || one_cycle) shared.chain_empty[previous.slot].wait(previous.parity);
        }
        return claim(args.claims, args.chains, args.sides, side);
    }

    // Of all query tiles of a head, when the chain comes to the head for the first time.
    __device__ void wait_for_statistics(Work const& work, int q_head) {
        uint32_t const turn = args.q_tiles - args.blind_tiles;
        wait_for_turn(args, args.statistics_done + work.batch * args.heads_q + q_head, turn,
                      [&] { return StuckReport{StuckReport::row_statistics, work.batch, q_head, 0, work.kv_tile}; });
        ptx::fence_proxy_async_global();  // they come by a bulk copy
    }

    __device__ void load_key_value(Work const& work, uint32_t chain_count) {
        shared.k_empty.wait(chain_count & 1 ^ 1);
        shared.k_full.arrive_and_expect_tx(sizeof(shared.k));
        load_box(args.k, shared.k_full, shared.k, work.kv_tile * Config::kKvRows, work.kv_head, work.batch);
        if (chain_count > 0) send_dv(chain_count - 1);
        shared.v_full.arrive_and_expect_tx(sizeof(shared.v));
        load_box(args.v, shared.v_full, shared.v, work.kv_tile * Config::kKvRows, work.kv_head, work.batch);
    }

    // Waits for the dV of a chain, which takes V's place, and writes it, unless it went to a sum of parts that is not
    // complete. Rows past the end of the tensor are left out.
    __device__ void send_dv(uint32_t chain_count) {
        shared.dv_full.wait(chain_count & 1);
        Work const& done = shared.work[chain_count % Config::kChainSlots];
        cutlass::arch::fence_view_async_shared();  // also for V, which is loaded over dV
        if (done.part + 1 < args.parts.count) return;
        cute::SM90_TMA_STORE_5D::copy(&args.dv, shared.v, 0, done.kv_tile * Config::kKvRows, 0, done.kv_head,
                                      done.batch);
        ptx::bulk_commit();
        ptx::bulk_wait_read();
    }

    // Asks for K and V while the chain before is in flight: the memory takes longer than the L2 cache.
    __device__ void prefetch_key_value(Work const& work) {
        for (CUtensorMap const* map : {&args.k, &args.v})
            cute::SM90_TMA_LOAD_5D::PREFETCH::copy(map, 0, work.kv_tile * Config::kKvRows, 0, work.kv_head, work.batch);
    }

    __device__ void load_query(int batch, int kv_tile, int q_head, StepSlot const& slot, uint32_t step) {
        typename Config::QPlace const place(step);
        bool const masked = policy().grid.needs_mask(kv_tile, slot.q_tile);
        shared.step[step % Config::kStepSlots] = slot;
        shared.q_empty[place.slot].wait(place.parity ^ 1);
        shared.q_tile[place.slot] = {slot.q_tile, masked};
        TransferBarrier& full = shared.q_full[place.slot];
        full.arrive_and_expect_tx(sizeof(shared.q[0]) + sizeof(shared.statistics[0]));
        load_box(args.q, full, shared.q[place.slot], slot.q_tile * Config::kQRows, q_head, batch);
        load_box(args.statistics, full, shared.statistics[place.slot], slot.q_tile * Config::kQRows, q_head, batch);
    }

    __device__ void load_dout(int batch, int q_head, int q_tile, uint32_t step) {
        typename Config::DoutPlace const place(step);
        shared.dout_empty[place.slot].wait(place.parity ^ 1);
        TransferBarrier& full = shared.dout_full[place.slot];
        full.arrive_and_expect_tx(sizeof(shared.dout[0]));
        load_box(args.dout, full, shared.dout[place.slot], q_tile * Config::kQRows, q_head, batch);
    }

    __device__ void prefetch_descriptors() {
        for (CUtensorMap const* map :
             {&args.q, &args.k, &args.v, &args.dout, &args.statistics, &args.out_rows, &args.dout_rows})
            cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(map));
    }
};

}  // namespace dash
