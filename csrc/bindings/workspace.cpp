#include "core/workspace.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "names.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace dash::bindings {
namespace {

void check_head_dim(int head_dim) {
    if (head_dim != 64 && head_dim != 128) {
        throw py::value_error("head_dim is " + std::to_string(head_dim) + ", and kernels exist for 64 and 128");
    }
}

void check_heads(int heads_q, int heads_k) {
    if (heads_q < 1 || heads_k < 1 || heads_q % heads_k != 0) {
        throw py::value_error(std::to_string(heads_q) + " query heads can't share " + std::to_string(heads_k) +
                              " KV heads");
    }
}

std::pair<int, int> tile_shape_of(int head_dim) {
    if (head_dim < 1) throw py::value_error("head_dim is " + std::to_string(head_dim) + ", not positive");
    TileShape const shape = tile_shape(head_dim);
    return {shape.q_rows, shape.kv_rows};
}

std::vector<int> part_sizes(int heads_q, int heads_k, schedule::TileGrid const& grid, int head_dim,
                            bool waits_in_line) {
    check_heads(heads_q, heads_k);
    GroupParts const parts = group_parts(heads_q, heads_k, grid, head_dim, waits_in_line);
    std::vector<int> sizes;
    for (int part = 0, begin = 0; part < parts.count; begin += sizes[part++]) {
        if (parts.begin(part) != begin) throw std::logic_error("parts of a group do not follow each other");
        sizes.push_back(parts.size(part));
    }
    return sizes;
}

// Of a call, what decides its tiles.
BackwardParams call_sizes(int seqlen_q, int seqlen_k, int heads_q, int heads_k, int head_dim, bool causal) {
    check_heads(heads_q, heads_k);
    BackwardParams p{};
    p.seqlen_q = seqlen_q;
    p.seqlen_k = seqlen_k;
    p.heads_q = heads_q;
    p.heads_k = heads_k;
    p.head_dim = head_dim;
    p.causal = causal;
    return p;
}

schedule::TileGrid call_grid(int seqlen_q, int seqlen_k, int heads_q, int heads_k, int head_dim, bool causal) {
    BackwardParams const p = call_sizes(seqlen_q, seqlen_k, heads_q, heads_k, head_dim, causal);
    if (seqlen_q < 1 || seqlen_k < 1 || head_dim < 1)
        throw py::value_error("seqlen_q " + std::to_string(seqlen_q) + ", seqlen_k " + std::to_string(seqlen_k) +
                              " and head_dim " + std::to_string(head_dim) + " are not all positive");
    return tile_grid(p);
}

int64_t workspace_bytes(int batch, int seqlen_q, int seqlen_k, int heads_q, int heads_k, int head_dim, bool causal,
                        std::string const& schedule) {
    check_head_dim(head_dim);
    BackwardParams p = call_sizes(seqlen_q, seqlen_k, heads_q, heads_k, head_dim, causal);
    p.batch = batch;
    p.schedule = parse<ScheduleId>(schedule, kSchedules, "schedule");
    return workspace_layout(p).bytes;
}

}  // namespace

void bind_workspace(py::module_& m) {
    m.def("tile_shape", &tile_shape_of, "head_dim"_a);
    m.def("call_grid", &call_grid, "seqlen_q"_a, "seqlen_k"_a, "heads_q"_a, "heads_k"_a, "head_dim"_a, "causal"_a);
    m.def("part_sizes", &part_sizes, "heads_q"_a, "heads_k"_a, "grid"_a, "head_dim"_a, "waits_in_line"_a);
    m.def("side_1_opens", &side_1_opens, "cycle_ctas"_a, "ctas_on_0"_a, "ctas_on_1"_a);
    m.def("workspace_bytes", &workspace_bytes, "batch"_a, "seqlen_q"_a, "seqlen_k"_a, "heads_q"_a, "heads_k"_a,
          "head_dim"_a, "causal"_a, "schedule"_a);
}

}  // namespace dash::bindings
