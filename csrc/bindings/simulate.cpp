#include "lab/simulate.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace dash::bindings {
namespace {

using Table = py::array_t<int, py::array::c_style | py::array::forcecast>;

std::vector<int> values(Table const& table) { return {table.data(), table.data() + table.size()}; }

template <typename T>
py::array_t<T> array(std::vector<T> const& values) {
    return py::array_t<T>(py::ssize_t(values.size()), values.data());
}

// At each query tile the ranks must be a permutation: then every sum has as many tasks as ranks.
void check_way(lab::Chains const& chains, int way) {
    std::vector<int> contributors(chains.q_tiles, 0);
    for (int kv = 0; kv < chains.kv_tiles; ++kv) {
        std::vector<char> visited(chains.q_tiles, 0);
        for (int step = 0; step < chains.visits(way, kv); ++step) {
            int const q = chains.visit[chains.row(way, kv) + step];
            if (q < 0 || q >= chains.q_tiles || visited[q]++)
                throw py::value_error("KV tile " + std::to_string(kv) + " visits query tile " + std::to_string(q) +
                                      ", which is not there, or a second time");
            ++contributors[q];
        }
        if (chains.split[kv] < 0 || chains.split[kv] > chains.visits(way, kv))
            throw py::value_error("KV tile " + std::to_string(kv) + ": split " + std::to_string(chains.split[kv]) +
                                  " is not among its visits");
    }
    for (int q = 0; q < chains.q_tiles; ++q) {
        std::vector<char> taken(contributors[q], 0);
        for (int kv = 0; kv < chains.kv_tiles; ++kv) {
            auto const row = chains.visit.begin() + chains.row(way, kv);
            if (std::find(row, row + chains.visits(way, kv), q) == row + chains.visits(way, kv)) continue;
            int const r = chains.rank[chains.row(way, kv) + q];
            if (r < 0 || r >= contributors[q] || taken[r]++)
                throw py::value_error("KV tile " + std::to_string(kv) + " has rank " + std::to_string(r) +
                                      " at query tile " + std::to_string(q) + ", which has " +
                                      std::to_string(contributors[q]) + " contributors, or it is taken");
        }
    }
}

// The simulator trusts its tables: whatever could lead it out of them is refused here.
lab::Chains make_chains(Table const& chain_table, Table const& cycle_end, Table const& way, Table const& visit,
                        Table const& rank, Table const& q_heads, int together, bool turns, Table const& split,
                        int sides) {
    if (chain_table.ndim() != 2 || chain_table.shape(1) != 2) throw py::value_error("chain_table is not (claims, 2)");
    if (visit.ndim() != 3 || rank.ndim() != 3 || !std::equal(visit.shape(), visit.shape() + 3, rank.shape()))
        throw py::value_error("visit_table and rank_table are not both (ways, KV tiles, query tiles)");
    if (cycle_end.ndim() != 1 || cycle_end.shape(0) != chain_table.shape(0))
        throw py::value_error("cycle_end has not one entry a claim");
    if (together < 1) throw py::value_error("together is " + std::to_string(together) + ", not positive");
    if (sides != 1 && (sides != 2 || chain_table.shape(0) % 2 != 0))
        throw py::value_error("sides is " + std::to_string(sides) + " and not 1, or 2 for an even number of claims");
    if (split.ndim() != 1 || split.shape(0) != visit.shape(1))
        throw py::value_error("split has not one entry a KV tile");

    lab::Chains chains;
    chains.kv_tiles = int(visit.shape(1));
    chains.q_tiles = int(visit.shape(2));
    chains.q_heads = values(q_heads);
    chains.together = together;
    chains.turns = turns;
    chains.split = values(split);
    chains.sides = sides;
    chains.cycle_end = values(cycle_end);
    chains.way = values(way);
    chains.visit = values(visit);
    chains.rank = values(rank);
    int const claims = int(chain_table.shape(0));
    auto const pairs = chain_table.unchecked<2>();
    for (int claim = 0; claim < claims; ++claim) {
        chains.head.push_back(pairs(claim, 0));
        chains.kv_tile.push_back(pairs(claim, 1));
    }

    // Each (head, KV tile) once.
    if (claims % chains.kv_tiles != 0) throw py::value_error("the claims are not whole heads");
    int const heads = claims / chains.kv_tiles;
    std::vector<char> seen(claims, 0);
    for (int claim = 0; claim < claims; ++claim) {
        int const head = chains.head[claim], kv = chains.kv_tile[claim];
        bool const inside = head >= 0 && head < heads && kv >= 0 && kv < chains.kv_tiles;
        if (!inside || seen[head * chains.kv_tiles + kv]++)
            throw py::value_error("claim " + std::to_string(claim) + ": KV tile " + std::to_string(kv) + " of head " +
                                  std::to_string(head) + " is not there, or a second time");
    }
    if (q_heads.ndim() != 1 || q_heads.shape(0) != heads + 1 || chains.q_heads[0] != 0)
        throw py::value_error("q_heads has not one entry a head, from 0 on, and one more");
    for (size_t head = 1; head < chains.q_heads.size(); ++head)
        if (chains.q_heads[head] <= chains.q_heads[head - 1])
            throw py::value_error("head " + std::to_string(head - 1) + " walks no query head");
    if (way.ndim() != 1 || way.shape(0) != heads) throw py::value_error("way has not one entry a head");
    int const ways = int(visit.shape(0));
    for (int w : chains.way)
        if (w < 0 || w >= ways) throw py::value_error("way " + std::to_string(w) + " has no tables");
    for (int way = 0; way < ways; ++way) check_way(chains, way);
    return chains;
}

py::dict simulate(Table const& chain_table, Table const& cycle_end, Table const& way, Table const& visit_table,
                  Table const& rank_table, Table const& q_heads, int together, bool turns, Table const& split,
                  int sides, int sms, int others, double compute, double reduce, double signal, double chain,
                  int staging, double jitter, double pace, uint64_t seed, bool ordered) {
    lab::Chains const chains =
        make_chains(chain_table, cycle_end, way, visit_table, rank_table, q_heads, together, turns, split, sides);
    if (sms < 1) throw py::value_error("num_sms is " + std::to_string(sms) + ", not positive");
    if (others < 0 || others > (sides > 1 ? sms / 2 : 0))
        throw py::value_error("others is " + std::to_string(others) +
                              ", and not half of the SMs at most, or there is one side");
    if (staging < 0) throw py::value_error("staging is negative");
    if (!(compute >= 0 && reduce >= 0 && signal >= 0 && chain >= 0)) throw py::value_error("a time is negative");
    if (!(jitter >= 0 && jitter <= 1)) throw py::value_error("jitter is not in 0..1");
    if (!(pace >= 0 && pace <= 1)) throw py::value_error("pace is not in 0..1");
    lab::Timeline line;
    {
        py::gil_scoped_release released;
        line =
            lab::simulate(chains, {sms, others, compute, reduce, signal, chain, staging, jitter, pace, seed, ordered});
    }
    return py::dict("sm"_a = array(line.sm), "claim"_a = array(line.claim), "q_head"_a = array(line.q_head),
                    "q_tile"_a = array(line.q_tile), "compute_start"_a = array(line.compute_start),
                    "compute_end"_a = array(line.compute_end), "staged"_a = array(line.staged),
                    "reduce_start"_a = array(line.reduce_start), "reduce_end"_a = array(line.reduce_end),
                    "claimed"_a = array(line.claimed), "unfinished"_a = line.unfinished);
}

}  // namespace

void bind_lab(py::module_& m) {
    m.def("simulate", &simulate, py::kw_only(), "chain_table"_a, "cycle_end"_a, "way"_a, "visit_table"_a,
          "rank_table"_a, "q_heads"_a, "together"_a, "turns"_a, "split"_a, "sides"_a, "sms"_a, "others"_a, "compute"_a,
          "reduce"_a, "signal"_a, "chain"_a, "staging"_a, "jitter"_a, "pace"_a, "seed"_a, "ordered"_a);
}

}  // namespace dash::bindings
