#pragma once

#include "arguments.cuh"
#include "config.cuh"
#include "ordering.cuh"

namespace dash {

// Role: one thread that claims chains, follows the schedule and keeps the stages full.
template <class Config, class Policy>
struct Loader {
    using Shared = typename Config::Shared;
    using Element = typename Config::Element;
    using TransferBarrier = typename Config::TransferBarrier;

    KernelArguments const& args;
    Shared& shared;
    Policy policy;

    __device__ Loader(KernelArguments const& a, Policy const& p, Shared& s) : args(a), shared(s), policy(p) {
        policy.grid.q_rows = Config::kQRows;  // constants, so that the policy divides by shifting
        policy.grid.kv_rows = Config::kKvRows;
    }

    __device__ void run() {
        prefetch_descriptors();
        uint32_t step = 0;
        for (uint32_t chain_count = 0;; chain_count = ++shared.loader_chains) {
            typename Config::ChainPlace const place(chain_count);
            int const claim = next_claim(chain_count);
            Work& work = shared.work[place.slot];
            if (claim >= args.chains) {
                work.batch = -1;
                shared.chain_full[place.slot].arrive();
                if (chain_count > 0) send_dv(shared.loader_chains - 1);  // the same number, in no register
                return;
            }
            schedule::Chain const chain = policy.chain(claim, args.chain_heads);
            int const kv_head = chain.head / args.parts;
            work = {kv_head / args.heads_k,
                    kv_head % args.heads_k,
                    chain.kv_tile,
                    chain.head % args.parts,
                    (chain.head % (args.heads_k * args.parts)) * args.heads_per_part,
                    policy.visits(chain.kv_tile) * args.heads_per_part,
                    claim};
            prefetch_key_value(work);
            shared.chain_full[place.slot].arrive();

            schedule::HeadWalk& walk = shared.walk;
            shared.loader_chains = chain_count;
            shared.heads_ready = 0;
            walk = {policy.heads(work.kv_tile, args.heads_per_part), args.heads_per_part, policy.visits(work.kv_tile)};
#pragma unroll 1
            for (int left = work.steps; left > 0; --left, ++step, walk.next()) {
                int const q_tile = policy.visit(work.kv_tile, walk.visit);
                int const rank = args.ordered ? policy.rank(work.kv_tile, q_tile) : -1;
                int const q_head = work.first_q_head + walk.head;
                if (walk.head == shared.heads_ready) wait_for_statistics(work, q_head);
                // dO first: its buffer is free earlier.
                load_dout(work.batch, q_head, q_tile, step);
                load_query(work, {q_head, q_tile, rank, policy.grid.contributors(q_tile)}, step);
                // After the first query tile, whose stages are free before the last chain is done with its K and V.
                if (left == work.steps) load_key_value(work, shared.loader_chains);
            }
        }
    }

  private:
    // Waits until a slot is free, then claims. The next chain may be claimed while the running one is in
    // flight, unless both could be of one cycle and wait for each other (see schedule/policy.h).
    __device__ int next_claim(uint32_t chain_count) {
        typename Config::ChainPlace const place(chain_count);
        shared.chain_empty[place.slot].wait(place.parity ^ 1);
        if (chain_count > 0) {
            typename Config::ChainPlace const previous(chain_count - 1);
            int const running = shared.work[previous.slot].claim;
            int const cycle_end = policy.cycle_end(running, args.chain_heads);
            bool const one_cycle = cycle_end > running + 1 && int(ptx::load_relaxed(args.claims)) < cycle_end;
            if (Policy::kWaitsInLine || one_cycle) shared.chain_empty[previous.slot].wait(previous.parity);
        }
        return int(atomicAdd(args.claims, 1u));
    }

    // Of all query tiles of a head, when the chain comes to the head for the first time.
    __device__ void wait_for_statistics(Work const& work, int q_head) {
        uint32_t const turn = args.q_tiles - args.blind_tiles;
        wait_for_turn(args, args.statistics_done + work.batch * args.heads_q + q_head, turn,
                      [&] { return StuckReport{StuckReport::row_statistics, work.batch, q_head, 0, work.kv_tile}; });
        ptx::fence_proxy_async_global();  // they come by a bulk copy
        ++shared.heads_ready;
    }

    __device__ void load_key_value(Work const& work, uint32_t chain_count) {
        shared.k_empty.wait(chain_count & 1 ^ 1);
        shared.k_full.arrive_and_expect_tx(sizeof(shared.k));
        load_tile<Config::kKvRows>(args.k, shared.k_full, shared.k, work.kv_tile, work.kv_head, work.batch);
        if (chain_count > 0) send_dv(chain_count - 1);
        shared.v_full.arrive_and_expect_tx(sizeof(shared.v));
        load_tile<Config::kKvRows>(args.v, shared.v_full, shared.v, work.kv_tile, work.kv_head, work.batch);
    }

    // Waits for the dV of a chain, which takes V's place, and writes it, unless it went to a sum of parts that is not
    // complete. Rows past the end of the tensor are left out.
    __device__ void send_dv(uint32_t chain_count) {
        shared.dv_full.wait(chain_count & 1);
        Work const& done = shared.work[chain_count % Config::kChainSlots];
        cutlass::arch::fence_view_async_shared();  // also for V, which is loaded over dV
        if (done.part + 1 < args.parts) return;
#pragma unroll
        for (int panel = 0; panel < Config::kPanels; ++panel)
            cute::SM90_TMA_STORE_4D::copy(&args.dv, shared.v + panel * Config::kKvRows * Config::kPanelColumns,
                                          panel * Config::kPanelColumns, done.kv_tile * Config::kKvRows, done.kv_head,
                                          done.batch);
        ptx::bulk_commit();
        ptx::bulk_wait_read();
    }

    // Asks for K and V while the chain before is in flight: the memory takes longer than the L2 cache.
    __device__ void prefetch_key_value(Work const& work) {
#pragma unroll
        for (int panel = 0; panel < Config::kPanels; ++panel)
            for (CUtensorMap const* map : {&args.k, &args.v})
                cute::SM90_TMA_LOAD_4D::PREFETCH::copy(map, panel * Config::kPanelColumns,
                                                       work.kv_tile * Config::kKvRows, work.kv_head, work.batch);
    }

    __device__ void load_query(Work const& work, StepSlot const& slot, uint32_t step) {
        typename Config::QPlace const place(step);
        shared.q_empty[place.slot].wait(place.parity ^ 1);
        shared.q_tile[place.slot] = {slot.q_tile, policy.grid.needs_mask(work.kv_tile, slot.q_tile)};
        shared.step[step % Config::kStepSlots] = slot;
        TransferBarrier& full = shared.q_full[place.slot];
        full.arrive_and_expect_tx(sizeof(shared.q[0]) + sizeof(shared.statistics[0]));
        load_tile<Config::kQRows>(args.q, full, shared.q[place.slot], slot.q_tile, slot.q_head, work.batch);
        load_box(args.statistics, full, shared.statistics[place.slot], 0, slot.q_tile * (Config::kQRows / 2),
                 slot.q_head, work.batch);
    }

    __device__ void load_dout(int batch, int q_head, int q_tile, uint32_t step) {
        typename Config::DoutPlace const place(step);
        shared.dout_empty[place.slot].wait(place.parity ^ 1);
        TransferBarrier& full = shared.dout_full[place.slot];
        full.arrive_and_expect_tx(sizeof(shared.dout[0]));
        load_tile<Config::kQRows>(args.dout, full, shared.dout[place.slot], q_tile, q_head, batch);
    }

    // A tile arrives as panels of 64 columns. Rows past the end of the tensor are filled with zeros.
    template <int kRows>
    __device__ void load_tile(CUtensorMap const& map, TransferBarrier& full, Element* target, int tile, int head,
                              int batch) {
#pragma unroll
        for (int panel = 0; panel < Config::kPanels; ++panel)
            load_box(map, full, target + panel * kRows * Config::kPanelColumns, panel * Config::kPanelColumns,
                     tile * kRows, head, batch);
    }

    __device__ void load_box(CUtensorMap const& map, TransferBarrier& full, void* target, int column, int row, int head,
                             int batch) {
        constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
        cute::SM90_TMA_LOAD_4D::copy(&map, reinterpret_cast<uint64_t*>(&full), kHint, target, column, row, head, batch);
    }

    __device__ void prefetch_descriptors() {
        for (CUtensorMap const* map :
             {&args.q, &args.k, &args.v, &args.dout, &args.statistics, &args.out_rows, &args.dout_rows})
            cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(map));
    }
};

}  // namespace dash
