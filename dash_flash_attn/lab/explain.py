"""Which schedule a call runs on, why, and what each alternative would cost, by the lab's pipelined model."""

from __future__ import annotations

from dataclasses import dataclass

from ..checks import UNORDERED, check_name
from ..ops import auto_schedule
from ..schedule import H200_SMS, SCHEDULES, Plan, make_policy, plan_call, waits_in_line
from .simulate import Costs, simulate

# In microseconds, by head dimension: fitted by `lab calibrate --record` to the H200 times of 2026-11-30,
# benchmarks/results/backward.json; the fit is benchmarks/results/calibration.json. What it says well is
# compute, chain and the hop reduce + signal; how the hop splits into its two parts it hardly says.
H200_COSTS = {
    64: Costs(compute=2.475, reduce=0.498, signal=1.195, chain=4.86),
    128: Costs(compute=2.194, reduce=0.019, signal=1.321, chain=9.08),
}


@dataclass(frozen=True)
class Forecast:
    """What the model says about one schedule. Times in microseconds, of the main kernel alone."""

    schedule: str
    resident_ctas_needed: int
    time: float | None
    """None: it needs more resident CTAs than there are SMs, and the call would be refused."""
    stall_share: float | None
    """The part of all SMs' time spent waiting for turns and buffers."""
    idle_share: float | None
    """The part of all SMs' time without work, at the end."""


@dataclass(frozen=True)
class Explanation:
    """The answer of `explain`. As text, it is a few lines to read."""

    call: str
    schedule: str
    reason: str
    lower_bound: float
    """Microseconds; none of the schedules can be faster on the model."""
    forecasts: tuple[Forecast, ...]
    """One for each schedule, in the order of SCHEDULES."""

    def __str__(self) -> str:
        lines = [f"{self.call}: {self.schedule}", self.reason, ""]
        for f in self.forecasts:
            mark = "*" if f.schedule == self.schedule else " "
            if f.time is None:
                lines.append(f"{mark} {f.schedule:<16} needs {f.resident_ctas_needed} resident CTAs")
                continue
            shares = f"{f.stall_share:>8.1%} stalled{f.idle_share:>8.1%} idle"
            lines.append(f"{mark} {f.schedule:<16}{f.time:>9.0f} us{shares}")
        lines.append(f"  {'lower bound':<16}{self.lower_bound:>9.0f} us")
        return "\n".join(lines)


def explain(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    heads_q: int,
    heads_k: int,
    head_dim: int,
    causal: bool = False,
    *,
    schedule: str = "auto",
    num_sms: int = H200_SMS,
    sm_margin: int = 0,
    costs: Costs | None = None,
) -> Explanation:
    """Says which schedule a backward call takes and why, and predicts all of them.

    Args:
        batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim, causal: the call's sizes.
        schedule: the call's argument.
        num_sms: SMs of the device.
        sm_margin: how many of them are left to others.
        costs: in microseconds; H200_COSTS of the head dimension, if None.

    Raises ValueError for an unknown schedule, sizes that are no call, or an sm_margin that leaves no SM.
    """
    asked = check_name(schedule)
    if asked == UNORDERED:
        raise ValueError(f"schedule: a forecast is of an order of sums, and {schedule!r} has none")
    chosen = asked
    if asked == "auto":
        chosen = auto_schedule(seqlen_q, seqlen_k, heads_q, heads_k, head_dim, causal)
    if costs is None:
        if head_dim not in H200_COSTS:
            raise ValueError(f"head_dim is {head_dim}, and costs are known for {sorted(H200_COSTS)}")
        costs = H200_COSTS[head_dim]

    plans = {
        name: plan_call(
            name, batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim, causal, num_sms, sm_margin
        )
        for name in SCHEDULES
    }
    ctas = num_sms - sm_margin
    forecasts = []
    bounds = []
    for name, plan in plans.items():
        if plan.num_ctas_needed > ctas:
            forecasts.append(Forecast(name, plan.num_ctas_needed, None, None, None))
            continue
        run = simulate(
            plan, ctas, costs.compute, costs.reduce, costs.signal, "pipelined", chain=costs.chain,
            drained=waits_in_line(name),
        )  # fmt: skip
        idle_share = float(run.idle.mean()) / run.makespan
        forecasts.append(Forecast(name, plan.num_ctas_needed, run.makespan, run.stall_share, idle_share))
        bounds.append(run.lower_bound)  # not equal where some of them cut a group into parts

    mask = "causal" if causal else "full"
    call = f"batch {batch}, {seqlen_q} x {seqlen_k}, {heads_q}/{heads_k} heads, d {head_dim}, {mask}"
    rule = f"The call asks for {asked}."
    if asked == "auto":
        rule = _rule(plans[chosen], causal, seqlen_q == seqlen_k)
    comparison = _comparison(next(f for f in forecasts if f.schedule == chosen), forecasts, ctas)
    return Explanation(call, chosen, f"{rule} {comparison}", min(bounds), tuple(forecasts))


def _rule(plan: Plan, causal: bool, square: bool) -> str:
    """Why "auto" is this schedule."""
    schedule = plan.name
    if not causal:
        policy, kv_tiles = make_policy(schedule, plan.grid), plan.grid.kv_tiles()
        if policy.in_line == 0:
            return f'Without a mask "auto" is {schedule}: no two chains of a cycle meet.'
        return (
            f'Without a mask "auto" is {schedule}: of the {kv_tiles} KV tiles of a head '
            f"{kv_tiles - policy.in_line} rotate and never meet, {policy.group_size} at a time, and "
            f"{policy.in_line} wait in line before them."
        )
    if schedule == "descending":
        return '"auto" is descending for sequences this long: chains in line share what is in the L2 cache.'
    if schedule == "symmetric_shift":
        why = "long and short chains share a CTA"
    elif len(plan.visit_table) == 2:
        why = "the heads of a pair go opposite ways, and a long chain follows a short one"
    elif square:
        why = "all chains climb from the diagonal, and a late start holds nobody up"
    else:
        why = "it is no square above 128 KV tiles, where nothing has been measured"
    return f'Under a causal mask "auto" is {schedule} here: {why}.'


def _comparison(chosen: Forecast, forecasts: list[Forecast], num_sms: int) -> str:
    if chosen.time is None:
        return f"It needs {chosen.resident_ctas_needed} SMs and there are {num_sms}: it is refused."
    others = [f for f in forecasts if f.time is not None and f.schedule != chosen.schedule]
    best = min(others, key=lambda f: f.time)
    change = best.time / chosen.time - 1
    if abs(change) < 0.0005:
        return f"{best.schedule} takes the same time."
    word = "slower" if change > 0 else "faster"
    return f"The best other one, {best.schedule}, is predicted to be {abs(change):.1%} {word}."
