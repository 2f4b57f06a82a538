"""Fits the costs of the pipelined model to backward times, and says how well it orders the schedules.

Times come from the kernels on this machine's GPU (`measure`) or from a record of a benchmark (`read_record`).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..ops import auto_schedule
from ..schedule import SCHEDULES, Plan, plan_call, waits_in_line
from .clocks import ROUNDS, Clock, short_median, turns
from .simulate import Costs, simulate

TOKENS = 16384
HIDDEN = 2048
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (128, 64)

PREPARE_US = 8.0
"""From the start of a call to its first scores: counters are cleared and the first row statistics worked
out. Measured on an H200 (docs/performance.md). It is given, not fitted: an SM runs as many chains at
512 tokens as at 16,384, so that a constant cannot be told from the time between chains."""

FIT_UP_TO = 4096
"""Longer sequences are predicted only. Simulating them would take three quarters of the time, and as they are
not fitted, they test the model."""

_FIRST_GUESS = Costs(compute=2.5, reduce=1.0, signal=0.5, chain=10.0)
_STEPS = 8


class Shape(NamedTuple):
    """The sizes of one backward call: `seqlen` queries, and as many keys where `seqlen_k` is None."""

    head_dim: int
    causal: bool
    seqlen: int
    batch: int
    heads: int
    kv_heads: int
    seqlen_k: int | None = None

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Shape:
        """The shape of a record's row. Raises KeyError for a row that lacks a size."""
        return cls(*(row[name] for name in cls._fields if name != "seqlen_k"), row.get("seqlen_k"))

    @property
    def keys(self) -> int:
        """The number of keys."""
        return self.seqlen if self.seqlen_k is None else self.seqlen_k

    def columns(self) -> dict[str, Any]:
        """The sizes as columns of a record's row; `seqlen_k` only where it is not None."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    def __str__(self) -> str:
        tokens = str(self.seqlen) if self.seqlen_k is None else f"{self.seqlen} x {self.seqlen_k}"
        return f"d {self.head_dim} {'causal' if self.causal else 'full'} {tokens}"


class Timing(NamedTuple):
    """What one backward takes with one schedule, `prepare` included. Microseconds."""

    shape: Shape
    schedule: str
    us: float


PAPER_SHAPES = tuple(
    Shape(head_dim, causal, seqlen, TOKENS // seqlen, HIDDEN // head_dim, HIDDEN // head_dim)
    for head_dim in HEAD_DIMS
    for causal in (False, True)
    for seqlen in SEQLENS
)
"""The 24 shapes of DASH: 16,384 tokens, hidden size 2048."""


@dataclass(frozen=True)
class Choice:
    """A schedule taken at a shape, and how much longer it is than the best measured one (0.02: 2 %)."""

    shape: Shape
    schedule: str
    loss: float


@dataclass(frozen=True, eq=False)
class Calibration:
    """Costs, and the model's times with them beside the measured ones.

    Args:
        costs: by head dimension; microseconds.
        num_sms: SMs that the kernels ran on.
        prepare: see PREPARE_US.
        timings: all that was measured.
        predicted: float (timings), the model's times in microseconds.
    """

    costs: dict[int, Costs]
    num_sms: int
    prepare: float
    timings: tuple[Timing, ...]
    predicted: NDArray[np.float64]

    @cached_property
    def misses(self) -> NDArray[np.float64]:
        """(timings): predicted / measured - 1."""
        return self.predicted / np.array([t.us for t in self.timings]) - 1

    @cached_property
    def by_shape(self) -> dict[Shape, list[int]]:
        """The timings of each shape, as their numbers."""
        shapes: dict[Shape, list[int]] = {}
        for number, timing in enumerate(self.timings):
            shapes.setdefault(timing.shape, []).append(number)
        return shapes

    def rms(self, head_dim: int) -> float:
        """The root mean square of log(predicted / measured) over a head dimension's timings."""
        mine = [t.shape.head_dim == head_dim for t in self.timings]
        return float(np.sqrt(np.mean(np.log1p(self.misses[mine]) ** 2)))

    @cached_property
    def rank_correlations(self) -> dict[Shape, float]:
        """Spearman's rank correlation of the predicted and the measured order of schedules, by shape.

        Shapes where it has no meaning (a single schedule, or all predicted to be equal) are left out.
        """
        found = {}
        for shape, numbers in self.by_shape.items():
            rho = spearman(self.predicted[numbers], [self.timings[i].us for i in numbers])
            if rho is not None:
                found[shape] = rho
        return found

    def mean_rank_correlation(self, causal: bool | None = None) -> float | None:
        """The mean of `rank_correlations`, of one mask's shapes or of all. None if there is none."""
        chosen = [rho for shape, rho in self.rank_correlations.items() if causal in (None, shape.causal)]
        return statistics.fmean(chosen) if chosen else None

    @property
    def worst_miss(self) -> tuple[Timing, float]:
        """The timing that the model is the furthest from, and by how much (-0.1: 10 % too short)."""
        number = int(np.abs(self.misses).argmax())
        return self.timings[number], float(self.misses[number])

    def choices(self, choose: Callable[[Shape], str] | None = None) -> list[Choice]:
        """What a rule for choosing costs at each shape; the rule "the best predicted one", if None.

        Where several are predicted to be equally good, the slowest of them counts. Shapes at which the
        rule's schedule was not measured are left out.
        """
        found = []
        for shape, numbers in self.by_shape.items():
            best = min(self.timings[i].us for i in numbers)
            if choose is None:
                least = self.predicted[numbers].min() * (1 + 1e-9)
                chosen = [i for i in numbers if self.predicted[i] <= least]
            else:
                chosen = [i for i in numbers if self.timings[i].schedule == choose(shape)]
            if chosen:
                taken = max((self.timings[i] for i in chosen), key=lambda t: t.us)
                found.append(Choice(shape, taken.schedule, taken.us / best - 1))
        return found

    def as_json(self) -> dict[str, Any]:
        """The numbers for a file. `rows` can be read again by `read_record`."""
        timing, miss = self.worst_miss
        return {
            "sms": self.num_sms,
            "prepare_us": self.prepare,
            "fitted_up_to_seqlen": FIT_UP_TO,
            "costs_us": {
                str(d): {**asdict(costs), "rms_of_log": self.rms(d)} for d, costs in self.costs.items()
            },
            "rank_correlation": {
                "mean": self.mean_rank_correlation(),
                "mean_full": self.mean_rank_correlation(False),
                "mean_causal": self.mean_rank_correlation(True),
                "lowest": min(self.rank_correlations.values(), default=None),
            },
            "worst_miss": {**timing.shape.columns(), "system": timing.schedule, "miss": miss},
            "worst_choice": {
                rule: {**worst.shape.columns(), "system": worst.schedule, "loss": worst.loss}
                for rule, worst in (
                    ("best_predicted", _worst(self.choices())),
                    ("auto", _worst(self.choices(auto))),
                )
                if worst
            },
            "rows": [
                {**t.shape.columns(), "system": t.schedule, "ms": t.us / 1e3, "predicted_ms": float(us) / 1e3}
                for t, us in zip(self.timings, self.predicted, strict=True)
            ],
        }

    def __str__(self) -> str:
        lines = [
            "Costs in us     compute   reduce   signal    chain   rms",
            *(
                f"d {d:<12}{c.compute:>9.3f}{c.reduce:>9.3f}{c.signal:>9.3f}{c.chain:>9.2f}"
                f"{self.rms(d):>6.1%}"
                for d, c in self.costs.items()
            ),
            "",
            "Measured ms, and how far the model is off; Spearman's rank correlation of the schedules' order",
            " " * 20 + "".join(f"{name:>17}" for name in SCHEDULES) + f"{'order':>8}",
        ]
        for shape, numbers in self.by_shape.items():
            cells = {self.timings[i].schedule: f"{self.timings[i].us / 1e3:.3f}{self.misses[i]:>+7.1%}"
                     for i in numbers}  # fmt: skip
            rho = self.rank_correlations.get(shape)
            order = "-" if rho is None else f"{rho:.2f}"
            lines.append(
                f"{shape!s:<20}" + "".join(f"{cells.get(n, '-'):>17}" for n in SCHEDULES) + f"{order:>8}"
            )
        means = [self.mean_rank_correlation(causal) for causal in (None, False, True)]
        words = ["-" if mean is None else f"{mean:.2f}" for mean in means]
        timing, miss = self.worst_miss
        lines += [
            "",
            f"Rank correlation: mean {words[0]}; full {words[1]}, causal {words[2]}",
            f"Worst miss: {timing.shape}, {timing.schedule}: {miss:+.1%}",
        ]
        for rule, worst in (("best predicted", _worst(self.choices())), ("auto", _worst(self.choices(auto)))):
            if worst:
                lines.append(
                    f"Worst choice, {rule}: {worst.shape}, {worst.schedule}: {worst.loss:.1%} over the best"
                )
        return "\n".join(lines)


def _worst(choices: Sequence[Choice]) -> Choice | None:
    return max(choices, key=lambda choice: choice.loss, default=None)


def auto(shape: Shape) -> str:
    """What "auto" takes."""
    return auto_schedule(shape.seqlen, shape.keys, shape.heads, shape.kv_heads, shape.head_dim, shape.causal)


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """The rank correlation of two equally long sequences; equal values share their mean rank.

    None where one of them has fewer than two different values.
    """
    ranks = [_ranks(np.asarray(values, float)) for values in (a, b)]
    x, y = (r - r.mean() for r in ranks)
    norm = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / norm if norm > 0 else None


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    # Sums in another order differ in the last bits: values as close as that are equal.
    different = np.abs(values[:, None] - values) > 1e-9 * np.abs(values)
    below = ((values < values[:, None]) & different).sum(1)
    return below + (~different).sum(1) / 2


@lru_cache(maxsize=128)
def _plan(shape: Shape, schedule: str, num_sms: int) -> Plan:
    return plan_call(
        schedule, shape.batch, shape.seqlen, shape.keys, shape.heads, shape.kv_heads, shape.head_dim,
        shape.causal, num_sms,
    )  # fmt: skip


def predict(shape: Shape, schedule: str, costs: Costs, num_sms: int, prepare: float = PREPARE_US) -> float:
    """The model's time of a backward call, in microseconds. Raises Deadlock on too few SMs."""
    run = simulate(
        _plan(shape, schedule, num_sms), num_sms, costs.compute, costs.reduce, costs.signal, "pipelined",
        chain=costs.chain, drained=waits_in_line(schedule),
    )  # fmt: skip
    return prepare + run.makespan


def fit(timings: Sequence[Timing], num_sms: int, prepare: float = PREPARE_US) -> Costs:
    """The costs for which the model's times are the closest to these, in the mean square of the logarithm.

    A Levenberg-Marquardt descent on the costs' logarithms, so that they stay positive and a step means the
    same for each. The derivatives are differences over 3 %, which is longer than most of the kinks that a
    makespan has.

    Raises ValueError for no timings, or one that is not longer than `prepare`.
    """
    if not timings:
        raise ValueError("there are no timings to fit to")
    if any(t.us <= prepare for t in timings):
        raise ValueError(f"a timing is no longer than the {prepare:g} us of prepare")
    measured = np.log([t.us for t in timings])

    def errors(log_costs: NDArray[np.float64]) -> NDArray[np.float64]:
        costs = Costs(*np.exp(log_costs).tolist())
        return np.log([predict(t.shape, t.schedule, costs, num_sms, prepare) for t in timings]) - measured

    width, damping = 0.03, 0.01
    at = np.log([_FIRST_GUESS.compute, _FIRST_GUESS.reduce, _FIRST_GUESS.signal, _FIRST_GUESS.chain])
    error = errors(at)
    for _ in range(_STEPS):
        slopes = np.stack([(errors(at + width * axis) - error) / width for axis in np.eye(len(at))], 1)
        normal = slopes.T @ slopes
        before = error @ error
        while damping < 1e3:
            # The second term keeps a cost that these times don't depend on where it is.
            damped = normal + damping * np.diag(np.diag(normal)) + 1e-6 * len(timings) * np.eye(len(at))
            step = np.clip(-np.linalg.solve(damped, slopes.T @ error), -0.7, 0.7)
            tried = errors(at + step)
            if tried @ tried < before:
                break
            damping *= 4
        else:
            break
        at, error, damping = at + step, tried, max(damping / 4, 1e-4)
        if error @ error > 0.995 * before:
            break
    return Costs(*np.exp(at).tolist())


def calibrate(timings: Iterable[Timing], num_sms: int, prepare: float = PREPARE_US) -> Calibration:
    """Fits costs for each head dimension, on sequences up to FIT_UP_TO, and predicts all timings with them.

    Raises ValueError where a head dimension has no timings to fit to.
    """
    timings = tuple(timings)
    if not timings:
        raise ValueError("there are no timings to fit to")
    costs = {}
    for head_dim in dict.fromkeys(t.shape.head_dim for t in timings):
        mine = [t for t in timings if t.shape.head_dim == head_dim and t.shape.seqlen <= FIT_UP_TO]
        if not mine:
            raise ValueError(f"head dimension {head_dim} has no timing up to {FIT_UP_TO} tokens")
        costs[head_dim] = fit(mine, num_sms, prepare)
    predicted = [predict(t.shape, t.schedule, costs[t.shape.head_dim], num_sms, prepare) for t in timings]
    return Calibration(costs, num_sms, prepare, timings, np.array(predicted))


def read_record(path: Path) -> tuple[list[Timing], int, dict[str, Any]]:
    """Timings, SMs and environment of a JSON file of `python -m benchmarks backward` or `lab calibrate`.

    Rows of other systems than our schedules, and failed ones, are left out.

    Raises ValueError for a file without such rows, or without the number of SMs; OSError.
    """
    try:
        record = json.loads(path.read_text())
        environment = dict(record["environment"])
        timings = [
            Timing(Shape.of_row(row), row["system"], row["ms"] * 1e3)
            for row in record["rows"]
            if row["system"] in SCHEDULES and "ms" in row
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no record of backward times ({type(error).__name__}: {error})") from None
    if not timings:
        raise ValueError(f"{path} has no times of {', '.join(SCHEDULES)}")
    if not isinstance(environment.get("sms"), int):
        raise ValueError(f"{path} does not say on how many SMs it was measured (environment.sms)")
    return timings, environment["sms"], environment


def measure(
    shapes: Iterable[Shape] = PAPER_SHAPES,
    *,
    device: str = "cuda",
    clock: Clock = short_median,
    rounds: int = ROUNDS,
    report: Callable[[Timing], None] = lambda timing: None,
) -> list[Timing]:
    """Times our backward operator with each schedule, on standard normal bfloat16 inputs.

    Args:
        shapes: what to time.
        device: where.
        clock: milliseconds of a call.
        rounds: how often each is timed, in turns with the shape's other schedules. The median counts.
        report: called with each result.
    """
    import torch

    timings = []
    for shape in shapes:
        queries, keys = (shape.seqlen, shape.heads), (shape.keys, shape.kv_heads)
        q, k, v, dout = (
            torch.randn(shape.batch, *size, shape.head_dim, device=device, dtype=torch.bfloat16)
            for size in (queries, keys, keys, queries)
        )
        scale = shape.head_dim**-0.5
        out, lse = torch.ops.dash_flash_attn.forward(q, k, v, scale, shape.causal)
        times: dict[str, list[float]] = {schedule: [] for schedule in SCHEDULES}
        for schedule in turns(SCHEDULES, rounds, str(shape)):
            arguments = (dout, q, k, v, out, lse, scale, shape.causal, schedule, 0)
            times[schedule].append(
                clock(lambda arguments=arguments: torch.ops.dash_flash_attn.backward(*arguments))
            )
        for schedule, ms in times.items():
            timings.append(Timing(shape, schedule, statistics.median(ms) * 1e3))
            report(timings[-1])
    return timings


def gpu_environment() -> dict[str, Any]:
    """The GPU and the versions that timings of `measure` belong to.

    Raises RuntimeError where our kernels cannot run on the current GPU.
    """
    import torch

    from .. import __version__, info, kernels

    if reason := info.unusable() or kernels.unusable(torch.cuda.current_device()):
        raise RuntimeError(reason)
    gpu = torch.cuda.get_device_properties()
    return {
        "device": gpu.name,
        "sms": gpu.multi_processor_count,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "dash_flash_attn": __version__,
    }
