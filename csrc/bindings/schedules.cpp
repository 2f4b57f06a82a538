#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "completion.h"
#include "core/l2_sides.h"
#include "names.h"
#include "schedule/policy.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace dash::bindings {
namespace {

using schedule::TileGrid;

// The policies trust their arguments; Python's callers are not trusted.
int checked(int value, int end, char const* what) {
    if (value < 0 || value >= end) {
        throw py::index_error(std::string(what) + " " + std::to_string(value) + " is not in 0.." +
                              std::to_string(end - 1));
    }
    return value;
}

int checked_positive(int value, char const* what) {
    if (value < 1) throw py::value_error(std::string(what) + " is " + std::to_string(value) + ", not positive");
    return value;
}

TileGrid make_grid(int seqlen_q, int seqlen_k, int q_rows, int kv_rows, bool causal, bool paired, int heads) {
    return {checked_positive(seqlen_q, "seqlen_q"),
            checked_positive(seqlen_k, "seqlen_k"),
            checked_positive(q_rows, "q_rows"),
            checked_positive(kv_rows, "kv_rows"),
            causal,
            paired,
            checked_positive(heads, "heads")};
}

void bind_grid(py::module_& m) {
    py::class_<TileGrid>(m, "TileGrid")
        .def(py::init(&make_grid), "seqlen_q"_a, "seqlen_k"_a, "q_rows"_a, "kv_rows"_a, "causal"_a, "paired"_a = false,
             "heads"_a = 1)
        .def_readonly("seqlen_q", &TileGrid::seqlen_q)
        .def_readonly("seqlen_k", &TileGrid::seqlen_k)
        .def_readonly("q_rows", &TileGrid::q_rows)
        .def_readonly("kv_rows", &TileGrid::kv_rows)
        .def_readonly("causal", &TileGrid::causal)
        .def_readonly("paired", &TileGrid::paired)
        .def_readonly("heads", &TileGrid::heads)
        .def_readonly("two_sides", &TileGrid::two_sides)
        .def_readonly("ctas_an_order", &TileGrid::ctas_an_order)
        .def(
            "on_sides",
            [](TileGrid const& grid, int sides, int ctas) {
                if (sides != 1 && sides != 2)
                    throw py::value_error("sides is " + std::to_string(sides) + " and not 1 or 2");
                return issued_on(sides, checked_positive(ctas, "ctas"), grid);
            },
            "sides"_a, "ctas"_a = schedule::kChainsThatFillAChip)
        .def("q_tiles", &TileGrid::q_tiles)
        .def("kv_tiles", &TileGrid::kv_tiles)
        .def("offset", &TileGrid::offset)
        .def(
            "first_query",
            [](TileGrid const& g, int kv) { return g.first_query(checked(kv, g.kv_tiles(), "KV tile")); }, "kv_tile"_a)
        .def(
            "contributors",
            [](TileGrid const& g, int q) { return g.contributors(checked(q, g.q_tiles(), "query tile")); }, "q_tile"_a)
        .def(
            "needs_mask",
            [](TileGrid const& g, int kv, int q) {
                return g.needs_mask(checked(kv, g.kv_tiles(), "KV tile"), checked(q, g.q_tiles(), "query tile"));
            },
            "kv_tile"_a, "q_tile"_a);
}

// (KV tiles, query tiles) of int32, -1 where a tile pair has no value.
py::array_t<int> pair_table(TileGrid const& g) {
    py::array_t<int> table({g.kv_tiles(), g.q_tiles()});
    std::fill_n(table.mutable_data(), table.size(), -1);
    return table;
}

template <typename Policy>
py::array_t<int> visit_table(Policy const& p, int way) {
    checked(way, p.ways(), "way");
    py::array_t<int> table = pair_table(p.grid);
    auto cells = table.mutable_unchecked<2>();
    for (int kv = 0; kv < p.grid.kv_tiles(); ++kv) {
        for (int step = 0; step < p.visits(kv); ++step) cells(kv, step) = p.visit(kv, step, way);
    }
    return table;
}

template <typename Policy>
py::array_t<int> rank_table(Policy const& p, int way) {
    checked(way, p.ways(), "way");
    py::array_t<int> table = pair_table(p.grid);
    auto cells = table.mutable_unchecked<2>();
    for (int q = 0; q < p.grid.q_tiles(); ++q) {
        for (int kv = 0; kv < p.grid.contributors(q); ++kv) cells(kv, q) = p.rank(kv, q, way);
    }
    return table;
}

// (KV tiles) of int32: where the chains' visits split, see schedule/head_order.h.
template <typename Policy>
py::array_t<int> split_table(Policy const& p) {
    py::array_t<int> table(p.grid.kv_tiles());
    for (int kv = 0; kv < p.grid.kv_tiles(); ++kv) table.mutable_at(kv) = p.heads(kv, 1).split;
    return table;
}

// (group * visits, 2) of int32: the head of the group and the query tile at each step of a chain.
template <typename Policy>
py::array_t<int> walk(Policy const& p, int kv_tile, int group, int way) {
    checked(way, p.ways(), "way");
    int const visits = p.visits(kv_tile), steps = checked_positive(group, "group") * visits;
    py::array_t<int> table({steps, 2});
    auto cells = table.mutable_unchecked<2>();
    for (int step = 0; step < steps; ++step) {
        schedule::HeadRun const run = schedule::head_run(p.heads(kv_tile, group), group, visits, step);
        cells(step, 0) = run.head;
        cells(step, 1) = p.visit(kv_tile, run.visit, way);
    }
    return table;
}

template <typename Policy>
py::array_t<int> chain_table(Policy const& p, int heads) {
    int const claims = checked_positive(heads, "heads") * p.grid.kv_tiles();
    py::array_t<int> table({claims, 2});
    auto cells = table.mutable_unchecked<2>();
    for (int claim = 0; claim < claims; ++claim) {
        schedule::Chain const chain = p.chain(claim, heads);
        cells(claim, 0) = chain.head;
        cells(claim, 1) = chain.kv_tile;
    }
    return table;
}

template <typename Policy>
void check_claim(Policy const& p, int claim, int heads) {
    checked(claim, checked_positive(heads, "heads") * p.grid.kv_tiles(), "claim");
}

template <typename Policy>
py::class_<Policy> bind_policy(py::module_& m, char const* class_name) {
    auto const kv_checked = [](Policy const& p, int kv) { return checked(kv, p.grid.kv_tiles(), "KV tile"); };
    return py::class_<Policy>(m, class_name)
        .def(py::init<TileGrid const&>(), "grid"_a)
        .def_readonly("grid", &Policy::grid)
        .def_property_readonly_static("name", [](py::object) { return Policy::kName; })
        .def_property_readonly_static("waits_in_line", [](py::object) { return Policy::kWaitsInLine; })
        .def_property_readonly("ways", &Policy::ways)
        .def(
            "visits", [=](Policy const& p, int kv) { return p.visits(kv_checked(p, kv)); }, "kv_tile"_a)
        .def(
            "visit",
            [=](Policy const& p, int kv, int step, int way) {
                checked(way, p.ways(), "way");
                return p.visit(kv_checked(p, kv), checked(step, p.visits(kv), "step"), way);
            },
            "kv_tile"_a, "step"_a, "way"_a = 0)
        .def(
            "rank",
            [](Policy const& p, int kv, int q, int way) {
                checked(way, p.ways(), "way");
                checked(q, p.grid.q_tiles(), "query tile");
                return p.rank(checked(kv, p.grid.contributors(q), "contributing KV tile"), q, way);
            },
            "kv_tile"_a, "q_tile"_a, "way"_a = 0)
        .def(
            "chain",
            [](Policy const& p, int claim, int heads) {
                check_claim(p, claim, heads);
                schedule::Chain const chain = p.chain(claim, heads);
                return std::pair(chain.head, chain.kv_tile);
            },
            "claim"_a, "heads"_a)
        .def(
            "cycle_end",
            [](Policy const& p, int claim, int heads) {
                check_claim(p, claim, heads);
                return p.cycle_end(claim, heads);
            },
            "claim"_a, "heads"_a)
        .def(
            "slot", [=](Policy const& p, int kv) { return p.slot(kv_checked(p, kv)); }, "kv_tile"_a)
        .def("resident_ctas_needed", &Policy::resident_ctas_needed)
        .def(
            "idle_ctas", [](Policy const& p, int ctas) { return p.idle_ctas(checked_positive(ctas, "ctas")); },
            "ctas"_a)
        .def(
            "l2_sides",
            [](Policy const& p, int batch, int heads_k, int parts, int sms, int sm_margin) {
                return l2_sides(int64_t(batch) * heads_k, parts, p, p.resident_ctas_needed(),
                                ctas_a_side(sms, sm_margin));
            },
            "batch"_a, "heads_k"_a, "parts"_a, "sms"_a, "sm_margin"_a = 0)
        .def("visit_table", &visit_table<Policy>, "way"_a = 0)
        .def("rank_table", &rank_table<Policy>, "way"_a = 0)
        .def("chain_table", &chain_table<Policy>, "heads"_a)
        .def(
            "walk", [=](Policy const& p, int kv, int group, int way) { return walk(p, kv_checked(p, kv), group, way); },
            "kv_tile"_a, "group"_a, "way"_a = 0)
        .def("split_table", &split_table<Policy>)
        .def(
            "heads_together",
            [](Policy const& p, int group) { return p.heads(0, checked_positive(group, "group")).together; }, "group"_a)
        .def_property_readonly("turns", [](Policy const& p) { return p.heads(0, 1).turns; })
        .def(
            "completes",
            [](Policy const& p, int heads, int ctas, bool claim_ahead, std::vector<int> const& parts, int others,
               std::optional<bool> const& open) {
                for (int size : parts) checked_positive(size, "a part");
                int const count = checked_positive(int(parts.size()), "parts");
                if (others < 0) throw py::value_error("others: " + std::to_string(others) + " is negative");
                if (others > 0 && heads % (2 * count) != 0)
                    throw py::value_error("heads: " + std::to_string(heads) +
                                          " do not fall into halves of whole parts");
                if (checked_positive(heads, "heads") % count != 0)
                    throw py::value_error("heads: " + std::to_string(heads) + " are not whole parts of " +
                                          std::to_string(count));
                bool const opens = side_1_opens(p.resident_ctas_needed(), checked_positive(ctas, "ctas"), others);
                return completes(p, heads, ctas, claim_ahead, parts, others, open.value_or(opens));
            },
            "heads"_a, "ctas"_a, "claim_ahead"_a = true, "parts"_a = std::vector<int>{1}, "others"_a = 0,
            "open"_a = py::none());
}

}  // namespace

void bind_schedules(py::module_& m) {
    bind_grid(m);
    m.def("schedules", [] { return py::tuple(py::cast(kSchedules)); });
    m.def("heads_in_pairs", &schedule::heads_in_pairs, "heads_q"_a, "heads_k"_a);
    bind_policy<schedule::Naive>(m, "Naive");
    bind_policy<schedule::Descending>(m, "Descending");
    bind_policy<schedule::Rotating>(m, "Rotating")
        .def_property_readonly("in_line", [](schedule::Rotating const& p) { return p.order.in_line; })
        .def_property_readonly("group_size", [](schedule::Rotating const& p) { return p.order.cycle.group_size; });
    bind_policy<schedule::Climbing>(m, "Climbing");
    bind_policy<schedule::OppositeHeads>(m, "OppositeHeads");
    bind_policy<schedule::SymmetricShift>(m, "SymmetricShift")
        .def("folds", &schedule::SymmetricShift::folds)
        .def("heads_that_fit", &schedule::SymmetricShift::heads_that_fit)
        .def("fills", &schedule::SymmetricShift::fills);
    m.def(
        "policy",
        [](std::string const& name, TileGrid const& grid) {
            return schedule::with_policy(parse<ScheduleId>(name, kSchedules, "schedule"), grid,
                                         [](auto const& policy) { return py::cast(policy); });
        },
        "schedule"_a, "grid"_a);
}

}  // namespace dash::bindings
