"""The lab: plans, the simulator, the theorems of DASH, and what the lab found beyond them."""

import itertools
import json
import random
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dash_flash_attn import _native
from dash_flash_attn.lab import Costs, Deadlock, calibrate, clocks, command, lower_bound, simulate
from dash_flash_attn.lab.dag import Cycle, critical_path, depths, schedule_time, shortest
from dash_flash_attn.lab.explain import H200_COSTS, explain
from dash_flash_attn.ops import auto_schedule
from dash_flash_attn.schedule import (
    SCHEDULES,
    Schedule,
    UnsoundPlan,
    make_policy,
    plan,
    plan_call,
    waits_in_line,
)

# Binary fractions, so that sums are exact and makespans can be compared for equality.
C, R = 1.0, 0.25
TASK = C + R

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"

KERNEL = {"compute": 2.75, "reduce": 1.0, "signal": 0.5, "model": "pipelined"}  # microseconds on an H200


def group_of(p):
    """The query heads that a chain walks, where it is the same for all."""
    (size,) = set(np.diff(p.q_heads).tolist())
    return size


def needed(n, causal):
    return [list(range(kv if causal else 0, n)) for kv in range(n)]


# Plans.


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_plan_is_the_policy_written_out(name, causal):
    p = plan(name, 10, 6, causal=causal, num_heads=3, group=2, tile_rows=(3, 5))
    policy = make_policy(name, _native.TileGrid(30, 30, 3, 5, causal))
    assert [(c.head, c.kv_tile) for c in p.chains] == [policy.chain(claim, 3) for claim in range(18)]
    for chain in p.chains:
        kv, way = chain.kv_tile, chain.head % policy.ways
        assert chain.visits == tuple(policy.visit(kv, step, way) for step in range(policy.visits(kv)))
        assert all(p.rank(chain.head, kv, q) == policy.rank(kv, q, way) for q in chain.visits)
    assert p.cycle_end.tolist() == [policy.cycle_end(claim, 3) for claim in range(18)]
    assert (p.num_heads, p.num_tasks) == (3, 6 * sum(map(policy.visits, range(6))))
    assert p.num_ctas_needed == policy.resident_ctas_needed()
    p.validate()


def test_rank_of_pairs_that_do_not_meet():
    p = plan("naive", 4, 4, causal=True, num_heads=2)
    assert p.rank(1, 2, 3) == 2
    for wrong in ((2, 2, 3), (0, 3, 2), (0, -1, 3), (0, 0, 4)):
        with pytest.raises(IndexError):
            p.rank(*wrong)


def test_the_plan_of_a_call_is_the_kernels():
    # 4 KV heads of 2 query heads each and 16 KV tiles: 64 chains an entry, so the group is cut into two.
    p = plan_call("shift", 3, 2048, 2048, 8, 4, 128, causal=False)
    assert _native.part_sizes(8, 4, p.grid, 128, False) == [1, 1]
    assert p.q_heads.tolist() == list(range(3 * 4 * 2 + 1))
    assert (p.grid.q_tiles(), p.grid.kv_tiles()) == (32, 16)
    schedule = Schedule("shift", 2048, 2048, 128)
    assert [(c.head, c.kv_tile) for c in p.chains] == schedule.chains(24)
    assert plan_call("shift", 1, 2048, 2048, 64, 8, 128).q_heads.tolist() == list(range(0, 65, 8))
    # 7 query heads a KV head, causal: one and three pairs.
    p = plan_call("shift", 2, 4096, 4096, 28, 4, 128, causal=True)
    assert p.q_heads.tolist() == [7 * kv_head + head for kv_head in range(8) for head in (0, 1, 3, 5)] + [56]
    assert p.num_tasks == 56 * sum(map(len, needed(64, True)[::2]))
    p.validate()


def test_a_call_that_is_shared_out_to_the_sides_of_the_l2_cache():
    one_side = plan_call("shift", 1, 4096, 4096, 16, 16, 128, causal=True, num_sms=1)
    both = plan_call("shift", 1, 4096, 4096, 16, 16, 128, causal=True)
    assert (one_side.sides, both.sides) == (1, 2) and both.others(132) == 66
    # Heads 0 to 7 in the order of a call that has only these, and so have the others.
    half = make_policy("shift", both.grid).chain_table(8)
    np.testing.assert_array_equal(both.chain_table[:256], half)
    np.testing.assert_array_equal(both.chain_table[256:], half + [8, 0])
    assert not np.array_equal(both.chain_table, one_side.chain_table)
    both.validate()
    both.validate(132)
    # Every other SM begins on side 1. Two SMs on side 0 are done before the one there, and help it.
    assert both.others(3) == 1
    events = simulate(both, 3).events
    sides_of_sm = [(events.claim[events.sm == sm] // 256).tolist() for sm in range(3)]
    assert set(sides_of_sm[1]) == {1}
    for sm in (0, 2):
        assert sides_of_sm[sm][0] == 0 and sides_of_sm[sm][-1] == 1
        assert sides_of_sm[sm] == sorted(sides_of_sm[sm])
    assert both.issued(range(512)).sides == 1
    with pytest.raises(ValueError, match="sides is 3"):
        simulate(replace(both, sides=3), 132)
    # Cycles of 64 need 64 SMs on each side: on fewer all begin with the same chains.
    full = plan_call("shift", 1, 8192, 8192, 8, 8, 128)
    assert full.sides == 2 and (full.others(128), full.others(127)) == (64, 0)
    full.validate(64)
    assert plan_call("shift", 1, 8192, 8192, 8, 8, 128, num_sms=127).sides == 1
    # All SMs that are left to others may be of one side.
    sides = [plan_call("shift", 1, 8192, 8192, 8, 8, 128, sm_margin=margin).sides for margin in (0, 2, 3)]
    assert sides == [2, 2, 1]


@pytest.mark.parametrize(
    ("name", "batch", "heads_k", "parts", "tokens", "sms", "sm_margin", "sides"),
    [
        ("descending", 1, 6, 1, 8192, 132, 0, 2),
        ("shift", 1, 6, 1, 8192, 132, 0, 1),  # three pairs
        ("shift", 2, 6, 1, 8192, 132, 0, 2),
        ("descending", 3, 3, 1, 8192, 132, 0, 1),
        ("descending", 1, 4, 1, 4096, 132, 0, 1),  # 128 chains are too few
        ("descending", 1, 4, 3, 4096, 132, 0, 2),
        ("descending", 500, 2, 1, 128, 132, 0, 1),  # no sums
        ("descending", 1, 6, 1, 8192, 132, 65, 2),
        ("descending", 1, 6, 1, 8192, 132, 66, 1),
        ("symmetric_shift", 1, 6, 1, 16384, 132, 0, 2),  # cycles of 64
        ("symmetric_shift", 1, 6, 1, 16384, 132, 2, 2),
        ("symmetric_shift", 1, 6, 1, 16384, 132, 3, 1),  # all three may be of one side
        ("symmetric_shift", 1, 6, 1, 16384, 114, 0, 1),
    ],
)
def test_which_calls_are_shared_out_to_the_sides_of_the_l2_cache(
    name, batch, heads_k, parts, tokens, sms, sm_margin, sides
):
    grid = _native.TileGrid(tokens, tokens, 128, 128, True, paired=heads_k % 2 == 0)
    policy = make_policy(name, grid)
    assert (policy.ways == 2) == (name == "shift")
    assert policy.l2_sides(batch, heads_k, parts, sms, sm_margin) == sides


def folded(kv_tiles, sides=1, ctas=128):
    grid = _native.TileGrid(kv_tiles * 128, kv_tiles * 128, 64, 128, True)
    return _native.SymmetricShift(grid.on_sides(sides, ctas))


def blocks_of_heads(heads, block):
    """What is left over is one block with the last two; so is all, if there is no third."""
    whole, rest = divmod(heads, block)
    last = (whole - 1 if not rest else max(0, whole - 2)) * block
    return [range(first, first + block) for first in range(0, last, block)] + [range(last, heads)]


def half_of_block(policy, heads, rotating):
    """A block's chains of one kind: cycle by cycle, head by head in them; or the longest chains first."""
    kv_tiles, size = policy.grid.kv_tiles(), policy.resident_ctas_needed()
    lower = (kv_tiles + 1) // 2
    if not rotating:
        return [[head, kv] for kv in range(lower, kv_tiles) for head in heads]
    cycles = [range(first, min(first + size, lower)) for first in range(0, lower, size)]
    return [[head, kv] for cycle in cycles for head in heads for kv in cycle]


@pytest.mark.parametrize("sides", [1, 2])
@pytest.mark.parametrize("kv_tiles", [128, 127, 64, 32, 15, 8])
def test_the_rectangles_that_fill_the_sms_of_an_order_of_issue(kv_tiles, sides):
    policy = folded(kv_tiles, sides)
    block = policy.heads_that_fit()
    assert policy.fills() and block * ((kv_tiles + 1) // 2) == 128 // sides
    for heads in (3 * block, 3 * block + 1, 1):
        expected = []
        for of_block in blocks_of_heads(heads, block):
            expected += half_of_block(policy, of_block, True) + half_of_block(policy, of_block, False)
        assert policy.chain_table(heads).tolist() == expected


# So many heads have first cycles that fit on the CTAs.
@pytest.mark.parametrize(
    ("kv_tiles", "blocks"),
    [(128, (2, 1, 1, 1, 1)), (96, (2, 2, 1, 1, 1)), (64, (4, 3, 2, 1, 1)), (48, (5, 5, 2, 2, 1)),
     (24, (10, 10, 5, 5, 3)), (2, (128, 127, 64, 63, 39)), (129, (3, 3, 1, 1, 1)), (256, (2, 1, 1, 1, 1))],
)  # fmt: skip
def test_blocks_in_turns(kv_tiles, blocks):
    on = (1, 132), (1, 127), (2, 129), (2, 127), (2, 78)
    for block, policy in zip(blocks, (folded(kv_tiles, *where) for where in on), strict=True):
        assert policy.heads_that_fit() == block
        if policy.fills():
            continue
        for heads in (block, 4 * block, 4 * block + 1, 2 * block + 1, 3):
            parts = blocks_of_heads(heads, block)
            expected = half_of_block(policy, parts[0], True)
            for now, then in itertools.pairwise(parts):
                expected += half_of_block(policy, then, True) + half_of_block(policy, now, False)
            expected += half_of_block(policy, parts[-1], False)
            assert policy.chain_table(heads).tolist() == expected
            lower, size = (kv_tiles + 1) // 2, policy.resident_ctas_needed()
            for claim, (head, kv_tile) in enumerate(expected):
                # The last member of its cycle; those that descend have none.
                last = min(kv_tile // size * size + size, lower) - 1 if kv_tile < lower else kv_tile
                assert expected[policy.cycle_end(claim, heads) - 1] == [head, last]


def test_where_rectangles_do_not_fill_the_sms():
    for kv_tiles in (12, 100, 129, 256):
        assert not folded(kv_tiles).fills()
    with pytest.raises(ValueError, match="sides is 3"):
        folded(1, 3)


@pytest.mark.parametrize(
    ("sms", "sm_margin", "ctas_an_order"),
    [(132, 0, 66), (132, 3, 64), (132, 5, 63), (128, 0, 64), (127, 0, 63), (114, 0, 57), (78, 0, 39)],
)
def test_blocks_are_for_the_ctas_that_share_an_order(sms, sm_margin, ctas_an_order):
    p = plan_call("symmetric_shift", 8, 4096, 4096, 16, 16, 128, True, sms, sm_margin)
    assert (p.sides, p.grid.ctas_an_order) == (2, ctas_an_order)
    policy = _native.SymmetricShift(p.grid)
    assert policy.heads_that_fit() == ctas_an_order // 16 and policy.fills() == (ctas_an_order >= 64)
    one = plan_call("symmetric_shift", 1, 4096, 4096, 1, 1, 128, True, sms, sm_margin)
    assert (one.sides, one.grid.ctas_an_order) == (1, sms - sm_margin)


@pytest.mark.parametrize(
    ("queries", "keys", "folds"),
    [(8192, 8192, True), (2048, 3072, True), (8192, 4096, True), (4096, 8192, False), (1024, 8192, False)],
)
def test_blocks_are_small_only_where_a_folded_triangle_is_left(queries, keys, folds):
    policy = _native.SymmetricShift(_native.TileGrid(queries, keys, 64, 128, True))
    assert policy.folds() == folds
    # In how many heads chains rotate before the first one that descends: in turns, in two blocks.
    lower = -(-keys // 128 // 2)
    heads = int(np.argmax(policy.chain_table(400)[:, 1] >= lower)) // lower
    if folds:
        assert heads == policy.heads_that_fit() * (1 if policy.fills() else 2)
    else:
        assert heads == -(-400 // (400 * policy.resident_ctas_needed() // 384))


@pytest.mark.parametrize("heads", [10, 14, 16])
@pytest.mark.parametrize("num_sms", [132, 128, 127, 114, 100, 78])
def test_symmetric_shift_ends_together(heads, num_sms):
    p = plan_call("symmetric_shift", 1, 16384, 16384, heads, heads, 128, True, num_sms=num_sms)
    assert p.sides == (2 if num_sms >= 128 else 1)
    costs = H200_COSTS[128]
    run = simulate(p, num_sms, costs.compute, costs.reduce, costs.signal, "pipelined", chain=costs.chain)
    assert run.efficiency > (0.98 if num_sms >= 128 else 0.9)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_sides_do_not_decide_the_bits(name):
    for shape in ((2048, 2048), (1000, 3000), (16384, 16384)):
        for head_dim, causal, heads in ((128, True, 4), (64, True, 4), (128, False, 3), (64, True, 1)):
            grid = _native.call_grid(*shape, heads, heads, head_dim, causal)
            one, *others = (make_policy(name, grid.on_sides(*on)) for on in ((1,), (2,), (1, 78), (2, 78)))
            for other in others:
                assert one.ways == other.ways and one.turns == other.turns
                assert one.resident_ctas_needed() == other.resident_ctas_needed()
                for way in range(one.ways):
                    np.testing.assert_array_equal(one.visit_table(way), other.visit_table(way))
                    np.testing.assert_array_equal(one.rank_table(way), other.rank_table(way))


@pytest.mark.parametrize("name", SCHEDULES)
def test_blocks_of_heads(name):
    p = plan(name, 8, 8, causal=True, num_heads=6)
    in_block = {"naive": 1, "descending": 1, "shift": 32, "symmetric_shift": 32}[name]
    assert plan(name, 8, 8, causal=True, num_heads=6, heads_per_block=in_block).chains == p.chains
    other = plan(name, 8, 8, causal=True, num_heads=6, heads_per_block=2)
    other.validate()
    assert sorted(other.chains) == sorted(p.chains)
    assert {c.head for c in other.chains[:16]} == {0, 1}
    with pytest.raises(ValueError, match="heads_per_block"):
        plan(name, 8, 8, num_heads=6, heads_per_block=0)


@st.composite
def random_plans(draw):
    return plan(
        draw(st.sampled_from(SCHEDULES)),
        draw(st.integers(1, 24)),
        draw(st.integers(1, 24)),
        causal=draw(st.booleans()),
        num_heads=draw(st.integers(1, 5)),
        group=draw(st.integers(1, 3)),
        tile_rows=draw(st.sampled_from([(1, 1), (1, 2), (2, 1)])),
        heads_per_block=draw(st.sampled_from([None, 1, 2, 4])),
    )


@settings(max_examples=200, deadline=None)
@given(random_plans(), st.integers(0, 5))
def test_plans_are_sound_on_as_many_ctas_as_they_need(p, more):
    p.validate()
    p.validate(p.num_ctas_needed + more)
    for together in range(1, group_of(p) + 1):
        replace(p, together=together).validate()


@given(random_plans(), st.integers(1, 3), st.booleans(), st.data())
def test_a_chain_walks_each_head_of_its_group_in_the_order_of_its_stretches(p, together, turns, data):
    visits = (p.visit_table[0] >= 0).sum(1)
    split = np.array([data.draw(st.integers(0, int(n))) for n in visits], np.int32)
    p = replace(p, together=together, split=split, turns=turns)
    line = _native.simulate(
        **p.tables(), sms=1, others=0, compute=1.0, reduce=0.0, signal=0.0, chain=0.0, staging=0, jitter=0.0,
        pace=0.0, seed=0, ordered=False,
    )  # fmt: skip
    for claim, chain in enumerate(p.chains):
        mine = line["claim"] == claim
        walked = list(zip(line["q_head"][mine].tolist(), line["q_tile"][mine].tolist(), strict=True))
        cut = split[chain.kv_tile]
        assert walked == [
            (chain.head * group_of(p) + head, (stretch[::-1] if turns and head % 2 else stretch)[place])
            for stretch in (chain.visits[:cut], chain.visits[cut:])
            for first in range(0, group_of(p), together)
            for place in range(len(stretch))
            for head in range(first, min(first + together, group_of(p)))
        ]


def test_unsound_plans_name_the_pair():
    p = plan("symmetric_shift", 4, 4, causal=True, num_heads=2)

    def changed(field, at, value):
        table = getattr(p, field).copy()
        table[at] = value
        return replace(p, **{field: table})

    for broken, words in (
        (changed("chain_table", 3, p.chain_table[0]), "issues KV tile 0 of head 0 2 times"),
        (changed("visit_table", (0, 1, 2), 3), "KV tile 1 visits query tile 1 0 times, not 1"),
        (changed("visit_table", (0, 3, 1), 1), "KV tile 3 visits query tile 1 1 times, not 0"),
        (changed("rank_table", (0, 2, 3), 0), "KV tile 2 has rank 0 at query tile 3"),
        (changed("rank_table", (0, 2, 3), 4), "KV tile 2 has rank 4 at query tile 3"),
    ):
        with pytest.raises(UnsoundPlan, match=words):
            broken.validate()
    # Two KV tiles that wait for each other: 0 visits query tile 0 first and is second there, and 1 likewise.
    q = plan("naive", 2, 2)
    circle = replace(
        q, visit_table=np.array([[[0, 1], [1, 0]]]), rank_table=np.array([[[1, 0], [0, 1]]]), name="circle"
    )
    with pytest.raises(UnsoundPlan, match="circle stops with 9 CTAs: KV tile 0 waits at query tile 0"):
        circle.validate(9)


@pytest.mark.parametrize("n", [2, 5, 8, 64])
def test_a_cycle_needs_its_ctas(n):
    p = plan("shift", n, n, num_heads=2)
    p.validate(n)
    with pytest.raises(UnsoundPlan, match="which no CTA is free to run"):
        p.validate(n - 1)
    with pytest.raises(Deadlock, match="no CTA is free"):
        simulate(p, n - 1)


@settings(max_examples=60, deadline=None)
@given(random_plans(), st.integers(1, 30))
def test_progress_as_the_claiming_model_of_the_kernel_says(p, ctas):
    if group_of(p) > 1 or p.chain_table.tolist() != plan_order(p):
        return
    policy = make_policy(p.name, p.grid)
    expected = policy.completes(p.num_heads, ctas, claim_ahead=False)
    try:
        simulate(p, ctas)
    except Deadlock:
        assert not expected
    else:
        assert expected


def plan_order(p):
    return make_policy(p.name, p.grid).chain_table(p.num_heads).tolist()


# The simulator.


def events_of_sm(run, sm):
    mine = np.flatnonzero(run.events.sm == sm)
    return mine[np.argsort(run.events.compute_start[mine], kind="stable")]


@settings(max_examples=120, deadline=None)
@given(
    random_plans(),
    st.sampled_from(["paper", "pipelined"]),
    st.integers(0, 20),
    st.sampled_from([(1.0, 0.25, 0.0, 0.0), (1.0, 0.5, 0.25, 2.0), (1.0, 2.0, 1.0, 0.5)]),
    st.integers(1, 3),
    st.booleans(),
)
def test_what_every_execution_obeys(p, model, more_sms, costs, staging, unordered):
    c, r, s, chain = costs
    sms = p.num_ctas_needed + more_sms
    run = simulate(
        p, sms, c, r, s, model, chain=chain, staging=staging, jitter=0.2, seed=7, unordered=unordered
    )
    e, plain = run.events, simulate(p, sms, c, r, s, model, chain=chain, staging=staging, unordered=unordered)
    assert len(e) == p.num_tasks
    assert plain.makespan >= plain.lower_bound * (1 - 1e-12)
    assert np.all((e.compute_end - e.compute_start >= 0.8 * c) & (e.compute_end - e.compute_start <= 1.2 * c))
    assert np.allclose(e.reduce_end - e.reduce_start, r)
    assert np.all((e.compute_end <= e.staged) & (e.staged <= e.reduce_start))
    for sm in range(sms):
        mine = events_of_sm(run, sm)
        free = e.reduce_end if model == "paper" else e.staged
        assert np.all(e.compute_start[mine[1:]] >= free[mine[:-1]])
        if model == "pipelined":
            assert np.all(e.staged[mine[staging:]] >= e.reduce_end[mine[:-staging]])
        # All tasks of a claim are on one SM, and SMs claim in the order of issue.
        assert np.all(np.diff(e.claim[mine]) >= 0)
    assert np.all(np.bincount(e.claim, minlength=1) >= 0)
    assert all(len(set(e.sm[e.claim == claim])) == 1 for claim in set(e.claim.tolist()))
    assert np.all(np.diff(run.claimed) >= -chain)
    if not unordered:
        heads, kv_tiles = p.chain_table[e.claim].T
        ranks = p.rank_table[p.way[heads], kv_tiles, e.q_tile]
        order = np.lexsort((ranks, e.q_tile, e.q_head))
        same = (e.q_head[order][1:] == e.q_head[order][:-1]) & (e.q_tile[order][1:] == e.q_tile[order][:-1])
        gap = e.reduce_start[order][1:] - e.reduce_end[order][:-1]
        assert np.all(gap[same] >= s - 1e-9)
    np.testing.assert_allclose(run.busy + run.stalled + run.idle, run.makespan)
    assert min(run.stalled.min(), run.idle.min()) >= -1e-9
    assert run.makespan == e.reduce_end.max()


def test_a_hand_made_case():
    # Two KV tiles at one query tile, ranks 0 and 1, in both models.
    p = plan("naive", 1, 2)
    run = simulate(p, 2, 1.0, 0.25, 0.5)
    assert run.events.reduce_start.tolist() == [1.0, 1.75]
    assert run.makespan == 2.0 == run.lower_bound
    assert (run.busy.tolist(), run.stalled.tolist()) == ([1.25, 1.25], [0.0, 0.75])
    assert run.idle.tolist() == [0.75, 0.0]
    # Three query tiles, one buffer, a slow reduction: the second tile's computing ends at 2, the buffer is
    # free at 4.
    run = simulate(plan("naive", 3, 1), 1, 1.0, 3.0, model="pipelined", staging=1)
    assert run.events.staged.tolist() == [1.0, 4.0, 7.0]
    assert run.makespan == 10.0 and run.stalled.tolist() == [7.0]
    assert simulate(plan("naive", 3, 1), 1, 1.0, 3.0, model="pipelined", staging=2).makespan == 7.0
    # One SM, two chains, and the time between them.
    assert simulate(plan("naive", 1, 2), 1, 1.0, 0.25, chain=2.0).makespan == 6.5


def test_a_pace_is_shared_by_a_stretch_of_a_chain():
    p = plan("naive", 40, 3, num_heads=2)
    e = simulate(p, 3, pace=0.3, seed=5).events
    times = (e.compute_end - e.compute_start).reshape(6, 40)  # by chain
    for stretch in (times[:, :16], times[:, 16:32], times[:, 32:]):
        np.testing.assert_allclose(stretch, stretch[:, :1] * np.ones_like(stretch))
        assert len(np.unique(np.round(stretch[:, 0], 9))) == 6
    assert 0.7 <= times.min() < times.max() <= 1.3
    # Jitter evens out along a chain, and a slow stretch holds up whoever follows it.
    p = plan("shift", 128, 64, causal=True, num_heads=8, tile_rows=(1, 2))
    options = {
        "num_sms": 132,
        "compute": 2.2,
        "reduce": 0.6,
        "signal": 1.2,
        "model": "pipelined",
        "chain": 5.0,
    }
    even, jittery, uneven = (
        simulate(p, **options, jitter=jitter, pace=pace, seed=1).stall_share
        for jitter, pace in ((0, 0), (0.2, 0), (0, 0.2))
    )
    assert uneven > jittery + 0.005 and uneven > even + 0.01


def test_a_seed_decides_the_jitter():
    p = plan("shift", 8, 8, num_heads=4)
    runs = [simulate(p, 8, jitter=0.3, seed=seed) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(runs[0].events.reduce_end, runs[1].events.reduce_end)
    assert runs[0].makespan != runs[2].makespan
    computing = runs[0].events.compute_end - runs[0].events.compute_start
    assert 0.7 <= computing.min() < 0.75 and 1.25 < computing.max() <= 1.3


def test_wrong_arguments_are_refused():
    p = plan("naive", 2, 2)
    for options in (
        {"num_sms": 0},
        {"compute": -1.0},
        {"signal": float("nan")},
        {"jitter": 1.5},
        {"pace": -0.5},
        {"model": "exact"},
        {"model": "pipelined", "staging": 0},
    ):
        with pytest.raises(ValueError):
            simulate(p, **{"num_sms": 2, **options})
    for tables in (
        {"rank_table": np.zeros((1, 2, 2), int)},
        {"visit_table": np.full((1, 2, 2), 5)},
        {"visit_table": np.full((2, 2), 5)},
        {"way": np.array([1])},
        {"q_heads": np.array([0])},
        {"q_heads": np.array([1, 2])},
        {"q_heads": np.array([0, 0])},
        {"way": np.array([0, 0])},
        {"chain_table": np.array([[0, 0], [7, 1]])},
    ):
        with pytest.raises(ValueError):
            simulate(replace(p, **tables), 2)


def test_speed_at_16_heads_of_128_by_256_tiles():
    begin = time.perf_counter()
    p = plan("shift", 256, 128, num_heads=16, tile_rows=(1, 2))
    run = simulate(p, 132, **KERNEL, jitter=0.1)
    assert len(run.events) == 16 * 128 * 256
    assert time.perf_counter() - begin < 10


# The paper's results: n query tiles, n KV tiles, n SMs, m heads.


@pytest.mark.parametrize("m", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("n", range(2, 65))
def test_closed_forms_of_naive_and_shift(n, m):
    naive = m * n * TASK + (n - 1) * R
    for causal in (False, True):
        assert simulate(plan("naive", n, n, causal=causal, num_heads=m), n, C, R).makespan == naive
    shift = simulate(plan("shift", n, n, num_heads=m), n, C, R)
    assert shift.makespan == m * n * TASK == shift.lower_bound
    assert shift.stalled.sum() == 0


@pytest.mark.parametrize("m", [2, 4, 6])
@pytest.mark.parametrize("n", range(2, 65))
def test_closed_forms_of_descending_and_symmetric_shift(n, m):
    def run(name, **options):
        return simulate(plan(name, n, n, causal=True, num_heads=m, **options), n, C, R)

    best = m * (n + 1) * TASK / 2
    assert run("descending").makespan == best + (n - 1) * R
    assert run("descending").lower_bound == best
    # Ours, where the heads of a pair go opposite ways, is no worse for an odd n.
    for name in ("shift", "symmetric_shift")[: 2 - n % 2]:
        found = run(name, heads_per_block=2)
        assert found.makespan == best == found.lower_bound
        assert found.stalled.sum() == 0


class EventDag:
    """Moments, which weigh nothing, and phases of some length between them, as in DASH."""

    def __init__(self, random_source, moments):
        self.moments = moments
        self.weights = [0] * moments
        self.edges = []
        for v in range(moments):
            for u in range(v):
                if random_source.random() < 0.25:
                    self.phase(u, v, random_source.randint(1, 4))

    def phase(self, u, v, length):
        self.edges += [(u, len(self.weights)), (len(self.weights), v)]
        self.weights.append(length)

    def make_all_critical(self):
        """Phases to the last moment, until each moment is on a longest path."""
        path, depth = self.time(), self.depths()
        self.weights.append(0)
        end = len(self.weights) - 1
        for u in range(self.moments):
            self.phase(u, end, path - depth[u])
        assert self.time() == path

    def depths(self):
        return depths(self.weights, self.edges)[: self.moments]

    def time(self, *added):
        return critical_path(self.weights, [*self.edges, *added])


def test_lemma_1_where_every_moment_is_critical():
    """A zero-weight edge u -> v keeps the time if and only if depth(u) <= depth(v)."""
    random_source = random.Random(0)
    kept = longer = 0
    while kept < 300 or longer < 300:
        dag = EventDag(random_source, 12)
        dag.make_all_critical()
        path, depth = dag.time(), dag.depths()
        u, v = random_source.sample(range(12), 2)
        try:
            after = dag.time((u, v))
        except Cycle:
            continue
        assert (after == path) == (depth[u] <= depth[v])
        kept, longer = kept + (after == path), longer + (after != path)


def test_lemma_1_on_any_dag():
    """Edges between depths that do not fall never make a DAG longer, however many, and on whatever DAG."""
    random_source = random.Random(1)
    for _ in range(300):
        dag = EventDag(random_source, 14)
        depth = dag.depths()
        added = [
            (u, v)
            for u in range(14)
            for v in range(14)
            if (depth[u], u) < (depth[v], v) and random_source.random() < 0.5
        ]
        assert dag.time(*added) == dag.time()
        assert depths(dag.weights, [*dag.edges, *added])[:14] == depth


def test_only_critical_moments_make_lemma_1_an_equivalence():
    # 0 -> 1 in four steps, 2 -> 3 in one: 3 has three steps of slack.
    weights, edges = [0, 0, 0, 0, 4, 1], [(0, 4), (4, 1), (2, 5), (5, 3)]
    assert depths(weights, edges)[:4] == [0, 4, 0, 1]
    assert critical_path(weights, edges) == critical_path(weights, [*edges, (3, 0)]) - 1 == 4
    assert critical_path(weights, [*edges, (1, 3)]) == 4  # from depth 4 to depth 1, and no longer
    with pytest.raises(Cycle):
        critical_path([1, 1], [(0, 1), (1, 0)])


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_simulator_and_the_dag_agree(name, causal):
    for n in range(1, 9):
        p = plan(name, n, n, causal=causal)
        orders = {
            q: sorted(range(p.grid.contributors(q)), key=lambda kv, q=q: p.rank(0, kv, q)) for q in range(n)
        }
        time_of_dag = schedule_time([p.visits(kv) for kv in range(n)], orders, C, R)
        assert simulate(p, n, C, R).makespan == time_of_dag


def test_search_through_all_schedules_finds_nothing_below_the_bound():
    latin_squares = {2: 1, 3: 2, 4: 24}  # up to the order of their rows
    for n, squares in latin_squares.items():
        for causal in (False, True):
            p = plan("naive", n, n, causal=causal)
            bound = lower_bound(p, n, Costs(C, R))
            free_of_stalls = "descending" if causal else "shift"  # with one head
            known = simulate(plan(free_of_stalls, n, n, causal=causal), n, C, R).makespan
            best, count = shortest(needed(n, causal), C, R, known)
            assert best == bound == known == n * TASK
            # Without a mask a schedule is as fast as the bound exactly if it is a Latin square: at each step
            # every chain is at another query tile.
            assert causal or count == squares


def test_search_without_a_known_schedule_finds_the_same():
    for n in (2, 3):
        for causal in (False, True):
            known = shortest(needed(n, causal), C, R, n * TASK)
            assert shortest(needed(n, causal), C, R) == known
            # Below the best there is nothing to find.
            assert shortest(needed(n, causal), C, R, n * TASK - R / 2)[1] == 0


# Beyond the paper.


@pytest.mark.parametrize("kv_tiles", [2, 3, 8, 32, 64])
@pytest.mark.parametrize("stride", [1, 2, 4])
def test_strided_shift_gives_signals_time(kv_tiles, stride):
    """Neighbours start `stride` query tiles apart: a signal may take stride - 1 tasks and a compute phase.

    With stride 1, the paper's shift, it must arrive within the very next compute phase.
    """
    heads = 3
    p = plan("shift", stride * kv_tiles, kv_tiles, num_heads=heads)
    slack = (stride - 1) * TASK + C
    bound = heads * stride * kv_tiles * TASK
    for signal in (0.0, slack / 2, slack):
        run = simulate(p, kv_tiles, C, R, signal)
        assert run.makespan == bound and run.stalled.sum() == 0
    assert simulate(p, kv_tiles, C, R, slack + 0.125).makespan > bound
    # In the pipelined model a whole hop, reduction and signal, has `stride` tiles' time.
    for hop, waits in ((stride * C, False), (stride * C + 0.125, True)):
        run = simulate(p, kv_tiles, C, 0.5, hop - 0.5, "pipelined", staging=1000)
        free = simulate(p, kv_tiles, C, 0.5, hop - 0.5, "pipelined", staging=1000, unordered=True)
        assert (run.makespan > free.makespan) == waits


@pytest.mark.parametrize("n", range(2, 34, 2))
@pytest.mark.parametrize("group", [2, 4])
def test_heads_walked_by_stretches_keep_grouped_chains_in_step(n, group):
    """A chain of GQA that visits a query tile in all its heads before the next tile is the schedule of one
    head, slower by the group's size: what never waits still does not. Nor does it where the rectangle is
    walked in all heads, and then the triangle. One head after the other, from end to end, is not so: causal
    chains differ in length, and are out of step from the second head on.
    """
    one = simulate(plan("symmetric_shift", n, n, causal=True, num_heads=2, heads_per_block=2), n, C, R)
    p = plan("symmetric_shift", n, n, causal=True, num_heads=2, heads_per_block=2, group=group)
    ends = (p.visit_table[0] >= 0).sum(1).astype(np.int32)
    in_step = [replace(p, together=together) for together in (1, 2, group)]
    for q in (p, *in_step, replace(p, together=group, split=ends)):
        run = simulate(q, n, C, R)
        assert run.makespan == group * one.makespan == run.lower_bound
        assert run.stalled.sum() == 0
    if n > 2:
        assert simulate(replace(p, together=1, split=ends), n, C, R).makespan > group * one.makespan


def efficiency(p, sms=132):
    return simulate(p, sms, **KERNEL, chain=11.0, jitter=0.1).efficiency


def in_large_blocks(name, batch, seqlen, heads):
    """plan_call of head dimension 128, causal, with three chips' worth of rotating chains a block."""
    p = plan_call(name, batch, seqlen, seqlen, heads, heads, 128, True)
    rows = (p.grid.q_rows, p.grid.kv_rows)
    grid = p.grid
    return plan(
        name, grid.q_tiles(), grid.kv_tiles(), causal=True, num_heads=p.num_heads, tile_rows=rows,
        heads_per_block=max(1, -(-384 // -(-grid.kv_tiles() // 2))),
    )  # fmt: skip


def test_auto_is_near_the_bound_on_the_papers_shapes():
    """At 132 SMs no schedule could be much faster than the one that "auto" takes, on the model."""
    for seqlen in (512, 1024, 2048, 4096, 8192, 16384):
        for causal, least in ((False, 0.99), (True, 0.97)):
            name = auto_schedule(seqlen, seqlen, 16, 16, 128, causal)
            p = plan_call(name, 16384 // seqlen, seqlen, seqlen, 16, 16, 128, causal)
            assert efficiency(p) > least
        p = plan_call("symmetric_shift", 16384 // seqlen, seqlen, seqlen, 16, 16, 128, True)
        assert efficiency(p) > 0.97


def test_large_blocks_on_one_side_leave_little_for_untidy_shapes_to_gain():
    for batch, seqlen in ((5, 3072), (7, 2176), (2, 6144)):
        kernel = plan_call("symmetric_shift", batch, seqlen, seqlen, 16, 16, 128, True)
        large = in_large_blocks("symmetric_shift", batch, seqlen, 16)
        np.testing.assert_array_equal(kernel.rank_table, large.rank_table)
        np.testing.assert_array_equal(kernel.visit_table, large.visit_table)
        assert efficiency(large) > 0.97


def test_long_causal_sequences_are_not_for_symmetric_shift():
    # 192 KV tiles: two groups rotate one after the other, and stand in each other's way.
    calls = {name: plan_call(name, 1, 24576, 24576, 8, 8, 128, True) for name in SCHEDULES}
    assert efficiency(calls["descending"]) > 0.94
    assert efficiency(calls["shift"]) > 0.94
    assert efficiency(calls["symmetric_shift"]) < 0.90


# The rest.


def test_explain_says_what_auto_takes():
    e = explain(8, 2048, 2048, 16, 16, 128, causal=True)
    assert e.schedule == auto_schedule(2048, 2048, 16, 16, 128, True)
    assert [f.schedule for f in e.forecasts] == list(SCHEDULES)
    assert all(f.time >= e.lower_bound and 0 <= f.stall_share < 1 for f in e.forecasts)
    text = str(e)
    assert text.startswith("batch 8, 2048 x 2048, 16/16 heads, d 128, causal: " + e.schedule)
    assert all(name in text for name in SCHEDULES) and "stalled" in text
    chosen = next(f for f in e.forecasts if f.schedule == e.schedule)
    assert f"* {chosen.schedule}" in text and f"{chosen.time:.0f} us" in text


def test_no_schedule_is_below_the_bound_of_a_group_that_some_of_them_cut():
    sizes = (1, 16384, 16384, 64, 8, 128)
    assert len({plan_call(name, *sizes, True).num_heads for name in SCHEDULES}) == 2
    e = explain(*sizes, causal=True)
    assert all(f.time >= e.lower_bound for f in e.forecasts)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ((1, 1024, 1024, 4, 4, 128, False), "no two chains of a cycle meet"),
        ((1, 8192, 8192, 8, 8, 128, False), "no two chains of a cycle meet"),
        ((4, 100, 640, 4, 4, 128, False), "no two chains of a cycle meet"),  # groups of 2, 2 and 1
        ((3, 4250, 4250, 16, 16, 128, False), "22 rotate and never meet, 22 at a time, and 12 wait in line"),
        ((1, 1536, 1536, 4, 2, 128, True), "all chains climb"),
        ((1, 2048, 2048, 4, 4, 128, True), "long and short chains share"),
        ((1, 2048, 2048, 4, 4, 64, True), "go opposite ways"),
        ((1, 1024, 1024, 4, 4, 128, True), "go opposite ways"),
        ((1, 2048, 2048, 4, 2, 64, True), "all chains climb"),
        ((1, 2048, 2048, 3, 3, 64, True), "long and short chains share"),
        ((1, 1024, 2048, 4, 4, 64, True), "long and short chains share"),
        ((1, 16384, 16384, 2, 2, 128, True), "long and short chains share"),
        ((1, 17000, 16900, 1, 1, 128, True), "no square above 128 KV tiles"),
        ((1, 32768, 32768, 16, 4, 128, True), "chains in line"),
    ],
)
def test_explain_says_why(call, why):
    *shape, causal = call
    assert why in explain(*shape, causal=causal).reason


def test_explain_refuses_what_the_call_would():
    e = explain(1, 16384, 16384, 8, 8, 128, causal=False, schedule="Shift", num_sms=60)
    shift = e.forecasts[SCHEDULES.index("shift")]
    assert (e.schedule, shift.time, shift.resident_ctas_needed) == ("shift", None, 64)
    assert "It needs 64 SMs and there are 60" in e.reason and "needs 64 resident CTAs" in str(e)
    e = explain(1, 16384, 16384, 8, 8, 128, causal=False, num_sms=132, sm_margin=70)
    assert "It needs 64 SMs and there are 62" in e.reason
    for margin in (-1, 132):
        with pytest.raises(ValueError, match=rf"sm_margin is {margin} and not in 0\.\.131"):
            explain(1, 512, 512, 1, 1, 128, sm_margin=margin)
    with pytest.raises(ValueError, match="head_dim is 96"):
        explain(1, 512, 512, 1, 1, 96)
    with pytest.raises(ValueError, match="^schedule: 'fifo' is none of auto, .* symmetric_shift"):
        explain(1, 512, 512, 1, 1, 128, schedule="fifo")
    with pytest.raises(ValueError, match="^schedule: .*'unordered' has none"):
        explain(1, 512, 512, 1, 1, 128, schedule="unordered")


def run_lab(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "dash_flash_attn", "lab", *arguments], capture_output=True, text=True
    )


def test_command_draws_and_tabulates(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("rich")
    done = run_lab(
        "--mask", "causal", "--tiles", "8", "--heads", "2", "--schedule", "all", "--out", str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    for kind, magic in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        for name in ("gantt", "ranks"):
            content = (tmp_path / f"{name}.{kind}").read_bytes()
            assert content.startswith(magic) and len(content) > 10_000
    for name, makespan in (("naive", "21.75"), ("descending", "13"), ("symmetric_shift", "11.25")):
        row = next(line for line in done.stdout.splitlines() if f" {name} " in line)
        assert makespan in row.split()
    svg = (tmp_path / "gantt.svg").read_text()
    assert svg.count("<!-- symmetric_shift: 11.25, at the lower bound (dashed); 0.0% stalled -->") == 1


def test_pictures_of_a_whole_gpu():
    draw = pytest.importorskip("dash_flash_attn.lab.draw", reason="needs matplotlib", exc_type=ImportError)
    p = plan("symmetric_shift", 64, 32, causal=True, num_heads=16, tile_rows=(1, 2))
    run = simulate(p, 132, **KERNEL, chain=11.0)
    assert len(run.events) > draw.FEW_TASKS
    (image,) = draw.gantt([run]).axes[0].images
    pixels = image.get_array()
    assert pixels.shape == (132, draw.PIXELS, 4)
    red = np.isclose(pixels, draw.to_rgba(draw.STALL)).all(-1).mean()
    # The charted time is the makespan, so the red part is the stalled part.
    assert red == pytest.approx(run.stall_share, abs=0.005) and red > 0.005


def test_command_names_what_does_not_fit(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("rich")
    done = run_lab(
        "--mask", "full", "--tiles", "8", "--sms", "3", "--schedule", "shift", "--out", str(tmp_path)
    )
    assert done.returncode == 1
    assert "shift is left out: it needs 8 SMs" in done.stderr
    wrong = run_lab("--schedule", "fifo")
    assert wrong.returncode == 2 and "none of naive" in wrong.stderr
    for arguments in (("--tiles", "8", "16", "32"), ("explain", "--seqlen", "1", "2", "3")):
        wrong = run_lab(*arguments)
        assert wrong.returncode == 2 and "expected one number or two, got 3" in wrong.stderr


def test_command_says_that_it_cannot_write(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("rich")
    file = tmp_path / "file"
    file.write_text("kept")
    for out in (file, file / "folder"):
        done = run_lab("--tiles", "2", "--heads", "1", "--out", str(out))
        assert done.returncode == 1
        assert done.stderr.startswith("lab: --out: ") and done.stderr.count("\n") == 1
    assert file.read_text() == "kept"


def test_command_explains():
    done = run_lab("explain", "--batch", "2", "--seqlen", "1024", "--heads", "16", "4", "--mask", "causal")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{explain(2, 1024, 1024, 16, 4, 128, causal=True)}\n"


def test_command_explains_what_the_limits_say():
    """docs/limits.md, "Fewer than 128 SMs", cites a command and says that shift is the faster one by it."""
    limits = RESULTS.parent.parent / "docs" / "limits.md"
    (line,) = [line for line in limits.read_text().splitlines() if " lab explain " in line]
    done = run_lab(*line.partition(" lab ")[2].split())
    assert done.returncode == 0, done.stderr
    assert re.search('"auto" is symmetric_shift .* shift, is predicted to be .* faster', done.stdout)


def test_an_sm_that_drains_claims_after_its_last_reduction():
    p = plan("naive", 6, 6, causal=True, num_heads=4)
    options = {
        "num_sms": 4,
        "compute": 1.0,
        "reduce": 0.75,
        "signal": 0.5,
        "model": "pipelined",
        "chain": 0.5,
    }
    for drained in (False, True):
        run = simulate(p, **options, drained=drained)
        e = run.events
        ahead = 0
        for sm in range(4):
            claims = sorted(set(e.claim[e.sm == sm].tolist()))
            ends = [e.reduce_end[e.claim == claim].max() for claim in claims]
            ahead += sum(run.claimed[nxt] < end for nxt, end in zip(claims[1:], ends[:-1], strict=True))
        assert (ahead == 0) == drained
    # On the paper's model an SM is never ahead.
    assert simulate(p, 4, drained=True).makespan == simulate(p, 4).makespan


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_schedules_that_drain_are_the_kernels(name):
    for lengths, causal, paired in itertools.product(((64, 64), (64, 90), (90, 64)), (0, 1), (0, 1)):
        policy = make_policy(name, _native.TileGrid(*lengths, 2, 4, bool(causal), bool(paired), 16))
        assert policy.waits_in_line == waits_in_line(name)


# Calibration.

SMALL_SHAPES = [s for s in calibrate.PAPER_SHAPES if s.head_dim == 128 and s.seqlen <= 1024]


def made_up(costs, shapes, noise=0.0, sms=132, prepare=calibrate.PREPARE_US):
    """The model's own times, each off by up to `noise`."""
    source = np.random.default_rng(5)
    return [
        calibrate.Timing(
            shape,
            name,
            calibrate.predict(shape, name, costs, sms, prepare) * (1 + source.uniform(-noise, noise)),
        )
        for shape in shapes
        for name in SCHEDULES
    ]


@pytest.mark.parametrize(
    ("costs", "noise", "tolerance"),
    [
        (Costs(3.3, 1.2, 0.9, 6.0), 0.0, 0.02),
        (Costs(1.9, 0.6, 0.5, 14.0), 0.0, 0.02),
        (Costs(3.3, 1.2, 0.9, 6.0), 0.02, 0.06),
    ],
    ids=["slow", "fast", "noisy"],
)
def test_calibration_recovers_known_costs(costs, noise, tolerance):
    timings = made_up(costs, SMALL_SHAPES, noise)
    found = calibrate.calibrate(timings, 132)
    fitted = found.costs[128]
    assert fitted.compute == pytest.approx(costs.compute, rel=tolerance)
    assert fitted.chain == pytest.approx(costs.chain, rel=3 * tolerance)
    # Times say little about how a hop splits into its two parts.
    assert fitted.reduce + fitted.signal == pytest.approx(costs.reduce + costs.signal, rel=3 * tolerance)
    assert found.rms(128) < noise + 0.01
    assert abs(found.worst_miss[1]) < 2 * noise + 0.03
    if noise == 0:
        assert found.mean_rank_correlation() > 0.95


def test_the_24_shapes_are_the_papers():
    shapes = calibrate.PAPER_SHAPES
    assert len(set(shapes)) == 24
    assert all(s.batch * s.seqlen == 16384 and s.heads * s.head_dim == 2048 for s in shapes)


def test_spearman():
    assert calibrate.spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert calibrate.spearman([1, 2, 3, 4], [9, 8, 7, 1]) == pytest.approx(-1)
    # By hand: ranks 1 2 3 4 against 2 1 4 3 differ by 1 each: 1 - 6 * 4 / (4 * 15).
    assert calibrate.spearman([1, 2, 3, 4], [2, 1, 4, 3]) == pytest.approx(0.6)
    # Equal values share their rank: 1.5 1.5 3.5 3.5 against 1 2 3 4.
    assert calibrate.spearman([5, 5 * (1 + 1e-12), 7, 7], [1, 2, 3, 4]) == pytest.approx(0.8**0.5)
    assert calibrate.spearman([5, 5], [1, 2]) is None and calibrate.spearman([5], [1]) is None


def test_misses_and_choices_by_hand():
    shape = calibrate.Shape(128, True, 512, 32, 16, 16)
    timings = [
        calibrate.Timing(shape, name, us)
        for name, us in zip(SCHEDULES, (400.0, 300.0, 200.0, 210.0), strict=True)
    ]
    result = calibrate.Calibration(
        {128: Costs()}, 132, 50.0, tuple(timings), np.array([400.0, 240.0, 220.0, 200.0])
    )
    assert result.misses == pytest.approx([0, -0.2, 0.1, 200 / 210 - 1])
    assert result.worst_miss == (timings[1], pytest.approx(-0.2))
    assert result.choices() == [calibrate.Choice(shape, "symmetric_shift", pytest.approx(0.05))]
    assert result.choices(lambda _: "naive") == [calibrate.Choice(shape, "naive", pytest.approx(1.0))]
    assert result.mean_rank_correlation() == pytest.approx(0.8)
    assert result.mean_rank_correlation(causal=False) is None
    # Of schedules that are predicted to be equal the slower one counts.
    tied = replace(result, predicted=np.array([400.0, 240.0, 200.0, 200.0]))
    assert tied.choices() == [calibrate.Choice(shape, "symmetric_shift", pytest.approx(0.05))]


def test_calibration_refuses_what_it_cannot_fit():
    shape = calibrate.Shape(128, False, 512, 32, 16, 16)
    with pytest.raises(ValueError, match="no timings"):
        calibrate.calibrate([], 132)
    with pytest.raises(ValueError, match="no longer than the 8 us"):
        calibrate.calibrate([calibrate.Timing(shape, "shift", 7.0)], 132)
    with pytest.raises(ValueError, match="head dimension 128 has no timing up to 4096"):
        calibrate.calibrate([calibrate.Timing(shape._replace(seqlen=8192), "shift", 5000.0)], 132)


def test_measure_times_each_schedule_of_each_shape():
    """On the CPU, with a clock that runs the call and counts."""
    shapes = [calibrate.Shape(64, causal, 192, 2, 4, 2) for causal in (False, True)]
    calls = []

    def clock(run):
        calls.append([tuple(gradient.shape) for gradient in run()])
        return float(len(calls))

    seen = []
    timings = calibrate.measure(shapes, device="cpu", clock=clock, rounds=3, report=seen.append)
    assert timings == seen
    assert [(t.shape, t.schedule) for t in timings] == [(s, n) for s in shapes for n in SCHEDULES]
    order = [name for shape in shapes for name in clocks.turns(SCHEDULES, 3, str(shape))]
    calls_of = {name: [1 + i for i, n in enumerate(order) if n == name] for name in SCHEDULES}
    assert [t.us for t in timings] == [1000.0 * calls_of[name][i] for i in (1, 4) for name in SCHEDULES]
    assert calls == [[(2, 192, 4, 64), (2, 192, 2, 64), (2, 192, 2, 64)]] * 24


def record_of(timings, sms=132):
    rows = [{**t.shape._asdict(), "system": t.schedule, "ms": t.us / 1e3} for t in timings]
    return {"environment": {"device": "made up", "sms": sms}, "rows": rows}


def test_command_calibrates_from_a_record(tmp_path):
    costs = Costs(2.6, 0.9, 0.7, 7.0)
    record = record_of(made_up(costs, [s for s in SMALL_SHAPES if s.seqlen == 512]))
    other = {**record["rows"][0], "system": "fa3+", "ms": 1e9}
    record["rows"] += [other, {**other, "system": "shift", "error": "out of memory"}]
    del record["rows"][-1]["ms"]
    given, out = tmp_path / "given.json", tmp_path / "new" / "out.json"
    given.write_text(json.dumps(record))
    done = run_lab("calibrate", "--record", str(given), "--out", str(out))
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert (result["fitted_from"], result["record"], result["sms"]) == ("record", "given.json", 132)
    assert result["environment"] == record["environment"] and len(result["rows"]) == 8
    assert result["costs_us"]["128"]["compute"] == pytest.approx(costs.compute, rel=0.05)
    assert "Rank correlation: mean" in done.stdout and "d 128 causal 512" in done.stdout
    failed = run_lab("calibrate", "--record", str(given), "--out", str(given / "out.json"))
    assert failed.returncode == 1
    assert failed.stderr.startswith("lab calibrate: --out: ") and failed.stderr.count("\n") == 1
    # What it writes is a record too, of the same times.
    timings, sms, _ = calibrate.read_record(out)
    assert (timings, sms) == calibrate.read_record(given)[:2]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("no JSON", "is no record of backward times"),
        ("[1]", "is no record of backward times"),
        ('{"environment": {"sms": 132}, "rows": [{"system": "shift", "ms": 1}]}', "KeyError: 'head_dim'"),
        ('{"environment": {"sms": 132}, "rows": []}', "has no times of naive"),
        (None, "No such file"),
    ],
)
def test_command_names_what_is_wrong_with_a_record(tmp_path, capsys, content, words):
    path = tmp_path / "record.json"
    if content is not None:
        path.write_text(content)
    assert command.main(["calibrate", "--record", str(path)]) == 1
    assert words in capsys.readouterr().err


def test_a_record_names_its_sms(tmp_path):
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record_of(made_up(Costs(2.6, 0.9, 0.7, 7.0), SMALL_SHAPES[:1]), sms=None)))
    with pytest.raises(ValueError, match="on how many SMs"):
        calibrate.read_record(path)


def test_command_without_a_gpu_says_so():
    if calibrate_can_run():
        pytest.skip("the kernels can run here")
    done = run_lab("calibrate")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("lab calibrate: ") and "--record FILE" in done.stderr
    assert "Traceback" not in done.stderr


def calibrate_can_run():
    try:
        calibrate.gpu_environment()
    except RuntimeError:
        return False
    return True


def test_the_committed_calibration_is_what_explain_uses():
    result = json.loads((RESULTS / "calibration.json").read_text())
    for head_dim, costs in H200_COSTS.items():
        fitted = result["costs_us"][str(head_dim)]
        for name in ("compute", "reduce", "signal", "chain"):
            assert getattr(costs, name) == pytest.approx(fitted[name], abs=0.006)
    timings, sms, _ = calibrate.read_record(RESULTS / "calibration.json")
    assert sms == result["sms"] and {t.shape for t in timings} == set(calibrate.PAPER_SHAPES)
    # Its predictions are the model's, and not some older model's.
    for row in result["rows"]:
        shape = calibrate.Shape.of_row(row)
        if shape.seqlen <= 1024:
            us = calibrate.predict(
                shape, row["system"], H200_COSTS[shape.head_dim], sms, result["prepare_us"]
            )
            assert us == pytest.approx(row["predicted_ms"] * 1e3, rel=0.01)


def test_auto_is_within_three_percent_of_the_best_measured_schedule():
    timings, sms, _ = calibrate.read_record(RESULTS / "backward.json")
    # Without a mask shift and symmetric_shift are one order, measured twice.
    for shape in {t.shape for t in timings if not t.shape.causal}:
        sizes = (shape.batch, shape.seqlen, shape.seqlen, shape.heads, shape.kv_heads, shape.head_dim)
        one, other = (plan_call(name, *sizes) for name in ("shift", "symmetric_shift"))
        for table in ("chain_table", "visit_table", "rank_table"):
            np.testing.assert_array_equal(getattr(one, table), getattr(other, table))
    timings = [t for t in timings if t.shape.causal or t.schedule != "symmetric_shift"]
    measured = calibrate.Calibration({}, sms, 0.0, tuple(timings), np.ones(len(timings)))
    choices = measured.choices(calibrate.auto)
    assert len(choices) == 24
    assert max(choice.loss for choice in choices) < 0.03
