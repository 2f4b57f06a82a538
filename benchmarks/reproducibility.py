"""Whether the same inputs give the same gradients, and the same training run the same weights.

The backward runs ten times on the same inputs; of each gradient the greatest deviation from the first run is
recorded. A causal transformer of 30 million parameters (that of `python -m dash_flash_attn demo`, in this
size) is trained twice from the same seed, and all weights are compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dash_flash_attn import demo

from . import harness, tables
from .accuracy import oracle
from .harness import Row
from .shapes import LLAMA3_8B, PAPER_SHAPES, Shape, cell_name, describe, inputs
from .systems import AUTO, GRADIENTS, OURS, UNORDERED, System, add_arguments, behind_auto, chosen, row_of_each

RUNS = 10

FULL = (*(shape for shape in PAPER_SHAPES if shape.seqlen == 4096), LLAMA3_8B[1])
QUICK = (LLAMA3_8B[1],)

TRAINED = demo.Sizes(layers=4, heads=6, head_dim=128, batch=4, seqlen=2048, steps=200)
"""30 million parameters."""


def measure_runs(
    shape: Shape, systems: Sequence[System], runs: int = RUNS, device: str = "cuda"
) -> list[Row]:
    """A row for each system: how far each gradient is from that of the first run, at most."""
    tensors = inputs(shape, device)
    return row_of_each(shape, systems, lambda s: deviations(s, tensors, shape.causal, runs), runs=runs)


def deviations(system: System, tensors: Sequence[torch.Tensor], causal: bool, runs: int) -> Row:
    """Columns dq, dk and dv: the greatest deviation from the first run; and whether all bits are equal."""
    run = system.backward(tensors, causal)
    first = [x.clone() for x in run()]
    found: Row = dict.fromkeys(GRADIENTS, 0.0) | {"bitwise_equal": True}
    for _ in range(runs - 1):
        for name, x, y in zip(GRADIENTS, run(), first, strict=True):
            found[name] = max(found[name], (x.double() - y.double()).abs().max().item())
            found["bitwise_equal"] &= oracle().same_bits(x, y)
    return found


def measure_training(system: System, sizes: demo.Sizes = TRAINED, device: str = "cuda") -> list[Row]:
    """One row: in how many weights, and by how much, two runs from the same seed differ."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return system.attention(q, k, v, True)

    first, second = (
        demo.train(attention, sizes, torch.device(device), f"{system.name}, run {i}") for i in (1, 2)
    )
    pairs = [(weight, second.weights[name]) for name, weight in first.weights.items()]
    different = sum(demo.differing(x, y) for x, y in pairs)
    row = {
        **describe_training(system),
        "steps": sizes.steps,
        "parameters": sum(x.numel() for x, _ in pairs),
        "weights_that_differ": different,
        "greatest_deviation": max((x - y).abs().max().item() for x, y in pairs),
        "losses_that_differ": demo.differing(first.losses, second.losses),
        "bitwise_equal": different == 0,
        "first_loss": first.losses[0].item(),
        "last_loss": first.losses[-1].item(),
        "tokens_per_second": max(first.tokens_per_second, second.tokens_per_second),
    }
    return [row]


def describe_training(system: System) -> Row:
    """The columns that say which training a row is of."""
    return {"cell": "training", "system": system.name}


def show(row: Row) -> str:
    """A row as a line."""
    equal = "the same bits" if row["bitwise_equal"] else "OTHER BITS"
    if row["cell"] == "training":
        return f"{row['system']:<16} {row['weights_that_differ']:,} weights of {row['parameters']:,} differ"
    return f"{row['system']:<16} {equal}" + "".join(f"  {name} {row[name]:.2e}" for name in GRADIENTS)


def main(argv: Sequence[str]) -> int:
    """Measures everything asked for, prints it, and writes it. 1 if a deterministic system did not repeat."""
    parser = harness.parser("reproducibility", __doc__)
    add_arguments(parser, OURS)
    parser.add_argument("--steps", type=int, default=TRAINED.steps, help=f"of training ({TRAINED.steps})")
    options = parser.parse_args(argv)
    harness.require_kernels()
    systems = chosen(options)
    # Full: every schedule is trained with. Peers are not: their forward is another one.
    names = (AUTO, UNORDERED) if options.quick else OURS
    trained = [s for s in systems if s.ours and s.name in names]
    attended = Shape(TRAINED.head_dim, True, TRAINED.seqlen, TRAINED.batch, TRAINED.heads, TRAINED.heads)
    if behind_auto([s.name for s in trained], attended):
        trained = [s for s in trained if s.name != AUTO]
    sizes = demo.Sizes(**{**vars(TRAINED), "steps": options.steps})

    def measure_cell(cell: Shape | System) -> list[Row]:
        if isinstance(cell, System):
            return measure_training(cell, sizes)
        return measure_runs(cell, systems)

    record = harness.measure(
        "reproducibility",
        options,
        [*(QUICK if options.quick else FULL), *trained],
        measure_cell,
        describe=lambda cell: describe_training(cell) if isinstance(cell, System) else describe(cell),
        name=lambda cell: f"training, {cell.name}" if isinstance(cell, System) else cell_name(cell),
        show=show,
    )
    for table in tables.reproducibility(record["rows"]):
        print("\n" + table.markdown())
    by_name = {system.name: system for system in systems}
    broken = [
        row
        for row in record["rows"]
        if by_name.get(row["system"])
        and by_name[row["system"]].ours
        and by_name[row["system"]].deterministic
        and not row.get("bitwise_equal")
    ]
    for row in broken:
        print(f"NOT REPRODUCIBLE: {harness.row_name(row)}")
    return bool(broken or harness.failures(record["rows"]))
