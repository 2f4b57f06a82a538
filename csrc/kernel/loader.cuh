#pragma once

#include "arguments.cuh"
#include "config.cuh"
#include "ptx.cuh"

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
        for (uint32_t chain_count = 0;; ++chain_count) {
            typename Config::ChainPlace const place(chain_count);
            int const claim = next_claim(chain_count);
            Work& work = shared.work[place.slot];
            if (claim >= args.chains) {
                work.batch = -1;
                shared.chain_full[place.slot].arrive();
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
            shared.chain_full[place.slot].arrive();

            schedule::HeadWalk& walk = shared.walk;  // in shared memory, since registers are few here
            walk = {policy.heads(work.kv_tile, args.heads_per_part), args.heads_per_part, policy.visits(work.kv_tile)};
#pragma unroll 1
            for (int left = work.steps; left > 0; --left, ++step, walk.next()) {
                int const q_tile = policy.visit(work.kv_tile, walk.visit);
                int const rank = args.ordered ? policy.rank(work.kv_tile, q_tile) : -1;
                int const q_head = work.first_q_head + walk.head;
                load_query(work, {q_head, q_tile, rank, policy.grid.contributors(q_tile)}, step);
                load_dout(work.batch, q_head, q_tile, step);
                // After the first query tile, whose stages are free before the last chain is done with its K and V.
                if (left == work.steps) load_key_value(work, chain_count);
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

    __device__ void load_key_value(Work const& work, uint32_t chain_count) {
        shared.kv_empty.wait(chain_count & 1 ^ 1);
        shared.k_full.arrive_and_expect_tx(sizeof(shared.k));
        load_tile<Config::kKvRows>(args.k, shared.k_full, shared.k, work.kv_tile, work.kv_head, work.batch);
        shared.v_full.arrive_and_expect_tx(sizeof(shared.v));
        load_tile<Config::kKvRows>(args.v, shared.v_full, shared.v, work.kv_tile, work.kv_head, work.batch);
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
        for (CUtensorMap const* map : {&args.q, &args.k, &args.v, &args.dout, &args.statistics})
            cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(map));
    }
};

}  // namespace dash
