"""Runs a plan on a model of the machine: persistent CTAs, one an SM, claim chains in the order of issue."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..schedule import Plan

MODELS = ("paper", "pipelined")


class Deadlock(RuntimeError):
    """A simulation in which all CTAs wait. The text names one pair of tiles that does."""


@dataclass(frozen=True)
class Costs:
    """What a task and a chain take, in one unit of time.

    Args:
        compute: the products of one pair of tiles.
        reduce: adding its dQ tile to the sum, until that has landed.
        signal: from there until the next rank may start.
        chain: between two chains of an SM: dK and dV go out, K and V come in.
    """

    compute: float = 1.0
    reduce: float = 0.25
    signal: float = 0.0
    chain: float = 0.0


@dataclass(frozen=True)
class Events:
    """One row a task, in the order of issue and, within a chain, of execution. Times in the costs' unit."""

    sm: NDArray[np.int32]
    claim: NDArray[np.int32]
    q_head: NDArray[np.int32]
    q_tile: NDArray[np.int32]
    compute_start: NDArray[np.float64]
    compute_end: NDArray[np.float64]
    staged: NDArray[np.float64]
    """When the dQ tile had a staging buffer; in the paper's model compute_end."""
    reduce_start: NDArray[np.float64]
    reduce_end: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.sm)


@dataclass(frozen=True, eq=False)
class Simulation:
    """What `simulate` found out.

    An SM is, at each moment from 0 to the makespan, busy (computing, in the paper's model reducing, or
    between two chains), stalled (it has a task, and waits for a turn or a buffer) or idle (no work is left).
    """

    plan: Plan
    num_sms: int
    model: str
    costs: Costs
    staging: int
    ordered: bool
    events: Events
    claimed: NDArray[np.float64]
    """(claims): when an SM took the chain."""
    makespan: float
    lower_bound: float
    """No order of issue, visits or ranks is faster than this on the model without jitter."""

    @cached_property
    def busy(self) -> NDArray[np.float64]:
        """(SMs): time busy."""
        e = self.events
        work = e.compute_end - e.compute_start
        if self.model == "paper":
            work = work + (e.reduce_end - e.reduce_start)
        chains = np.bincount(self._sm_of_claim, minlength=self.num_sms) * self.costs.chain
        return np.bincount(e.sm, work, self.num_sms) + chains

    @cached_property
    def idle(self) -> NDArray[np.float64]:
        """(SMs): time after the SM's last task."""
        end = np.zeros(self.num_sms)
        np.maximum.at(end, self.events.sm, self.events.reduce_end)
        return self.makespan - end

    @property
    def stalled(self) -> NDArray[np.float64]:
        """(SMs): time waiting with a task in hand."""
        return self.makespan - self.busy - self.idle

    @cached_property
    def _sm_of_claim(self) -> NDArray[np.int32]:
        # A chain without visits has no task, and is left out.
        sms = np.full(len(self.plan.chain_table), -1, np.int32)
        sms[self.events.claim] = self.events.sm
        return sms[sms >= 0]

    @property
    def efficiency(self) -> float:
        """The lower bound in parts of the makespan: 1 is the best that any schedule can do."""
        return self.lower_bound / self.makespan

    @property
    def stall_share(self) -> float:
        """The part of all SMs' time that is stalled."""
        return float(self.stalled.sum() / (self.makespan * self.num_sms))


def simulate(
    plan: Plan,
    num_sms: int,
    compute: float = 1.0,
    reduce: float = 0.25,
    signal: float = 0.0,
    model: str = "paper",
    *,
    chain: float = 0.0,
    staging: int = 2,
    jitter: float = 0.0,
    pace: float = 0.0,
    seed: int = 0,
    unordered: bool = False,
    drained: bool = False,
) -> Simulation:
    """Executes a plan and returns all that happened.

    Args:
        plan: of `schedule.plan`, `schedule.plan_call`, or made by hand.
        num_sms: SMs with one persistent CTA each. A CTA that is free claims the next chain.
        compute, reduce, signal, chain: see `Costs`; one unit of time, not negative.
        model: "paper": a task computes, waits for its turn, reduces, and then the SM goes on with the next
            one, as in DASH's DAG. "pipelined": the task leaves its dQ tile in a staging buffer, which waits
            and reduces while the SM computes; the SM waits only if no buffer is free, and between chains
            that may wait for each other.
        staging: buffers for dQ tiles in the pipelined model.
        jitter: compute times are uniform in [1 - jitter, 1 + jitter] times compute.
        pace: the same for stretches: 16 tasks of a chain in a row share a factor in [1 - pace, 1 + pace].
            Jitter evens out along a chain; a slow stretch holds up all chains that follow it.
        seed: of both. The same seed gives each task the same time, in every schedule of equal tables.
        unordered: reductions don't wait for turns: the control, what the order costs.
        drained: in the pipelined model, an SM claims no chain before the last reduction of the one before,
            whatever the cycles. The kernel does so for schedules that `schedule.waits_in_line`.

    Raises:
        ValueError: an argument out of range, or tables that are no plan (Plan.validate says more).
        Deadlock: the plan needs more SMs.
    """
    if model not in MODELS:
        raise ValueError(f"model {model!r} is none of {', '.join(MODELS)}")
    if model == "pipelined" and staging < 1:
        raise ValueError(f"staging is {staging}; the pipelined model needs a buffer")
    costs = Costs(compute, reduce, signal, chain)
    staging = staging if model == "pipelined" else 0
    tables = plan.tables()
    if drained:
        # The simulator drains until all chains of the cycle are claimed: as if they all were of one.
        tables["cycle_end"] = np.full_like(tables["cycle_end"], len(plan.chain_table))
    line = _native.simulate(
        **tables, sms=num_sms, others=plan.others(num_sms),
        compute=compute, reduce=reduce, signal=signal, chain=chain,
        staging=staging, jitter=jitter, pace=pace, seed=seed, ordered=not unordered,
    )  # fmt: skip
    if line.pop("unfinished"):
        raise Deadlock(f"{plan.name} stops on {num_sms} SMs: {plan.blame(line)}")
    claimed = line.pop("claimed")
    events = Events(**line)
    makespan = float(events.reduce_end.max(initial=0.0))
    bound = lower_bound(plan, num_sms, costs, model, unordered=unordered)
    return Simulation(plan, num_sms, model, costs, staging, not unordered, events, claimed, makespan, bound)


def lower_bound(
    plan: Plan, num_sms: int, costs: Costs, model: str = "paper", *, unordered: bool = False
) -> float:
    """A time that no schedule of the plan's tasks beats, whatever its orders, without jitter.

    The largest of: all work, divided by the SMs; what the longest chains take where there are so many that
    one SM must run k of them, for every k; and what the longest sum takes, one contribution after the other.
    """
    # In the pipelined model only the last reduction of all is sure to be seen.
    per_task = costs.compute + (costs.reduce if model == "paper" else 0.0)
    tail = 0.0 if model == "paper" else costs.reduce
    visits = ((plan.visit_table >= 0).sum(2)[plan.way] * np.diff(plan.q_heads)[:, None]).ravel()
    chains = np.sort(visits[visits > 0] * per_task + costs.chain)[::-1]
    if len(chains) == 0:
        return 0.0
    # Of the k * num_sms + 1 longest chains, some SM runs k + 1, none shorter than the shortest of them.
    crowd = chains[::num_sms] * np.arange(1, len(chains[::num_sms]) + 1)
    bound = max(chains.sum() / num_sms, crowd.max()) + tail
    if not unordered:
        ranks = int(plan.rank_table.max()) + 1
        bound = max(bound, costs.chain + costs.compute + ranks * costs.reduce + (ranks - 1) * costs.signal)
    return float(bound)
