"""Times the backward pass at every kind of length, beside other projects.

12 lengths and 30 drawn ones, of about 16,384 tokens in all, hidden size 2048, at both head dimensions and
masks; groups of query heads as real models have them; queries and keys of unlike number; 32k and 64k tokens;
the joint attention of Stable Diffusion 3.5. Timed as in `backward`, but in fewer rounds and after a shorter
lead-in, so that ten minutes are enough for all cells with two schedules and four peers. The quick form, of
few cells, has the lead-in of `backward`.

A record can be made in parts, each by a process of its own, and merged:
  python -m benchmarks lengths --part 1/2 --out a.json
  python -m benchmarks lengths --part 2/2 --out b.json
  python -m benchmarks lengths --merge a.json b.json
A peer that compiles a kernel at its first call does so for each head dimension, mask and number of query
heads a KV head. If it keeps its kernels on the disk, several processes with `--warm` compile them beforehand.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dash_flash_attn.lab import clocks

from . import harness, tables
from .backward import named, sweep, sweep_parser
from .shapes import HIDDEN, TOKENS, Shape, cell_name, inputs
from .systems import AUTO, UNORDERED, System, chosen

ROUNDS = 3
LEAD_IN_MS = 40
TIMED_MS = 12

LENGTHS = (700, 2200, 3072, 3584, 4250, 4608, 5120, 6144, 7000, 8500, 12288, 14000)
"""Few of which are a whole number of waves of KV tiles."""


def drawn(count: int, seed: int, low: int = 500, high: int = 16384) -> list[int]:
    """Random lengths, ascending: one from each of `count` ranges that are equal by their logarithm."""
    rng = random.Random(seed)
    return [round(low * (high / low) ** ((number + rng.random()) / count)) for number in range(count)]


DRAWN = tuple(drawn(30, seed=18))

PLAIN = tuple(
    Shape(head_dim, causal, seqlen, max(1, TOKENS // seqlen), HIDDEN // head_dim, HIDDEN // head_dim)
    for head_dim in (128, 64)
    for causal in (False, True)
    for seqlen in sorted({*LENGTHS, *DRAWN})
)
"""Every length with as many KV heads as query heads."""

GROUPED = tuple(
    Shape(head_dim, causal, seqlen, max(1, TOKENS // seqlen), heads, kv_heads)
    for head_dim, seqlen, heads, kv_heads in (
        (128, 2200, 32, 8),  # LLaMA3-8B
        (128, 6144, 32, 8),
        (128, 4250, 28, 4),  # Qwen2.5-7B
        (128, 8192, 28, 4),
        (128, 5120, 64, 8),  # LLaMA3-70B
        (128, 6000, 40, 8),  # Qwen2.5-32B
        (128, 4250, 48, 8),  # Mixtral-8x22B
        (128, 5120, 64, 4),  # Qwen3-235B-A22B
        (128, 8192, 16, 1),  # one KV head for all
        (64, 2200, 14, 2),  # Qwen2.5-0.5B
        (64, 6000, 32, 8),  # LLaMA3.2-1B
        (64, 4250, 64, 8),  # gpt-oss
    )
    for causal in (False, True)
)

UNLIKE = (
    Shape(128, False, 4096, 4, 16, 16, 512),  # an image and its text
    Shape(128, False, 9000, 2, 12, 12, 512),  # a video and its text
    Shape(64, False, 4250, 4, 24, 24, 154),
    Shape(64, False, 448, 16, 20, 20, 1500),  # a transcript and its sound
    Shape(64, False, 1500, 16, 20, 20, 448),
    Shape(128, False, 1024, 1, 16, 16, 16384),  # few queries that read a long text
    Shape(64, False, 16384, 1, 32, 32, 1024),
    Shape(128, True, 2048, 2, 32, 8, 8192),  # chunks of a prompt, with what is before them
    Shape(128, True, 1000, 4, 16, 16, 5000),
    Shape(128, True, 4096, 1, 28, 4, 32768),
    Shape(64, True, 2048, 2, 32, 32, 6144),
    Shape(64, True, 512, 8, 14, 2, 4608),
)

LONG = tuple(
    Shape(head_dim, causal, seqlen, 1, heads, heads)
    for head_dim, seqlen, heads in ((128, 32768, 8), (128, 65536, 4), (64, 32768, 16), (64, 65536, 8))
    for causal in (False, True)
)

SD35 = Shape(64, False, 4250, 2, 24, 24)
"""The joint attention of a block of Stable Diffusion 3.5 Medium."""


def kind(shape: Shape) -> tuple[int, bool, int]:
    """What a peer may have a kernel of its own for."""
    return shape.head_dim, shape.causal, shape.heads // shape.kv_heads


# Cells of a kind stand together: a part of a record then needs few kinds of kernels.
FULL = tuple(sorted((*PLAIN, *GROUPED, *UNLIKE, *LONG, SD35), key=lambda s: (-s.head_dim, *kind(s)[1:])))
QUICK = named(
    (
        "d128-full-n4250-b3-h16-kv16",
        "d128-full-n4250-b3-h28-kv4",
        "d128-full-n4096-k512-b4-h16-kv16",
        "d128-causal-n2200-b7-h32-kv8",
        "d128-causal-n2048-k8192-b2-h32-kv8",
        "d64-full-n5120-b3-h32-kv32",
        "d64-full-n448-k1500-b16-h20-kv20",
        "d64-causal-n12288-b1-h32-kv32",
    ),
    FULL,
)


class Part(NamedTuple):
    """One of `count` parts of all cells, from 1."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """The part that "i/n" says. Raises argparse.ArgumentTypeError."""
        number, slash, count = text.partition("/")
        if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise argparse.ArgumentTypeError(f"{text!r} is no I/N with 1 <= I <= N")
        return cls(int(number), int(count))

    def of(self, cells: Sequence[Shape]) -> Sequence[Shape]:
        """Its cells, which follow each other; parts differ by one cell at most."""
        first, end = ((len(cells) * done) // self.count for done in (self.number - 1, self.number))
        return cells[first:end]

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def merged(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One record from its parts. A cell that failed in one part may be measured in another.

    Raises ValueError for parts that do not belong together, or that measured the same cell.
    """
    first = records[0]
    cells: dict[str, list[harness.Row]] = {}
    for record in records:
        for what in ("kind", "form", "rounds", "lead_in_ms", "timed_ms"):
            _same(what, first.get(what), record.get(what))
        for what in first["environment"].keys() - {"date", "uncommitted_changes"}:
            _same(what, first["environment"][what], record["environment"].get(what))
        for name, group in itertools.groupby(record["rows"], key=lambda row: row["cell"]):
            rows = list(group)
            if name not in cells or not tables.good(cells[name]):
                cells[name] = rows
            elif tables.good(rows):
                raise ValueError(f"{name} is measured in two of the records")
    order = {cell_name(shape): number for number, shape in enumerate(FULL)}
    names = sorted(cells, key=lambda name: order.get(name, len(order)))
    return {
        **{key: value for key, value in first.items() if key != "part"},
        "environment": {
            **first["environment"],
            "date": min(record["environment"]["date"] for record in records),
            "uncommitted_changes": any(record["environment"]["uncommitted_changes"] for record in records),
        },
        "seconds": round(sum(record["seconds"] for record in records), 1),
        "rows": [row for name in names for row in cells[name]],
    }


def _same(what: str, one: object, other: object) -> None:
    if one != other:
        raise ValueError(f"the records do not belong together: {what} is {one} in one and {other} in another")


def merge(options: argparse.Namespace) -> int:
    """Merges the records of a command line; prints their tables and what is missing. 1 if a row failed."""
    try:
        record = merged([harness.read_json(path) for path in options.merge])
    except (OSError, ValueError) as error:
        raise SystemExit(f"benchmarks: --merge: {error}") from None
    for table in tables.lengths(record["rows"]):
        print("\n" + table.markdown())
    options.quick = record["form"] == "quick"
    path = harness.record_path("lengths", options)
    harness.write_json(path, record)
    measured = {row["cell"] for row in tables.good(record["rows"])}
    names = map(cell_name, QUICK if options.quick else FULL)
    if missing := [name for name in names if name not in measured]:
        print(f"\nNot measured: --cells {','.join(missing)}")
    print(f"\n{len(measured)} cells; written to {path}")
    return int(bool(harness.failures(record["rows"])))


def warm(shapes: Sequence[Shape], systems: Sequence[System], device: str = "cuda") -> int:
    """Calls each system at one shape. 1 if one failed."""
    failed = 0
    for shape in harness.progress(shapes, cell_name):
        tensors = inputs(shape, device)
        for system in systems:
            try:
                system.backward(tensors, shape.causal)()
            except Exception as error:
                print(f"  FAILED {system.name}: {harness.one_line(error)}")
                harness.check_gpu()
                failed = 1
    return failed


def main(argv: Sequence[str]) -> int:
    """Measures everything asked for, prints it, and writes it."""
    parser = sweep_parser("lengths", __doc__, (AUTO, UNORDERED), ROUNDS)
    parser.add_argument(
        "--part", type=Part.parse, metavar="I/N", help="only the I-th of N parts of the cells"
    )
    parser.add_argument(
        "--merge", type=Path, nargs="+", metavar="FILE", help="make one record of these parts"
    )
    parser.add_argument("--warm", action="store_true", help="only call each peer once in each kind of cell")
    options = parser.parse_args(argv)
    if options.merge:
        return merge(options)
    cells = named(options.cells, QUICK if options.quick else FULL)
    if options.warm:
        cells = list({kind(shape): shape for shape in reversed(cells)}.values())  # the first of each
    if options.part:
        cells = options.part.of(cells)
    if options.warm:
        harness.require_kernels()
        return warm(cells, [system for system in chosen(options) if not system.ours])
    if options.part and not options.out:
        raise SystemExit("benchmarks: --part: say with --out where this part's record goes")
    lead_in, timed = (clocks.LEAD_IN_MS, clocks.TIMED_MS) if options.quick else (LEAD_IN_MS, TIMED_MS)
    return sweep(
        "lengths",
        options,
        cells,
        lead_in=lead_in,
        timed=timed,
        tables_of=tables.lengths,
        settings={"part": str(options.part)} if options.part else None,
    )
