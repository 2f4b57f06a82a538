"""The schedules by name: in which sequence KV tiles visit query tiles, and in which order dQ is summed.

The policies themselves are C++ (csrc/schedule/), the very code that the kernel runs. This module finds them
by name, shows them as plain lists, and writes out whole plans of them. The schedules are those of DASH,
arXiv 2601.21824.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _native

SCHEDULES: tuple[str, ...] = _native.schedules()
"""The names of the schedules. Which policy one stands for depends on the shape, see `make_policy`."""

H200_SMS = 132


def schedule_name(name: str) -> str:
    """The name as in SCHEDULES, of a name in any case, with hyphens or underscores.

    Raises ValueError for an unknown name.
    """
    found = name.lower().replace("-", "_")
    if found not in SCHEDULES:
        raise ValueError(f"schedule {name!r} is none of {', '.join(SCHEDULES)}")
    return found


def make_policy(name: str, grid: _native.TileGrid) -> _native.Policy:
    """The native policy that a name stands for, for one head's tiles (csrc/schedule/policy.h).

    Without a mask both shifts are Rotating. Under a causal mask on a square, shift is OppositeHeads or
    Climbing; otherwise both are SymmetricShift.

    Raises ValueError for an unknown name.
    """
    return _native.policy(schedule_name(name), grid)


def waits_in_line(name: str) -> bool:
    """Whether the kernel claims chains of a schedule one by one (csrc/schedule/policy.h, kWaitsInLine).

    Raises ValueError for an unknown name.
    """
    # Whatever the shape: all policies that a name stands for claim in the same way.
    return make_policy(name, _native.TileGrid(1, 1, 1, 1, causal=False)).waits_in_line


@dataclass(frozen=True)
class Schedule:
    """What one schedule does for one shape: a readable view of the native policy.

    Args:
        name: a schedule's name, see `schedule_name`.
        seqlen_q, seqlen_k: rows of Q, and of K and V; positive.
        head_dim: decides the tiles, as in the kernels.
        causal: query r sees key c if c <= r + seqlen_k - seqlen_q.
        paired_heads: heads come in pairs, an even number of them a batch entry, each with its own K and V.
            In the causal shift on a square they go different ways at head dimension 64, and at 128 up to 8
            KV tiles.
        heads: KV heads of a batch entry, times the parts that their query heads are cut into. Without a
            mask, where there are many of them, most KV tiles of a long head wait in line, and the others
            rotate in one group.

    Raises ValueError for an unknown name or a size that is not positive.
    """

    name: str
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    causal: bool = False
    paired_heads: bool = False
    heads: int = 1
    policy: _native.Policy = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Normalises the name, and makes the policy."""
        object.__setattr__(self, "name", schedule_name(self.name))
        q_rows, kv_rows = _native.tile_shape(self.head_dim)
        grid = _native.TileGrid(
            self.seqlen_q, self.seqlen_k, q_rows, kv_rows, self.causal, self.paired_heads, self.heads
        )
        object.__setattr__(self, "policy", make_policy(self.name, grid))

    @property
    def grid(self) -> _native.TileGrid:
        """The tiles of one head, and which of them meet."""
        return self.policy.grid

    def visits(self, kv_tile: int, head: int = 0) -> list[int]:
        """The query tiles that a KV tile's chain visits in a head, in that sequence."""
        way = head % self.policy.ways
        return [self.policy.visit(kv_tile, step, way) for step in range(self.policy.visits(kv_tile))]

    def order(self, q_tile: int, head: int = 0) -> list[int]:
        """The KV tiles that add to a query tile's dQ in a head, in that order."""
        way = head % self.policy.ways
        return sorted(
            range(self.grid.contributors(q_tile)), key=lambda kv_tile: self.policy.rank(kv_tile, q_tile, way)
        )

    def chains(self, heads: int) -> list[tuple[int, int]]:
        """(head, KV tile) of the chains of `heads` heads, in the sequence in which CTAs claim them."""
        return [(head, kv_tile) for head, kv_tile in self.policy.chain_table(heads).tolist()]

    @property
    def resident_ctas_needed(self) -> int:
        """How many CTAs must run at the same time for the schedule to make progress."""
        return self.policy.resident_ctas_needed()


class Chain(NamedTuple):
    """One claim of work: a KV tile of a head, and the query tiles that it visits, in that sequence.

    `head` counts chain heads: the sequence is walked once for each of the query heads from
    Plan.q_heads[head] to before Plan.q_heads[head + 1], in the sequence that together, split and turns say.
    """

    head: int
    kv_tile: int
    visits: tuple[int, ...]


class UnsoundPlan(ValueError):
    """A plan that does not compute dQ, or not to the end. The text names the pair of tiles at fault."""


@dataclass(frozen=True, eq=False)
class Plan:
    """A schedule written out: chains in the order of issue, and ranks. `plan` and `plan_call` make it.

    It is tables only, so that orders which are no policy yet can be made with `dataclasses.replace` and
    `issued`, validated, and tried out in the lab.

    Args:
        name: what it is called in tables and pictures.
        grid: the tiles of one head, and which of them meet.
        q_heads: int (heads + 1), the first query head that the chains of a head walk, from 0 on; and at the
            end, how many there are.
        chain_table: int (claims, 2), (head, KV tile) in the order of issue.
        way: int (heads), which of the tables a head goes by.
        visit_table: int (ways, KV tiles, query tiles), the query tile at each step, -1 after a chain's end.
        rank_table: int (ways, KV tiles, query tiles), the rank, and -1 where the two do not meet.
        cycle: int (KV tiles), equal for KV tiles of one head that may wait for each other both ways.
        together: a chain visits a query tile in so many heads of its group, and then the next tile; and
            when all tiles are done, in the next heads (csrc/schedule/head_order.h).
        split: int (KV tiles): a chain does so with its visits before this one, and then with the others.
        turns: whether a chain walks every other head of its group back, from the last of these visits to the
            first.
        sides: of the L2 cache: 2, if either half of the claims is an order of issue of its own, for the SMs
            of one side. Who finds nothing left helps the other side.
    """

    name: str
    grid: _native.TileGrid
    q_heads: NDArray[np.int32]
    chain_table: NDArray[np.int32]
    way: NDArray[np.int32]
    visit_table: NDArray[np.int32]
    rank_table: NDArray[np.int32]
    cycle: NDArray[np.int32]
    together: int
    split: NDArray[np.int32]
    turns: bool
    sides: int = 1

    @property
    def num_heads(self) -> int:
        """Chain heads: parts of the query heads of a KV head, over all KV heads."""
        return len(self.way)

    @property
    def num_tasks(self) -> int:
        """Pairs of tiles over all query heads."""
        return int(((self.visit_table >= 0).sum((1, 2))[self.way] * np.diff(self.q_heads)).sum())

    @property
    def num_ctas_needed(self) -> int:
        """The longest cycle: with as many co-resident CTAs, and with more, the plan makes progress."""
        return int(np.bincount(self.cycle).max())

    def visits(self, kv_tile: int, way: int = 0) -> tuple[int, ...]:
        """The query tiles that a KV tile's chain visits in each query head, in that sequence."""
        row = self.visit_table[way, kv_tile].tolist()
        return tuple(row[: row.index(-1)] if -1 in row else row)

    @cached_property
    def chains(self) -> tuple[Chain, ...]:
        """The chains in the order of issue."""
        ways, kv_tiles = self.visit_table.shape[:2]
        visits = [[self.visits(kv_tile, way) for kv_tile in range(kv_tiles)] for way in range(ways)]
        return tuple(
            Chain(head, kv_tile, visits[self.way[head]][kv_tile])
            for head, kv_tile in self.chain_table.tolist()
        )

    def rank(self, head: int, kv_tile: int, q_tile: int) -> int:
        """The place of a KV tile in the sum of a query tile.

        IndexError for a head, or a pair of tiles, that is not there.
        """
        if not 0 <= head < self.num_heads:
            raise IndexError(f"head {head} is not in 0..{self.num_heads - 1}")
        ranks = self.rank_table[self.way[head]]
        if min(kv_tile, q_tile) < 0 or ranks[kv_tile, q_tile] < 0:
            raise IndexError(f"KV tile {kv_tile} and query tile {q_tile} do not meet")
        return int(ranks[kv_tile, q_tile])

    @property
    def cycle_end(self) -> NDArray[np.int32]:
        """(claims): the first claim after all chains of the claim's cycle."""
        heads, kv_tiles = self.chain_table.T
        cycles = heads * (int(self.cycle.max()) + 1) + self.cycle[kv_tiles]
        last = np.zeros(cycles.max() + 1, np.int32)
        np.maximum.at(last, cycles, np.arange(len(cycles), dtype=np.int32))
        return last[cycles] + 1

    def issued(self, order: ArrayLike, name: str | None = None) -> Plan:
        """The same visits and ranks, so the same bits, with the claims in another order, for all SMs.

        Args:
            order: a permutation of the claims: which claim of this plan comes first, second, ...
        """
        chain_table = self.chain_table[np.asarray(order)]
        return replace(self, name=name or self.name, chain_table=chain_table, sides=1)

    def validate(self, num_ctas: int | None = None) -> None:
        """Proves the plan sound, or raises UnsoundPlan, which names the first broken pair of tiles.

        Sound: every chain is issued once; every pair of tiles that the mask leaves is visited once, and no
        other; the ranks at each query tile are 0, 1, 2, ...; `num_ctas` co-resident CTAs (num_ctas_needed,
        if None) that claim in the order of issue come to the end. A task that can go on stays so until it
        is done, so that one execution decides about progress for all.
        """
        self._validate_chains()
        self._validate_visits()
        self._validate_ranks()
        ctas = self.num_ctas_needed if num_ctas is None else num_ctas
        line = _native.simulate(
            **self.tables(), sms=ctas, others=self.others(ctas),
            compute=1.0, reduce=0.0, signal=0.0, chain=0.0,
            staging=0, jitter=0.0, pace=0.0, seed=0, ordered=True,
        )  # fmt: skip
        if line["unfinished"]:
            raise UnsoundPlan(f"{self.name} stops with {ctas} CTAs: {self.blame(line)}")

    def others(self, num_ctas: int) -> int:
        """How many CTAs begin on side 1 of the L2 cache: half of them, unless a cycle needs more."""
        half = num_ctas // 2
        opens = self.sides > 1 and _native.side_1_opens(self.num_ctas_needed, num_ctas - half, half)
        return half if opens else 0

    def tables(self) -> dict[str, Any]:
        """The arguments of _native.simulate that describe the plan."""
        return {
            "chain_table": self.chain_table,
            "cycle_end": self.cycle_end,
            "way": self.way,
            "visit_table": self.visit_table,
            "rank_table": self.rank_table,
            "q_heads": self.q_heads,
            "together": self.together,
            "split": self.split,
            "turns": self.turns,
            "sides": self.sides,
        }

    def blame(self, line: dict[str, Any]) -> str:
        """In words, one wait without end of a simulation that did not finish: which pair, and for whom."""
        waiting = np.flatnonzero((line["compute_end"] >= 0) & (line["reduce_end"] < 0))
        for task in waiting:
            q_head, q_tile = int(line["q_head"][task]), int(line["q_tile"][task])
            head, kv_tile = self.chain_table[line["claim"][task]].tolist()
            ranks = self.rank_table[self.way[head], :, q_tile]
            before = ranks[kv_tile] - 1
            holder = int(np.flatnonzero(ranks == before)[0]) if before >= 0 else kv_tile
            claim = np.flatnonzero((self.chain_table == (head, holder)).all(1))[0]
            if line["claimed"][claim] < 0:
                return (
                    f"KV tile {kv_tile} waits at query tile {q_tile} of head {q_head} for KV tile {holder}, "
                    "which no CTA is free to run"
                )
        task = waiting[0]
        kv_tile = int(self.chain_table[line["claim"][task], 1])
        return (
            f"KV tile {kv_tile} waits at query tile {line['q_tile'][task]} of head {line['q_head'][task]}, "
            "in a circle of running chains"
        )

    def _validate_chains(self) -> None:
        kv_tiles = self.visit_table.shape[1]
        issued = Counter(map(tuple, self.chain_table.tolist()))
        for pair in product(range(self.num_heads), range(kv_tiles)):
            if (times := issued[pair]) != 1:
                raise UnsoundPlan(f"{self.name} issues KV tile {pair[1]} of head {pair[0]} {times} times")

    def _validate_visits(self) -> None:
        ways, kv_tiles = self.visit_table.shape[:2]
        for way, kv_tile in product(range(ways), range(kv_tiles)):
            needed = range(self.grid.first_query(kv_tile), self.grid.q_tiles())
            visits = self.visits(kv_tile, way)
            for q_tile in sorted({*needed, *visits}):
                times, due = visits.count(q_tile), int(q_tile in needed)
                if times != due:
                    raise UnsoundPlan(
                        f"{self.name}: KV tile {kv_tile} visits query tile {q_tile} {times} times, not {due}"
                    )

    def _validate_ranks(self) -> None:
        for way, q_tile in product(range(len(self.rank_table)), range(self.grid.q_tiles())):
            ranks = self.rank_table[way, : self.grid.contributors(q_tile), q_tile].tolist()
            for kv_tile, rank in enumerate(ranks):
                if not 0 <= rank < len(ranks) or ranks.index(rank) < kv_tile:
                    raise UnsoundPlan(
                        f"{self.name}: KV tile {kv_tile} has rank {rank} at query tile {q_tile}, which "
                        f"is taken or not in 0..{len(ranks) - 1}"
                    )


def plan(
    schedule: str,
    num_q_tiles: int,
    num_kv_tiles: int,
    *,
    causal: bool = False,
    num_heads: int = 1,
    group: int = 1,
    tile_rows: tuple[int, int] = (1, 1),
    heads_per_block: int | None = None,
) -> Plan:
    """A schedule for so many tiles, written out.

    Args:
        schedule: a name, see `schedule_name`.
        num_q_tiles, num_kv_tiles: tiles a head.
        causal: the mask's lower right corner is the matrix's: the last query tile sees all KV tiles.
        num_heads: how many heads chains are issued for (with GQA: KV heads), over the whole batch. An even
            number without groups: they come in pairs.
        group: query heads that a chain walks, one after the other.
        tile_rows: (queries, keys) a tile. Only their ratio matters, and only under a causal mask.
        heads_per_block: in place of the kernel's order of issue: blocks of so many heads, and in a block
            the first cycle of each head, then the second one of each, and so on. The paper's symmetric
            shift on n SMs is 2. It does not change the bits.

    Raises ValueError for an unknown name or a size that is not positive.
    """
    q_rows, kv_rows = tile_rows
    if num_heads < 1 or group < 1:
        raise ValueError(f"num_heads is {num_heads} and group {group}; both must be positive")
    grid = _native.TileGrid(
        num_q_tiles * q_rows, num_kv_tiles * kv_rows, q_rows, kv_rows, causal,
        _native.heads_in_pairs(num_heads * group, num_heads),
    )  # fmt: skip
    policy = make_policy(schedule, grid)
    return _write_out(schedule, policy, [group] * num_heads, heads_per_block=heads_per_block)


def plan_call(
    schedule: str,
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    heads_q: int,
    heads_k: int,
    head_dim: int,
    causal: bool = False,
    num_sms: int = H200_SMS,
    sm_margin: int = 0,
) -> Plan:
    """The plan that the kernel follows in one backward call.

    Args as of `Schedule`, and the heads of Q, and of K and V; the SMs of the device, and how many of them
    are left to others. Where the kernel cuts the query heads of a KV head into parts, each part is a head of
    the plan. Where the SMs are enough for a cycle on each side of the L2 cache, each has an order of issue.
    The order depends on how many SMs there are; visits and ranks do not.

    Raises ValueError for an unknown name, a size that is not positive, heads_k that don't divide heads_q, or
    sm_margin outside of 0 to num_sms - 1.
    """
    if not 0 <= sm_margin < num_sms:
        raise ValueError(f"sm_margin is {sm_margin} and not in 0..{num_sms - 1}, of {num_sms} SMs")
    policy = make_policy(schedule, _native.call_grid(seqlen_q, seqlen_k, heads_q, heads_k, head_dim, causal))
    parts = _native.part_sizes(heads_q, heads_k, policy.grid, head_dim, policy.waits_in_line)
    sides = policy.l2_sides(batch, heads_k, len(parts), num_sms, sm_margin)
    policy = make_policy(schedule, policy.grid.on_sides(sides, num_sms - sm_margin))
    return _write_out(schedule, policy, parts * (batch * heads_k))


def _write_out(
    schedule: str, policy: _native.Policy, parts: Sequence[int], *, heads_per_block: int | None = None
) -> Plan:
    """`parts`: how many query heads the chains of each head walk."""
    num_heads, kv_tiles, ways = len(parts), policy.grid.kv_tiles(), policy.ways
    sides = 1 + policy.grid.two_sides
    if heads_per_block is None:
        half = policy.chain_table(num_heads // sides)
        first_heads = range(0, num_heads, num_heads // sides)
        chain_table = np.concatenate([half + np.int32([head, 0]) for head in first_heads])
    else:
        chain_table = _in_blocks(policy, num_heads, heads_per_block)
    cycle = np.empty(kv_tiles, np.int32)
    cycle[policy.chain_table(1)[:, 1]] = [policy.cycle_end(claim, 1) for claim in range(kv_tiles)]
    return Plan(
        schedule_name(schedule), policy.grid, np.cumsum([0, *parts], dtype=np.int32), chain_table,
        np.arange(num_heads, dtype=np.int32) % ways,
        np.stack([policy.visit_table(w) for w in range(ways)]),
        np.stack([policy.rank_table(w) for w in range(ways)]),
        np.unique(cycle, return_inverse=True)[1].astype(np.int32), policy.heads_together(max(parts)),
        policy.split_table(), policy.turns, sides,
    )  # fmt: skip


def _in_blocks(policy: _native.Policy, num_heads: int, heads_per_block: int) -> NDArray[np.int32]:
    if heads_per_block < 1:
        raise ValueError(f"heads_per_block is {heads_per_block}, not positive")
    # What is issued of one head before the next one's turn, as seen in a block of two heads. Or chain by
    # chain, where heads are issued one after the other, or go different ways.
    two = policy.chain_table(2)
    if policy.waits_in_line or policy.ways == 2:
        ends = np.arange(1, len(two))
    else:
        ends = np.flatnonzero(np.diff(two[:, 0])) + 1
    stretches = [(run[0, 0], run[:, 1]) for run in np.split(two, ends) if run[0, 0] < policy.ways]
    heads = range(num_heads)
    return np.array(
        [
            (head, kv_tile)
            for first in heads[::heads_per_block]
            for way, stretch in stretches
            for head in heads[first : first + heads_per_block]
            if head % policy.ways == way
            for kv_tile in stretch
        ],
        np.int32,
    )
