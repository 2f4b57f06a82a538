// The C interface of core/backward.h.

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <exception>

#include "../core/workspace.h"
#include "errors.cuh"
#include "launch.cuh"
#include "multiprocessors.cuh"
#include "ordering.cuh"
#include "prepare.cuh"
#include "tensor_maps.cuh"

namespace dash {
namespace {

using Launcher = cudaError_t (*)(KernelArguments const&, int, cudaStream_t);

template <class Element, int kHeadDim>
Launcher launcher_for(ScheduleId schedule) {
    switch (schedule) {
        case ScheduleId::naive:
            return launch_backward<Element, kHeadDim, schedule::Naive>;
        case ScheduleId::descending:
            return launch_backward<Element, kHeadDim, schedule::Descending>;
        case ScheduleId::shift:
            return launch_backward<Element, kHeadDim, schedule::Shift>;
        case ScheduleId::symmetric_shift:
            return launch_backward<Element, kHeadDim, schedule::SymmetricShift>;
    }
    throw std::invalid_argument("schedule: unknown number " + std::to_string(int(schedule)));
}

// Calls `f(element, head_dim)` with values whose types say which they are.
template <class F>
auto with_types(BackwardParams const& p, F&& f) {
    auto const with_dim = [&](auto element) {
        if (p.head_dim == 64) return f(element, std::integral_constant<int, 64>{});
        if (p.head_dim == 128) return f(element, std::integral_constant<int, 128>{});
        throw std::invalid_argument("head_dim: 64 and 128 are supported, not " + std::to_string(p.head_dim));
    };
    return p.element == Element::bf16 ? with_dim(bf16{}) : with_dim(fp16{});
}

// Calls `f(policy)`.
template <class F>
int with_policy(ScheduleId schedule, schedule::TileGrid const& grid, F&& f) {
    switch (schedule) {
        case ScheduleId::naive:
            return f(schedule::Naive(grid));
        case ScheduleId::descending:
            return f(schedule::Descending(grid));
        case ScheduleId::shift:
            return f(schedule::Shift(grid));
        case ScheduleId::symmetric_shift:
            return f(schedule::SymmetricShift(grid));
    }
    return 1;
}

// How many CTAs must run at the same time: those of a cycle, if sums have an order.
int cycle_ctas(BackwardParams const& p, schedule::TileGrid const& grid) {
    if (!p.ordered) return 1;
    return with_policy(p.schedule, grid, [](auto const& policy) { return policy.resident_ctas_needed(); });
}

// Runs `f`; what it throws becomes a message and a return code.
template <class F>
int guarded(char* message, size_t size, F&& f) {
    try {
        return f();
    } catch (std::exception const& error) {
        if (size) std::snprintf(message, size, "%s", error.what());
        return -1;
    }
}

// Makes a device the current one for a scope. Where it is already nothing is set, which would take a green context of
// the caller down.
class CurrentDevice {
  public:
    explicit CurrentDevice(int device) : device_(device) {
        check(cudaGetDevice(&before_), "device");
        if (device_ != before_) check(cudaSetDevice(device_), "device");
    }
    ~CurrentDevice() {
        if (device_ != before_) cudaSetDevice(before_);
    }
    CurrentDevice(CurrentDevice const&) = delete;
    CurrentDevice& operator=(CurrentDevice const&) = delete;

  private:
    int device_, before_ = 0;
};

int resident_ctas(int device, void* stream, int sm_margin) {
    int const sms = multiprocessors(device, static_cast<cudaStream_t>(stream));
    if (sm_margin < 0 || sm_margin >= sms)
        throw std::invalid_argument("sm_margin: " + std::to_string(sm_margin) + " is not in [0, " +
                                    std::to_string(sms) + "), the multiprocessors that the stream can use");
    return sms - sm_margin;
}

// Of each device. They live in host memory, so that they can be read after a trap has taken the context down.
struct StuckSlots {
    StuckSlot* first;
    int count;

    StuckSlots() {
        check(cudaGetDeviceCount(&count), "devices");
        size_t const bytes = count * sizeof(StuckSlot);
        // The first call of a process may be captured into a graph, during which memory is allocated in this mode only.
        cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
        check(cudaThreadExchangeStreamCaptureMode(&mode), "stream capture mode");
        void* memory = nullptr;
        cudaError_t const status = cudaHostAlloc(&memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
        check(cudaThreadExchangeStreamCaptureMode(&mode), "stream capture mode");
        check(status, "memory for reports");
        first = new (memory) StuckSlot[count]{};
    }
};

// Null before the first launch.
std::atomic<StuckSlots const*> the_stuck_slots{nullptr};

StuckSlot* stuck_slot(int device) {
    static StuckSlots const slots;
    the_stuck_slots = &slots;
    return slots.first + device;
}

// Returns how many CTAs can be resident. What can be refused is refused here, before the first launch.
int validate(BackwardParams const& p) {
    with_types(p, [&](auto element, auto head_dim) {
        return launcher_for<decltype(element), head_dim>(p.schedule) != nullptr;
    });
    schedule::TileGrid const grid = tile_grid(p);
    int64_t const chains = int64_t(p.batch) * p.heads_q * grid.kv_tiles();
    if (chains >= int64_t(1) << 30)
        throw std::invalid_argument("batch * heads * KV tiles: " + std::to_string(chains) + " is 2^30 or more");
    if (p.batch > 65535) throw std::invalid_argument("batch: " + std::to_string(p.batch) + " is above 65535");
    if (p.heads_q > 65535) throw std::invalid_argument("heads: " + std::to_string(p.heads_q) + " is above 65535");
    int const resident = resident_ctas(p.device, p.stream, p.sm_margin);
    int const needed = cycle_ctas(p, grid);
    if (needed > resident)
        throw std::invalid_argument("schedule: its cycles of " + std::to_string(needed) +
                                    " KV tiles need as many multiprocessors, and the stream has " +
                                    std::to_string(resident) +
                                    " after sm_margin; \"naive\", \"descending\" and, under a causal mask with as many "
                                    "queries as keys, \"shift\" run on any number");
    return resident;
}

struct WorkspacePointers {
    unsigned char *measured, *page_sides;
    float *dq_sum, *dkv_sum;
    uint32_t *dq_tickets, *dkv_tickets, *seats, *claims, *statistics_claims, *statistics_done;

    WorkspacePointers(BackwardParams const& p, WorkspaceLayout const& layout) {
        auto const address = reinterpret_cast<uintptr_t>(p.workspace);
        auto* const base =
            reinterpret_cast<unsigned char*>((address + layout.alignment - 1) / layout.alignment * layout.alignment);
        measured = base + layout.measured;
        dq_sum = reinterpret_cast<float*>(base + layout.dq_sum);
        dkv_sum = reinterpret_cast<float*>(base + layout.dkv_sum);
        dq_tickets = reinterpret_cast<uint32_t*>(base + layout.dq_tickets);
        dkv_tickets = reinterpret_cast<uint32_t*>(base + layout.dkv_tickets);
        seats = reinterpret_cast<uint32_t*>(base + layout.claims);
        claims = seats + 3;
        statistics_claims = seats + 5;
        statistics_done = reinterpret_cast<uint32_t*>(base + layout.statistics_done);
        page_sides = base + layout.page_sides;
    }

    uint32_t first_place() const { return reinterpret_cast<uintptr_t>(dq_sum) / kSumPlace % kPlacesAPage; }
    // That `places` places lie in, as far as their sides are measured.
    int pages(int64_t places) const {
        return int(std::min<int64_t>((first_place() + places - 1) / kPlacesAPage + 1, kMostPages));
    }
};

int sides_of(BackwardParams const& p, schedule::TileGrid const& grid, int resident) {
    int const sms = multiprocessors(p.device);
    int const ways = with_policy(p.schedule, grid, [](auto const& policy) { return policy.ways(); });
    return l2_sides(int64_t(p.batch) * p.heads_k, group_parts(p, grid).count, grid, ways, cycle_ctas(p, grid),
                    ctas_a_side(sms, sms - resident));
}

int prepare(BackwardParams const& p) {
    CurrentDevice const current(p.device);
    int const resident = validate(p);
    stuck_slot(p.device);  // fails, if it does, before the first launch
    WorkspaceLayout const layout = workspace_layout(p);
    WorkspacePointers const workspace(p, layout);
    schedule::TileGrid const grid = tile_grid(p);
    PrepareArguments args{};
    args.counters = workspace.dq_tickets;
    args.counter_words = layout.counters;
    args.dq_sums = reinterpret_cast<float4*>(workspace.dq_sum);
    if (!p.ordered) args.quads_to_clear = (layout.dkv_sum - layout.dq_sum) / 16;
    if (sides_of(p, grid, resident) > 1) {
        args.measured = workspace.measured;
        args.page_sides = workspace.page_sides;
        args.pages = workspace.pages(int64_t(p.batch) * p.heads_q / 2 * grid.q_tiles());
        args.first_place = workspace.first_place();
    }
    args.dq = p.dq;
    args.heads_q = p.heads_q;
    args.blind_rows_a_head = schedule::min_of(grid.first_query(0) * grid.q_rows, p.seqlen_q);
    args.blind_rows = int64_t(p.batch) * p.heads_q * args.blind_rows_a_head;

    int64_t const most = std::max({args.counter_words, args.quads_to_clear, args.blind_rows * p.head_dim / 8});
    cudaLaunchConfig_t config{};
    int64_t const blocks = std::max<int64_t>(schedule::ceil_div(args.pages, kPagesABlock),
                                             std::min((most + kPrepareThreads - 1) / kPrepareThreads, int64_t(4096)));
    config.gridDim = unsigned(blocks);
    config.blockDim = kPrepareThreads;
    config.stream = static_cast<cudaStream_t>(p.stream);
    check(with_types(p,
                     [&](auto element, auto head_dim) {
                         return cudaLaunchKernelEx(&config, prepare_kernel<decltype(element), head_dim>, args);
                     }),
          "launch of the prepare kernel");
    return 0;
}

int run(BackwardParams const& p) {
    CurrentDevice const current(p.device);
    int const resident = validate(p);
    WorkspaceLayout const layout = workspace_layout(p);
    WorkspacePointers const workspace(p, layout);
    TileShape const shape = tile_shape(p.head_dim);

    KernelArguments args;
    args.grid = tile_grid(p);
    auto const type = p.element == Element::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    auto const tiles = [&](char const* name, MatrixView const& view, int rows, int heads, int box_rows) {
        return tensor_map(name, view, {64, rows, p.head_dim / 64, heads, p.batch}, box_rows, type, 2,
                          CU_TENSOR_MAP_SWIZZLE_128B);
    };
    args.q = tiles("q", p.q, p.seqlen_q, p.heads_q, shape.q_rows);
    args.dout = tiles("dout", p.dout, p.seqlen_q, p.heads_q, shape.q_rows);
    args.k = tiles("k", p.k, p.seqlen_k, p.heads_k, shape.kv_rows);
    args.v = tiles("v", p.v, p.seqlen_k, p.heads_k, shape.kv_rows);
    args.dv = tiles("dv", p.dv, p.seqlen_k, p.heads_k, shape.kv_rows);
    args.out_rows = tiles("out", p.out, p.seqlen_q, p.heads_q, kStatisticsRows);
    args.dout_rows = tiles("dout", p.dout, p.seqlen_q, p.heads_q, kStatisticsRows);
    MatrixView const words{p.dq.data, p.dq.batch_stride / 2, p.dq.row_stride / 2, p.dq.head_stride / 2};
    args.statistics = tensor_map("dq", words, {p.head_dim / 2, p.seqlen_q, 1, p.heads_q, p.batch},
                                 shape.q_rows / 2 / statistics_pairs_a_row(p.head_dim), CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
                                 4, CU_TENSOR_MAP_SWIZZLE_NONE);

    args.q_tiles = args.grid.q_tiles();
    args.kv_tiles = args.grid.kv_tiles();
    args.blind_tiles = args.grid.first_query(0);
    args.batch = p.batch;
    args.heads_q = p.heads_q;
    args.heads_k = p.heads_k;
    args.parts = group_parts(p, args.grid);
    int const sides = args.sides = sides_of(p, args.grid, resident);
    args.grid = issued_on(sides, resident, args.grid);
    args.chain_heads = p.batch * p.heads_k * args.parts.count / sides;
    args.chains = args.chain_heads * args.grid.kv_tiles();
    args.q_heads = p.batch * p.heads_q / sides;
    args.dq_sums = uint32_t(args.q_heads) * args.q_tiles;
    args.measured = workspace.measured;
    args.first_place = workspace.first_place();
    args.pages = sides > 1 ? workspace.pages(args.dq_sums) : 0;
    args.page_sides = workspace.page_sides;
    args.cycle_ctas = cycle_ctas(p, args.grid);
    for (int set = 0; set < 2; ++set) args.sums[set] = sum_map(workspace.dq_sum, args.dq_sums, set, sides);
    args.ordered = p.ordered != 0;
    args.scale = p.softmax_scale;
    args.scale_log2 = p.softmax_scale * kLog2e;
    args.wait_limit = patience_limit(p.wait_limit_ns);
    args.stuck = stuck_slot(p.device);
    args.lse = p.lse;
    args.dlse = p.dlse;
    args.dkv_sum = workspace.dkv_sum;
    args.dq_tickets = workspace.dq_tickets;
    args.counter_words = uint32_t(layout.counters);
    args.dkv_tickets = workspace.dkv_tickets;
    args.seats = workspace.seats;
    args.claims = workspace.claims;
    args.statistics_claims = workspace.statistics_claims;
    args.statistics_done = workspace.statistics_done;
    args.dq = p.dq;
    args.dk = p.dk;

    Launcher const launch = with_types(
        p, [&](auto element, auto head_dim) { return launcher_for<decltype(element), head_dim>(p.schedule); });
    int const ctas = schedule::min_of(resident, sides * args.chains);
    check(launch(args, ctas, static_cast<cudaStream_t>(p.stream)), "launch of the backward kernel");
    return 0;
}

}  // namespace
}  // namespace dash

#define DASH_EXPORT extern "C" __attribute__((visibility("default")))

DASH_EXPORT int dash_backward_prepare(dash::BackwardParams const* params, char* message, size_t message_size) {
    return dash::guarded(message, message_size, [&] { return dash::prepare(*params); });
}

DASH_EXPORT int dash_backward_run(dash::BackwardParams const* params, char* message, size_t message_size) {
    return dash::guarded(message, message_size, [&] { return dash::run(*params); });
}

DASH_EXPORT int dash_resident_ctas(int device, void* stream, int sm_margin, char* message, size_t message_size) {
    return dash::guarded(message, message_size, [&] {
        dash::CurrentDevice const current(device);
        return dash::resident_ctas(device, stream, sm_margin);
    });
}

DASH_EXPORT int dash_stuck_report(char* message, size_t message_size) {
    return dash::guarded(message, message_size, [&] {
        dash::StuckSlots const* const slots = dash::the_stuck_slots;
        if (!slots) return 0;
        dash::StuckSlot const* const begin = slots->first;
        dash::StuckSlot const* const end = begin + slots->count;
        dash::StuckSlot const* const slot = std::find_if(begin, end, [](auto const& s) { return s.complete != 0; });
        if (slot == end) return 0;
        dash::StuckReport const& r = slot->report;
        if (r.sum == dash::StuckReport::row_statistics)
            std::snprintf(
                message, message_size,
                "dash_flash_attn: a wait without end. KV tile %d waits for the row statistics of head %d, batch entry "
                "%d: they are there for %u of %u query tiles.",
                r.kv_tile, r.head, r.batch, r.ticket, r.turn);
        else
            std::snprintf(
                message, message_size,
                "dash_flash_attn: a wait without end. KV tile %d waits for its turn %u at %s tile %d of head %d, "
                "batch entry %d, whose ticket stands at %u.",
                r.kv_tile, r.turn, r.sum == dash::StuckReport::query_tile ? "query" : "KV", r.tile, r.head, r.batch,
                r.ticket);
        return 1;
    });
}
