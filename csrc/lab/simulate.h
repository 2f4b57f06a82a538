#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <queue>
#include <tuple>
#include <vector>

#include "../schedule/head_order.h"

// The machine on which a schedule is tried out: persistent CTAs, one an SM, that claim chains in the order
// of issue and run a chain's tasks (one query tile each) back to back. Only the lab uses it; a schedule
// comes as tables, so that schedules which are no policy yet can be tried as well.
namespace dash::lab {

struct Chains {
    int kv_tiles, q_tiles;
    std::vector<int> q_heads;  // by head: the first query head that its chains walk; and at the end, how many there are
    int together;              // in which sequence: see schedule/head_order.h
    bool turns;                // the same
    std::vector<int> split;    // by KV tile: the same
    int sides;                 // of the L2 cache: 2, if each half of the claims is an order of its own
    std::vector<int> head;     // by claim: which head, counted in chains
    std::vector<int> kv_tile;  // by claim
    std::vector<int> cycle_end;  // by claim: the first claim after the chains that may wait for it
    std::vector<int> way;        // by head: which of the tables below it goes by
    std::vector<int> visit;      // (ways, kv_tiles, q_tiles): the query tile of each step, -1 after the last
    std::vector<int> rank;       // (ways, kv_tiles, q_tiles): -1 where the two do not meet

    int claims() const { return int(head.size()); }
    int group(int claim) const { return q_heads[head[claim] + 1] - q_heads[head[claim]]; }
    int64_t row(int way, int kv) const { return (int64_t(way) * kv_tiles + kv) * q_tiles; }
    int visits(int way, int kv) const {
        auto const begin = visit.begin() + row(way, kv);
        return int(std::find(begin, begin + q_tiles, -1) - begin);
    }
};

// All times in one unit, the caller's.
struct Machine {
    int sms;
    int others;      // of them, SMs that begin with the second half of the claims
    double compute;  // of a task
    double reduce;   // of a task, until the sum has landed
    double signal;   // from there until the next rank may start
    double chain;    // before a chain's first task: its K and V come, the last chain's dK and dV go
    int staging;     // buffers for dQ tiles; 0: a task computes, then reduces, and only then the next one
    double jitter;   // compute times are uniform in [1 - jitter, 1 + jitter] * compute
    double pace;     // and so is a factor that each stretch of a chain has of its own
    uint64_t seed;   // of both
    bool ordered;    // false: reductions start when they can, in no order
};

// By task: claims in order of issue, their steps in order of execution.
struct Timeline {
    std::vector<int> sm, claim, q_head, q_tile;
    std::vector<double> compute_start, compute_end;
    std::vector<double> staged;  // when the SM could go on: compute_end, or later if no buffer was free
    std::vector<double> reduce_start, reduce_end;
    std::vector<double> claimed;  // by claim
    int64_t unfinished = 0;       // tasks; not 0: a deadlock
};

class Simulator {
  public:
    Simulator(Chains const& c, Machine const& m) : chains(c), machine(m) {
        number_tasks();
        order_reductions();
        sm_state.resize(machine.sms);
        for (int sm = 0; sm < machine.others; ++sm) sm_state[2 * sm + 1].side = 1;
        claimed[1] = half_of_claims();
    }

    Timeline run() {
        for (int sm = 0; sm < machine.sms; ++sm) claim_next(sm, 0.0);
        while (!events.empty()) {
            Event const event = events.top();
            events.pop();
            if (event.kind == Event::computed)
                computed(event.task, event.time);
            else
                reduced(event.task, event.time);
        }
        line.unfinished = std::count(line.reduce_end.begin(), line.reduce_end.end(), kNever);
        return std::move(line);
    }

  private:
    static constexpr double kNever = -1;
    static constexpr int kStretch = 16;  // tasks in a row with one pace

    struct Event {
        enum Kind { reduced, computed };  // what ends at one moment is seen by what starts then
        double time;
        Kind kind;
        int task;
        bool operator>(Event const& other) const {
            return std::tie(time, kind, task) > std::tie(other.time, other.kind, other.task);
        }
    };

    struct Sm {
        std::vector<int> tasks;  // all so far
        int side = 0;            // of the L2 cache, of the chain that it claimed last
        int claim = -1;
        bool draining = false;  // the next claim waits for the chain's last reduction
    };

    Chains const& chains;
    Machine const& machine;
    Timeline line;
    std::vector<Sm> sm_state;
    std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events;
    int claimed[2] = {};                      // the next one on each side
    std::vector<int> first_task, open_tasks;  // by claim
    std::vector<int> place;                   // by task: its index among its SM's tasks
    std::vector<char> blocked;                // by task: computed, and waits for a staging buffer

    // The sum of each query tile of each query head: its tasks by rank, and how far it is.
    std::vector<int> sum_begin, sum_tasks, ticket;
    std::vector<double> turn;  // when the ticket was seen by the next rank

    int half_of_claims() const { return chains.sides > 1 ? chains.claims() / 2 : chains.claims(); }
    bool anything_left(int side) const { return claimed[side] < (side == 0 ? half_of_claims() : chains.claims()); }

    void number_tasks() {
        int tasks = 0;
        for (int claim = 0; claim < chains.claims(); ++claim) {
            int const kv = chains.kv_tile[claim], way = chains.way[chains.head[claim]];
            int const visits = chains.visits(way, kv), group = chains.group(claim);
            first_task.push_back(tasks);
            open_tasks.push_back(visits * group);
            for (int i = 0; i < visits * group; ++i, ++tasks) {
                schedule::HeadRun const run =
                    schedule::head_run({chains.together, chains.split[kv], chains.turns}, group, visits, i);
                line.claim.push_back(claim);
                line.q_head.push_back(chains.q_heads[chains.head[claim]] + run.head);
                line.q_tile.push_back(chains.visit[chains.row(way, kv) + run.visit]);
            }
        }
        first_task.push_back(tasks);
        line.sm.assign(tasks, -1);
        for (auto* times : {&line.compute_start, &line.compute_end, &line.staged, &line.reduce_start, &line.reduce_end})
            times->assign(tasks, kNever);
        line.claimed.assign(chains.claims(), kNever);
        place.assign(tasks, -1);
        blocked.assign(tasks, 0);
    }

    int64_t sum_of(int task) const { return int64_t(line.q_head[task]) * chains.q_tiles + line.q_tile[task]; }
    int rank_of(int task) const {
        int const claim = line.claim[task];
        return chains.rank[chains.row(chains.way[chains.head[claim]], chains.kv_tile[claim]) + line.q_tile[task]];
    }

    void order_reductions() {
        int64_t const sums = int64_t(chains.q_heads.back()) * chains.q_tiles;
        sum_begin.assign(sums + 1, 0);
        for (size_t task = 0; task < line.claim.size(); ++task) ++sum_begin[sum_of(int(task)) + 1];
        for (int64_t sum = 0; sum < sums; ++sum) sum_begin[sum + 1] += sum_begin[sum];
        sum_tasks.assign(line.claim.size(), -1);
        for (size_t task = 0; task < line.claim.size(); ++task)
            sum_tasks[sum_begin[sum_of(int(task))] + rank_of(int(task))] = int(task);
        ticket.assign(sums, 0);
        turn.assign(sums, 0.0);
    }

    double compute_time(int task) const {
        if (machine.jitter == 0 && machine.pace == 0) return machine.compute;
        int const first = first_task[line.claim[task]];
        int const stretch = first + (task - first) / kStretch * kStretch;
        return machine.compute * (1 + machine.jitter * random(task, 0)) * (1 + machine.pace * random(stretch, 1));
    }

    // Uniform in [-1, 1], by splitmix64: a task's own number, whatever came before.
    double random(int task, uint64_t stream) const {
        uint64_t x = machine.seed * 0x9e3779b97f4a7c15u + uint64_t(task + 1) * 0xd1b54a32d192ed03u + stream;
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
        return 2 * (double((x ^ (x >> 31)) >> 11) / double(uint64_t(1) << 53)) - 1;
    }

    void claim_next(int sm, double now) {
        Sm& state = sm_state[sm];
        // A chain without visits is claimed and done: its dK and dV are zeros.
        for (;;) {
            if (!anything_left(state.side)) state.side ^= 1;
            if (!anything_left(state.side)) return;
            int const claim = claimed[state.side]++;
            state.claim = claim;
            line.claimed[claim] = now;
            now += machine.chain;
            if (open_tasks[claim] == 0) continue;
            start(first_task[claim], sm, now);
            return;
        }
    }

    void start(int task, int sm, double now) {
        line.sm[task] = sm;
        place[task] = int(sm_state[sm].tasks.size());
        sm_state[sm].tasks.push_back(task);
        line.compute_start[task] = now;
        events.push({now + compute_time(task), Event::computed, task});
    }

    void computed(int task, double now) {
        line.compute_end[task] = now;
        int const holder = place[task] - machine.staging;  // the last task that had this staging buffer
        if (machine.staging > 0 && holder >= 0 && line.reduce_end[sm_state[line.sm[task]].tasks[holder]] == kNever)
            blocked[task] = 1;
        else
            stage(task, now);
    }

    void stage(int task, double now) {
        line.staged[task] = now;
        if (!machine.ordered)
            reduce(task, now);
        else if (int64_t const sum = sum_of(task); ticket[sum] == rank_of(task))
            reduce(task, std::max(now, turn[sum]));
        if (machine.staging > 0) go_on(task, now);
    }

    void reduce(int task, double start) {
        line.reduce_start[task] = start;
        events.push({start + machine.reduce, Event::reduced, task});
    }

    void reduced(int task, double now) {
        line.reduce_end[task] = now;
        int64_t const sum = sum_of(task);
        turn[sum] = now + machine.signal;
        int const next = sum_begin[sum] + ++ticket[sum];
        if (machine.ordered && next < sum_begin[sum + 1]) {
            int const waiting = sum_tasks[next];
            if (line.staged[waiting] != kNever) reduce(waiting, std::max(line.staged[waiting], turn[sum]));
        }

        int const sm = line.sm[task];
        Sm& state = sm_state[sm];
        bool const chain_done = --open_tasks[line.claim[task]] == 0;
        if (machine.staging == 0) {
            go_on(task, now);
        } else if (int const heir = place[task] + machine.staging;
                   heir < int(state.tasks.size()) && blocked[state.tasks[heir]]) {
            blocked[state.tasks[heir]] = 0;
            stage(state.tasks[heir], now);
        }
        if (state.draining && chain_done && state.claim == line.claim[task]) {
            state.draining = false;
            claim_next(sm, now);
        }
    }

    // The SM is through with a task.
    void go_on(int task, double now) {
        int const sm = line.sm[task], claim = line.claim[task];
        if (task + 1 < first_task[claim + 1]) return start(task + 1, sm, now);
        // As the kernel's loader: two chains of one cycle are never held at the same time.
        int const cycle_end = chains.cycle_end[claim];
        if (open_tasks[claim] == 0 || cycle_end == claim + 1 || claimed[sm_state[sm].side] >= cycle_end)
            claim_next(sm, now);
        else
            sm_state[sm].draining = true;
    }
};

inline Timeline simulate(Chains const& chains, Machine const& machine) { return Simulator(chains, machine).run(); }

}  // namespace dash::lab
