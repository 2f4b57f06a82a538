"""Times the backward pass on the 24 shapes of the DASH paper: 16,384 tokens, hidden size 2048, bfloat16.

For each shape and system: ms, TFLOP/s (10 b h s^2 d, half of it under a causal mask), the ratio to an 8192^3
matmul timed in the same rounds, and the memory beside inputs and outputs. Systems are timed in turns, round
after round, with a cold L2 cache; a row is the median over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from dash_flash_attn.lab import clocks

from . import harness, tables
from .harness import MATMUL, Row
from .shapes import PAPER_SHAPES, Shape, cell_name, describe, flop, fp32_dq_bytes, inputs
from .systems import AUTO, OURS, System, add_arguments, behind_auto, chosen, with_auto

SPEED = 450
"""TFLOP/s that an estimate of a sweep's time assumes: about what an H200 reaches."""

QUICK = tuple(shape for shape in PAPER_SHAPES if shape.seqlen in (1024, 16384))


def measure_cell(
    shape: Shape,
    systems: Sequence[System],
    rounds: int,
    *,
    clock: clocks.Clock = clocks.short_median,
    matmul: clocks.Run | None = None,
    device: str = "cuda",
) -> list[Row]:
    """A row for each system at one shape.

    Args:
        shape: the problem; see `shapes.inputs`.
        systems: what to time.
        rounds: how often each is timed.
        clock: times one call.
        matmul: what all is compared with (`harness.matmul`).
        device: where.
    """
    tensors = inputs(shape, device)
    alias = behind_auto([s.name for s in systems], shape)
    runs: dict[str, clocks.Run] = {}
    rows = {system.name: {**describe(shape), "system": system.name} for system in systems}
    for system in systems:
        if system.name == AUTO and alias:
            continue
        try:
            run = system.backward(tensors, shape.causal)
            run()  # whatever is compiled or loaded at a first call is not memory of a backward
            if device == "cuda":
                rows[system.name] |= memory(shape, harness.extra_bytes(run))
            runs[system.name] = run
        except Exception as error:
            rows[system.name]["error"] = harness.one_line(error)
            harness.check_gpu()
    times, errors = harness.interleaved(
        {MATMUL: matmul or harness.matmul(), **runs}, clock, rounds, cell_name(shape)
    )
    if MATMUL in errors:
        raise RuntimeError(f"{MATMUL}: {errors[MATMUL]}")
    for name in runs:
        rows[name] |= {"error": errors[name]} if name in errors else timing(shape, times[name], times[MATMUL])
    return with_auto(rows, alias)


def timing(shape: Shape, ms: Sequence[float], matmul_ms: Sequence[float]) -> Row:
    """The columns of a row that say how fast it is, from the milliseconds in each round."""
    tflops = [flop(shape) / t / 1e9 for t in ms]
    matmul = [harness.matmul_tflops(t) for t in matmul_ms]
    return {
        "ms": statistics.median(ms),
        "tflops": statistics.median(tflops),
        # Of each round by itself: the clock may fall from one to the next.
        "ratio_to_matmul": statistics.median(x / y for x, y in zip(tflops, matmul, strict=True)),
        "matmul_tflops": statistics.median(matmul),
        "round_ms": [round(t, 5) for t in ms],
    }


def memory(shape: Shape, extra: int) -> Row:
    """The columns of a row about a backward's extra bytes."""
    return {"extra_bytes": extra, "extra_in_fp32_dq": extra / fp32_dq_bytes(shape)}


def show(row: Row) -> str:
    """A row as a line."""
    numbers = f"{row['ms']:>9.3f} ms{row['tflops']:>8.1f} TFLOP/s{row['ratio_to_matmul']:>7.3f} of matmul"
    extra = f"{row['extra_in_fp32_dq']:>8.4f} fp32 dQ" if "extra_in_fp32_dq" in row else ""
    return f"{row['system']:<16}{numbers}{extra}"


def tables_of(rows: list[Row]) -> list[tables.Table]:
    """What is printed of a sweep."""
    return [*tables.backward(rows), tables.headline(rows)]


def estimate(shapes: Sequence[Shape], systems: int, rounds: int, lead_in: float, timed: float) -> float:
    """About how many seconds a sweep takes on an H200, without what a system compiles at its first call."""

    def series(ms: float) -> float:
        # do_bench makes six calls before the lead-in, and one at least there and in what it times.
        return 6 * ms + max(ms, lead_in) + max(ms, timed)

    def cell(ms: float) -> float:
        return 2 * systems * ms + rounds * (systems * series(ms) + series(matmul_ms))

    matmul_ms = 2 * harness.MATMUL_SIZE**3 / SPEED / 1e9
    return sum(cell(flop(shape) / SPEED / 1e9) for shape in shapes) / 1e3


def sweep(
    command: str,
    options: argparse.Namespace,
    shapes: Sequence[Shape],
    *,
    lead_in: float = clocks.LEAD_IN_MS,
    timed: float = clocks.TIMED_MS,
    tables_of: Callable[[list[Row]], list[tables.Table]] = tables_of,
    settings: Mapping[str, Any] | None = None,
) -> int:
    """Times the systems that a command line names on shapes; prints tables. 1 if a row failed.

    Args:
        command: the record's kind.
        options: of `sweep_parser`.
        shapes: what to time.
        lead_in: milliseconds of calls before a series that is timed.
        timed: milliseconds of calls that are timed in each round.
        tables_of: the rows' tables; those without rows are not printed.
        settings: more for the record.
    """
    systems = chosen(options)
    seconds = estimate(shapes, len(systems), options.rounds, lead_in, timed)
    print(f"{len(shapes)} cells, {len(systems)} systems: about {seconds / 60:.1f} minutes on an H200")
    clock = partial(clocks.short_median, lead_in=lead_in, timed=timed)
    return harness.run(
        command,
        options,
        shapes,
        partial(measure_cell, systems=systems, rounds=options.rounds, clock=clock),
        lambda rows: [table for table in tables_of(rows) if table.rows],
        describe=describe,
        name=cell_name,
        show=show,
        settings={
            "rounds": options.rounds,
            "lead_in_ms": lead_in,
            "timed_ms": timed,
            **(settings or {}),
        },
    )


def named(cells: Sequence[str] | None, shapes: Sequence[Shape]) -> Sequence[Shape]:
    """The shapes of these names; all of them without names. Ends the program for an unknown name."""
    if not cells:
        return shapes
    by_name = {cell_name(shape): shape for shape in shapes}
    if unknown := set(cells) - set(by_name):
        raise SystemExit(f"benchmarks: --cells: {min(unknown)} is none of {', '.join(by_name)}")
    return [by_name[name] for name in cells]


def sweep_parser(
    command: str, description: str | None, schedules: Sequence[str], rounds: int = clocks.ROUNDS
) -> argparse.ArgumentParser:
    """A command line for `sweep`."""
    parser = harness.parser(command, description)
    add_arguments(parser, schedules)
    parser.add_argument("--rounds", type=int, default=rounds, help=f"times each is timed ({rounds})")
    parser.add_argument("--cells", type=lambda text: text.split(","), help="only these, by name")
    return parser


def main(argv: Sequence[str]) -> int:
    """Measures everything asked for, prints it, and writes it."""
    parser = sweep_parser("backward", __doc__, OURS)
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--dims", type=numbers, help="head dimensions (128,64)")
    parser.add_argument("--seqlens", type=numbers, help="sequence lengths (512,...,16384; quick 1024,16384)")
    parser.add_argument("--masks", choices=("full", "causal", "both"), default="both")
    options = parser.parse_args(argv)
    shapes = [
        shape
        for shape in (QUICK if options.quick and not options.seqlens else PAPER_SHAPES)
        if (not options.dims or shape.head_dim in options.dims)
        and (not options.seqlens or shape.seqlen in options.seqlens)
        and options.masks in ("both", "causal" if shape.causal else "full")
    ]
    return sweep("backward", options, named(options.cells, shapes))
