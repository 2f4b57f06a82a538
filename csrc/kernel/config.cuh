#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/numeric_types.h>

#include <cute/tensor.hpp>

#include "../core/l2_sides.h"
#include "../core/tile_shape.h"
#include "../schedule/head_order.h"

namespace dash {

// What the loader, who follows the schedule, tells the other roles of a chain.
struct Work {
    int batch;  // negative: there is no more work
    int kv_head;
    int kv_tile;
    int part;  // which share of the KV head's query heads
    int first_q_head;
    int steps;  // query tiles to come, over all query heads
    int claim;
};

// What the math warps need to know of a stage.
struct alignas(8) QueryTile {
    int tile;
    int masked;  // whether a pair of the tile is outside the mask or the tensors
};

// And what the writers need to know of a step. `rank` is negative if the contributions are summed as they come.
struct alignas(16) StepSlot {
    uint32_t sum;  // the query tile, counted through all heads: its sum, and its ticket
    int q_tile;
    int rank;
    int contributors;
};

// Where a complete dQ tile that lies in a staging buffer belongs. No rows: the buffer is just free.
template <class Element>
struct CompleteTile {
    Element* dq;
    int rows;  // up to the end of the tensor
};

// What the loader would keep in registers if it had more of them.
struct alignas(16) LoaderNotes {
    // What it needs for each step comes at once: shared memory is busy, and a read of it takes long.
    int kv_tile_and_ways;  // the KV tile; whether the run goes back; the policy's way
    int q_head, batch;
    int end;   // the visit at which the run in hand ends
    int left;  // steps of the chain after it
    uint32_t chains;
    int side;  // whose chain it claimed last
};

// What a writer would keep in registers if it had more of them.
struct WriterNotes {
    Work work;  // of the running chain
    uint32_t chains, end, totals_read;
    uint32_t page_sides[kMostPages / 32];  // a bit for each
};

// Where the `count`-th thing lies in a ring of `kDepth` buffers, and the parity of its round, which the
// barriers' phases follow. Roles keep the count alone: one register for all rings that advance together.
template <int kDepth>
struct RingPlace {
    uint32_t slot;
    uint32_t parity;
    __device__ explicit RingPlace(uint32_t count) : slot(count % kDepth), parity(count / kDepth & 1) {}
};

// Everything that the element type and the head dimension decide: tiles, shared memory, MMA shapes.
template <class Element_, int kHeadDim_>
struct Config {
    using Element = Element_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kQRows = tile_shape(kHeadDim).q_rows;
    static constexpr int kKvRows = tile_shape(kHeadDim).kv_rows;

    static constexpr int kQStages = kHeadDim == 128 ? 2 : 3;  // at 128 a third one is worth less than its memory
    static constexpr int kDoutStages = 2;
    static constexpr int kDqStages = 2;
    static constexpr int kWriterWarps = kDqStages;  // one for each buffer
    static constexpr int kFirstWriterWarp = 2;
    static_assert(kPartPieces % (2 * kDqStages) == 0, "a buffer's parity may not depend on pieces of parts");
    static constexpr int kRowStages = 2;
    static constexpr int kStatisticsHelpers = 4;
    static constexpr int kChainSlots = 2;
    using QPlace = RingPlace<kQStages>;
    using DoutPlace = RingPlace<kDoutStages>;
    using DqPlace = RingPlace<kDqStages>;
    using RowsPlace = RingPlace<kRowStages>;
    using ChainPlace = RingPlace<kChainSlots>;
    static constexpr int kStepSlots = 16;  // the loader is at most four steps ahead of what a writer still has to read

    static constexpr int kMathWarpgroups = 2;
    static constexpr int kMathThreads = kMathWarpgroups * 128;
    static constexpr int kMathWarps = kMathThreads / 32;
    static constexpr int kThreads = 128 + kMathThreads;
    // 128 service threads and 256 math threads share the 64512 registers that 384 threads start with.
    static constexpr int kServiceRegisters = 24;
    static constexpr int kMathRegisters = 240;
    static_assert(kServiceRegisters * 128 + kMathRegisters * kMathThreads == 64512);

    static_assert(kKvRows == 64 * kMathWarpgroups, "each math warpgroup owns 64 KV rows");
    static_assert(kHeadDim == 64 || kHeadDim == 128);

    // Rows of 128 bytes, swizzled: panels of 64 columns, which one TMA box writes one after the other.
    using Panel = cute::GMMA::Layout_K_SW128_Atom<Element>;
    static constexpr int kPanelColumns = 64;
    static constexpr int kPanels = kHeadDim / kPanelColumns;

    template <int kRows, int kColumns>
    using Tile = decltype(cute::tile_to_shape(Panel{}, cute::Shape<cute::Int<kRows>, cute::Int<kColumns>>{}));
    template <int kRows, int kColumns, int kStages>
    using Stages = decltype(cute::tile_to_shape(
        Panel{}, cute::Shape<cute::Int<kRows>, cute::Int<kColumns>, cute::Int<kStages>>{}));
    template <int kRows, int kColumns, class Layout>
    using Transposed = decltype(cute::composition(
        Layout{},
        cute::Layout<cute::Shape<cute::Int<kColumns>, cute::Int<kRows>>, cute::Stride<cute::Int<kRows>, cute::_1>>{}));
    template <int kRows, int kColumns, int kStages, class Layout>
    using TransposedStages = decltype(cute::composition(
        Layout{}, cute::Layout<cute::Shape<cute::Int<kColumns>, cute::Int<kRows>, cute::Int<kStages>>,
                               cute::Stride<cute::Int<kRows>, cute::_1, cute::Int<kRows * kColumns>>>{}));

    using KvLayout = Tile<kKvRows, kHeadDim>;  // K, V: (key, feature)
    using KvTransposed = Transposed<kKvRows, kHeadDim, KvLayout>;
    using QLayout = Stages<kQRows, kHeadDim, kQStages>;  // (query, feature, stage)
    using QTransposed = TransposedStages<kQRows, kHeadDim, kQStages, QLayout>;
    using DoutLayout = Stages<kQRows, kHeadDim, kDoutStages>;
    using DoutTransposed = TransposedStages<kQRows, kHeadDim, kDoutStages, DoutLayout>;
    using DsLayout = Tile<kKvRows, kQRows>;  // dS^T: (key, query)
    using DsTransposed = Transposed<kKvRows, kQRows, DsLayout>;

    template <int kColumns>
    using AtomShape = cute::Shape<cute::_64, cute::Int<kColumns>, cute::_16>;
    static constexpr auto kRowMajor = cute::GMMA::Major::K;
    static constexpr auto kColumnMajor = cute::GMMA::Major::MN;

    // S^T = K Q^T and dP^T = V dO^T: (keys, queries), a warpgroup per 64 keys.
    using MmaScores = decltype(cute::make_tiled_mma(
        cute::GMMA::ss_op_selector<Element, Element, float, AtomShape<kQRows>, kRowMajor, kRowMajor>(),
        cute::Layout<cute::Shape<cute::_2, cute::_1, cute::_1>>{}));
    // dV = P^T dO and dK = dS^T Q: (keys, features). P and dS stay in the registers that the scores came in.
    using MmaGradient = decltype(cute::make_tiled_mma(
        cute::GMMA::rs_op_selector<Element, Element, float, AtomShape<kHeadDim>, kRowMajor, kColumnMajor>(),
        cute::Layout<cute::Shape<cute::_2, cute::_1, cute::_1>>{}));
    // dQ = dS K: (queries, features), 64 x 64 a warpgroup: one half of the features, or of the queries.
    using MmaDq = decltype(cute::make_tiled_mma(
        cute::GMMA::ss_op_selector<Element, Element, float, AtomShape<64>, kColumnMajor, kColumnMajor>(),
        cute::Layout<cute::Shape<cute::Int<kQRows / 64>, cute::Int<kHeadDim / 64>, cute::_1>>{}));
    static_assert(kQRows * kHeadDim == 64 * 64 * kMathWarpgroups, "a dQ tile is one 64 x 64 block a warpgroup");

    static constexpr int kDqTileFloats = kQRows * kHeadDim;
    static constexpr int kPartFloats = 2 * kKvRows * kHeadDim / kPartPieces;
    static_assert(kPartFloats <= kDqTileFloats);

    using Barrier = cutlass::arch::ClusterBarrier;
    using TransferBarrier = cutlass::arch::ClusterTransactionBarrier;

    // A query tile whose row statistics are being worked out; `batch` is negative if there is none.
    struct StatisticsTile {
        int batch, q_head, first_row;
        float const* lse;
        Element* dq;
        uint32_t* done;  // the counter of its head
    };
    struct StatisticsDesk {
        StatisticsTile tile[2];  // in hand, next
        TransferBarrier full[kRowStages];
        int side;  // whose tiles it claims
    };
    using Rows = Element[kRowStages][2][kStatisticsRows * kHeadDim];  // of O and dO

    struct alignas(1024) Shared {
        alignas(1024) Element k[kKvRows * kHeadDim];
        alignas(1024) Element v[kKvRows * kHeadDim];  // and at the end of a chain dV
        alignas(1024) Element q[kQStages][kQRows * kHeadDim];
        alignas(1024) Element dout[kDoutStages][kQRows * kHeadDim];
        alignas(1024) Element ds[kKvRows * kQRows];
        alignas(1024) float dq[kDqStages][kDqTileFloats];  // see StagedTile
        alignas(1024) Rows rows;
        alignas(128) float4 statistics[kQStages][kQRows / 2];  // (LSE, LSE, D, D) of two neighbouring queries
        QueryTile q_tile[kQStages];
        StepSlot step[kStepSlots];
        Work work[kChainSlots];
        LoaderNotes loader_notes;
        WriterNotes writer_notes[kWriterWarps];
        CompleteTile<Element> complete[kDqStages];
        StatisticsDesk statistics_desk[1 + kStatisticsHelpers];
        uint32_t cycles_to_block[2];  // of the place that is measured: see side()

        TransferBarrier k_full, v_full, q_full[kQStages], dout_full[kDoutStages];
        TransferBarrier dq_total_full[kWriterWarps], part_sum_full[kWriterWarps];
        Barrier k_empty, dv_full, q_empty[kQStages], dout_empty[kDoutStages];
        Barrier dq_full[kDqStages], dq_empty[kDqStages];
        Barrier chain_full[kChainSlots], chain_empty[kChainSlots];

        // The side of the L2 cache that this SM is on.
        __device__ int side() const { return cycles_to_block[1] < cycles_to_block[0]; }
        __device__ Rows& helper_rows(int helper) { return reinterpret_cast<Rows*>(dq)[helper]; }
    };
    static_assert(kStatisticsHelpers * sizeof(Rows) <= sizeof(Shared::dq));
    static_assert(sizeof(Shared) <= 232448, "shared memory of one CTA on sm_90");
};

// Hardware barriers between the math warpgroups; CUTLASS keeps the first few ids for itself.
// For math warpgroup w, ds_full + w: the other one has written its half of dS; ds_empty + w: it has read dS.
enum class WarpBarrier : uint32_t { math = 0, ds_full = 1, ds_empty = 3 };

}  // namespace dash
