"""The peak of the memory that a backward holds beside its inputs and its results."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from . import harness, tables
from .backward import memory
from .harness import Row
from .shapes import LLAMA3_8B, PAPER_SHAPES, SINGLE, Shape, cell_name, describe, inputs
from .systems import AUTO, UNORDERED, System, add_arguments, chosen, row_of_each

FULL = (*(shape for shape in PAPER_SHAPES if shape.seqlen in (1024, 16384)), *SINGLE, LLAMA3_8B[-1])
QUICK = (*(shape for shape in PAPER_SHAPES if shape.seqlen == 1024), *SINGLE)


def measure_cell(shape: Shape, systems: Sequence[System]) -> list[Row]:
    """A row for each system at one shape: bytes, and how many float32 dQ these are."""
    tensors = inputs(shape)

    def extra(system: System) -> Row:
        run = system.backward(tensors, shape.causal)
        run()  # whatever is compiled or loaded at a first call is not memory of a backward
        return memory(shape, harness.extra_bytes(run))

    return row_of_each(shape, systems, extra)


def show(row: Row) -> str:
    """A row as a line."""
    mib = row["extra_bytes"] / 2**20
    return f"{row['system']:<16}{mib:>9.1f} MiB{row['extra_in_fp32_dq']:>9.4f} fp32 dQ"


def main(argv: Sequence[str]) -> int:
    """Measures everything asked for, prints it, and writes it."""
    parser = harness.parser("memory", __doc__)
    add_arguments(parser, (AUTO, UNORDERED))
    options = parser.parse_args(argv)
    return harness.run(
        "memory",
        options,
        QUICK if options.quick else FULL,
        partial(measure_cell, systems=chosen(options)),
        lambda rows: [tables.memory(rows)],
        describe=describe,
        name=cell_name,
        show=show,
    )
