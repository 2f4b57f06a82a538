"""How far dQ, dK and dV are from attention in float64, on the same inputs.

The error of a gradient x is |x - exact| / |exact| in the Euclidean norm over all its numbers. One batch
entry, 8 query heads and 4 KV heads, bfloat16, standard normal inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from types import ModuleType

import torch

from . import harness, tables
from .harness import Row
from .shapes import Shape, cell_name, describe, inputs
from .systems import AUTO, GRADIENTS, OURS, UNORDERED, System, add_arguments, chosen, row_of_each

FULL = tuple(
    Shape(head_dim, causal, seqlen, 1, 8, 4)
    for head_dim in (128, 64)
    for causal in (False, True)
    for seqlen in (1024, 16384)
)
QUICK = tuple(shape for shape in FULL if shape.seqlen == 1024 or shape.head_dim == 128)


@cache
def oracle() -> ModuleType:
    """The float64 attention that the tests measure against."""
    threads = torch.get_num_threads()
    module = harness.load_module(harness.ROOT / "tests" / "oracle.py")
    torch.set_num_threads(threads)  # the tests' setting, for small tensors
    return module


def measure_cell(shape: Shape, systems: Sequence[System], device: str = "cuda") -> list[Row]:
    """A row for each system at one shape, the errors of the three gradients in it."""
    q, k, v, dout = inputs(shape, device)
    _, *exact = oracle().gradients(dout, q, k, v, shape.head_dim**-0.5, shape.causal)

    def errors(system: System) -> Row:
        found = system.backward((q, k, v, dout), shape.causal)()
        return {
            name: ((x.double() - y).norm() / y.norm()).item()
            for name, x, y in zip(GRADIENTS, found, exact, strict=True)
        }

    return row_of_each(shape, systems, errors)


def show(row: Row) -> str:
    """A row as a line."""
    return f"{row['system']:<16}" + "".join(f"  {name} {row[name]:.3e}" for name in GRADIENTS)


def main(argv: Sequence[str]) -> int:
    """Measures everything asked for, prints it, and writes it."""
    parser = harness.parser("accuracy", __doc__)
    add_arguments(parser, OURS)
    options = parser.parse_args(argv)
    if options.quick and options.schedules == list(OURS):
        options.schedules = [AUTO, UNORDERED]
    return harness.run(
        "accuracy",
        options,
        QUICK if options.quick else FULL,
        partial(measure_cell, systems=chosen(options)),
        lambda rows: [tables.accuracy(rows)],
        describe=describe,
        name=cell_name,
        show=show,
    )
