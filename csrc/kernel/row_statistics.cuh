#pragma once

#include "arguments.cuh"
#include "config.cuh"
#include "l2_sides.cuh"
#include "load_box.cuh"
#include "ptx.cuh"

namespace dash {

// How many query tiles each helper takes before it computes: with those of the warp whose role it is, about as many as
// the heads have that all SMs begin with, a KV tile each.
__device__ inline uint32_t tiles_a_helper(KernelArguments const& args, int helpers) {
    return max(2, schedule::quotient_up(args.q_tiles, args.kv_tiles * (1 + helpers)));
}

// Role: a warp that works out the row statistics of query tiles, about in the order in which the chains will come to
// them, whoever they belong to. A kernel of its own would read O and dO at the speed of the memory while the tensor
// cores do nothing; here both have work. It never waits for another role, so all who wait for statistics get them.
//
// For two neighbouring queries (LSE, LSE, D, D), with LSE in base 2 and D = sum(O * dO) - dLSE; pair by pair in the
// first rows of the query tile's dQ. There they lie until the tile's last contributor writes dQ.
template <class Config>
struct RowStatistics {
    using Element = typename Config::Element;
    using Place = typename Config::RowsPlace;
    static constexpr int kRows = kStatisticsRows;  // a stage: a lane takes half of one
    static constexpr int kPiecesALane = Config::kHeadDim / 16;
    static constexpr int kRowBytes = 128;  // of a panel
    static constexpr int kTensorBytes = kRows * Config::kHeadDim * sizeof(Element);
    static constexpr int kStagesATile = Config::kQRows / kRows;
    static_assert(kStagesATile % (2 * Config::kRowStages) == 0, "every tile begins with the same stage and parity");

    static constexpr int kPairsARow = statistics_pairs_a_row(Config::kHeadDim);

    static constexpr int kNone = 0x7fffffff;

    KernelArguments const& args;
    typename Config::StatisticsDesk& desk;
    typename Config::Rows& rows;

    __device__ RowStatistics(KernelArguments const& a, typename Config::StatisticsDesk& d, typename Config::Rows& r)
        : args(a), desk(d), rows(r) {}

    // Works off the queues of both sides of the L2 cache, or as much of them as `most` tiles.
    __device__ void run(int first_side, uint32_t most = ~0u) {
        if (lane() == 0) {
            desk.side = first_side;
            find_tile(next_number(), tile_at(0));
            for (int stage = 0; stage < Config::kRowStages; ++stage) load(tile_at(0), stage);
        }
        __syncwarp();
#pragma unroll 1
        for (uint32_t count = 0; tile_at(count).batch >= 0; ++count) {
            if (lane() == 0) find_tile(count + 1 < most ? next_number() : kNone, tile_at(count + 1));
#pragma unroll 1
            for (int stage = 0; stage < kStagesATile; ++stage) {
                write_rows(tile_at(count), stage);
                int const ahead = stage + Config::kRowStages;
                if (lane() == 0) load(tile_at(ahead < kStagesATile ? count : count + 1), ahead % kStagesATile);
            }
            __syncwarp();
            if (lane() == 0) ptx::add_release(tile_at(count).done, 1);
        }
    }

  private:
    __device__ static int lane() { return ptx::thread_index() % 32; }
    __device__ auto& tile_at(uint32_t count) { return desk.tile[count % 2]; }

    // A query tile's number, counted through the heads of both sides; kNone if there is none.
    __device__ int next_number() {
        int const tiles = args.q_heads * (args.q_tiles - args.blind_tiles);
        int const number = claim(args.statistics_claims, tiles, args.sides, desk.side);
        return number < 0 ? kNone : desk.side * tiles + number;
    }

    __device__ void find_tile(int number, typename Config::StatisticsTile& tile) {
        int const tiles = args.q_tiles - args.blind_tiles;
        int const head = number / tiles, batch = head / args.heads_q;
        if (batch >= args.batch) {
            tile.batch = -1;
            return;
        }
        tile.batch = batch;
        tile.q_head = head % args.heads_q;
        int const q_tile = args.blind_tiles + number % tiles;
        tile.first_row = q_tile * Config::kQRows;
        tile.lse = args.lse + int64_t(head) * args.grid.seqlen_q + tile.first_row;
        tile.dq = static_cast<Element*>(args.dq.data) + batch * args.dq.batch_stride +
                  tile.q_head * args.dq.head_stride + tile.first_row * args.dq.row_stride;
        tile.done = args.statistics_done + head;
    }

    // Rows of O and dO.
    __device__ void load(typename Config::StatisticsTile const& tile, int stage) {
        if (tile.batch < 0) return;
        uint32_t const slot = Place(stage).slot;
        auto& full = desk.full[slot];
        full.arrive_and_expect_tx(2 * kTensorBytes);
        int const row = tile.first_row + stage * kRows;
        load_box(args.out_rows, full, rows[slot][0], row, tile.q_head, tile.batch);
        load_box(args.dout_rows, full, rows[slot][1], row, tile.q_head, tile.batch);
    }

    // This lane's row of a stage, and whether there is one. Worked out where it is needed: registers are few.
    __device__ static int row_of(int stage) { return stage * kRows + lane() % kRows; }
    __device__ bool exists(typename Config::StatisticsTile const& tile, int row) const {
        return tile.first_row + row < args.grid.seqlen_q;
    }

    __device__ void write_rows(typename Config::StatisticsTile const& tile, int stage) {
        float lse = exists(tile, row_of(stage)) ? __ldg(tile.lse + row_of(stage)) : INFINITY;
        float d = half_row(stage);
        __syncwarp();                                 // the stage may be filled again
        d += __shfl_xor_sync(0xffffffffu, d, kRows);  // the other half
        // With P the derivative of LSE, dS = P (dP - D) gets P dLSE on top. A query that sees no key has none.
        if (args.dlse && fabsf(lse) < INFINITY) d -= __ldg(args.dlse + (tile.lse - args.lse) + row_of(stage));
        // A query that sees no key has probability 0 everywhere: 2^(S - inf).
        lse = lse == -INFINITY ? INFINITY : lse * kLog2e;
        float const next_d = __shfl_down_sync(0xffffffffu, d, 1);
        float const next_lse = __shfl_down_sync(0xffffffffu, lse, 1);
        // Also past the tensor's last query, where probabilities have to be 0; unless the place is outside as well.
        int const pair = row_of(stage) / 2, dq_row = pair / kPairsARow;
        if (lane() % 2 == 0 && lane() < kRows && exists(tile, dq_row))
            ptx::store_global(tile.dq + dq_row * args.dq.row_stride + pair % kPairsARow * 8, __float_as_uint(lse),
                              __float_as_uint(next_lse), __float_as_uint(d), __float_as_uint(next_d));
    }

    // sum(O * dO) over half of the columns of this lane's row. Eight lanes read the same piece of eight rows, which
    // lie in different banks by the panels' swizzle.
    __device__ float half_row(int stage) {
        Place const place(stage);
        desk.full[place.slot].wait(place.parity);
        int const row = lane() % kRows, half = lane() / kRows;
        uint32_t const panel = Config::kPanels == 2 ? half * kRows * kRowBytes : 0;
        uint32_t const first = Config::kPanels == 2 ? 0 : half * kPiecesALane;
        uint32_t const address =
            cute::cast_smem_ptr_to_uint(rows[place.slot][0]) + panel + row * kRowBytes + (first ^ row % 8) * 16;
        float d = 0;
#pragma unroll
        for (int i = 0; i < kPiecesALane; i += 2) {
            uint4 const o0 = ptx::load_shared<uint4>(address ^ i * 16);
            uint4 const g0 = ptx::load_shared<uint4>((address ^ i * 16) + kTensorBytes);
            uint4 const o1 = ptx::load_shared<uint4>(address ^ (i + 1) * 16);
            uint4 const g1 = ptx::load_shared<uint4>((address ^ (i + 1) * 16) + kTensorBytes);
            d = add_products(o0, g0, d);
            d = add_products(o1, g1, d);
        }
        return d;
    }

    __device__ static float add_products(uint4 const& a, uint4 const& b, float sum) {
        sum = add_products(a.x, b.x, sum);
        sum = add_products(a.y, b.y, sum);
        sum = add_products(a.z, b.z, sum);
        return add_products(a.w, b.w, sum);
    }

    __device__ static float add_products(uint32_t a, uint32_t b, float sum) {
        float2 const x = ptx::unpack<Element>(a), y = ptx::unpack<Element>(b);
        return fmaf(x.y, y.y, fmaf(x.x, y.x, sum));
    }
};

}  // namespace dash
