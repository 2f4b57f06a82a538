"""The CPU time of a forward and backward call, on shapes so small that it is what a user waits for.

Calls are made in bunches, without waiting for the GPU inside of one, and bunches of the systems take turns.
Ours is called as users call it (`flash_attn_func`), with its checks of arguments. A peer's passes are called
from a bare autograd function, which is less than its own Python interface does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from . import harness, tables
from .harness import Row
from .shapes import Shape, cell_name, describe
from .systems import AUTO, System, add_arguments, chosen

CALLS = 40
"""A bunch's calls. Their launches fit into the driver's queue of 1,024, so that none waits for the GPU."""


FULL = (Shape(64, False, 128, 1, 4, 4), Shape(128, True, 256, 1, 8, 2), Shape(128, True, 512, 2, 16, 16))
QUICK = FULL[:2]


def measure_cell(
    call: Shape,
    systems: Sequence[System],
    bunches: int,
    *,
    calls: int = CALLS,
    device: str = "cuda",
    now: Callable[[], float] = time.perf_counter,
) -> list[Row]:
    """A row for each system: microseconds of one forward and backward call, the median over bunches.

    Args:
        call: the sizes.
        systems: what to time.
        bunches: how often each is timed.
        calls: in a bunch.
        device: where.
        now: seconds.
    """

    def tensor(heads: int) -> torch.Tensor:
        shape = (call.batch, call.seqlen, heads, call.head_dim)
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    q, k, v = (tensor(heads).requires_grad_() for heads in (call.heads, call.kv_heads, call.kv_heads))
    dout = tensor(call.heads)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def bunch(system: System) -> float:
        wait()
        start = now()
        for _ in range(calls):
            torch.autograd.grad(system.attention(q, k, v, call.causal), (q, k, v), dout)
        return (now() - start) / calls * 1e6

    rows = {system.name: {**describe(call), "system": system.name} for system in systems}
    us: dict[str, list[float]] = {system.name: [] for system in systems}
    for number in range(bunches + 1):
        for system in systems:
            if "error" in rows[system.name]:
                continue
            try:
                us[system.name].append(bunch(system))
            except Exception as error:
                rows[system.name]["error"] = harness.one_line(error)
                harness.check_gpu()
        if number == 0:  # warms up
            us = {name: [] for name in us}
    for name, times in us.items():
        if "error" not in rows[name]:
            rows[name] |= {"us": statistics.median(times), "lowest_us": min(times)}
    return list(rows.values())


def show(row: Row) -> str:
    """A row as a line."""
    return f"{row['system']:<16}{row['us']:>9.1f} us, at least {row['lowest_us']:.1f}"


def main(argv: Sequence[str]) -> int:
    """Measures everything asked for, prints it, and writes it."""
    parser = harness.parser("call_cost", __doc__)
    add_arguments(parser, (AUTO,))
    options = parser.parse_args(argv)
    return harness.run(
        "call_cost",
        options,
        QUICK if options.quick else FULL,
        partial(measure_cell, systems=chosen(options), bunches=9 if options.quick else 25),
        lambda rows: [tables.call_cost(rows)],
        describe=describe,
        name=cell_name,
        show=show,
    )
