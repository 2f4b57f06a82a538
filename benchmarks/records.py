"""The committed records: finding them, and what they say over time."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from . import harness
from .tables import by_cell

SWEEPS = ("backward", "backward_fa2", "small_jobs")
"""Kinds of records whose rows are shapes and systems. FlashAttention-2, which takes two to four times as long
as ours, has a sweep of its own."""

KINDS = (
    *SWEEPS, "lengths", "blocks", "reproducibility", "accuracy", "memory", "call_cost", "bits", "gpu_tests",
)  # fmt: skip
"""What there may be a record of: in a file of that name, or that of the quick form, with `_quick` behind."""


def command(kind: str) -> str:
    """What makes a record of this kind."""
    arguments = kind
    if kind == "backward_fa2":
        out = (harness.RESULTS / f"{kind}.json").relative_to(harness.ROOT)
        arguments = f"backward --schedules auto --peers fa2 --out {out}"
    if kind == "lengths":  # its targets are about others
        arguments = "lengths --peers fa3,fa4 --peers-path FILE"
    return f"python -m benchmarks {arguments}"


def committed(folder: Path = harness.RESULTS) -> dict[str, dict[str, Any]]:
    """A record of each kind that there is one of; the quick form's only where the full form's is missing.

    Raises ValueError for a file that is no record.
    """
    found = {}
    for kind in KINDS:
        for name in (kind, f"{kind}_quick"):
            path = folder / f"{name}.json"
            if path.exists():
                found[kind] = harness.read_json(path)
                break
    return found


def history(folder: Path = harness.RESULTS) -> list[dict[str, Any]]:
    """The records of the paper's shapes, the committed sweep and all accepted nights, by date.

    A point has "date", "commit", "device" and "ratios": for each mask and head dimension the
    geometric mean of auto's ratio to the matmul over the cells of the quick sweep, which all records have.
    """
    sweeps = [harness.read_json(path)["backward"] for path in sorted(folder.glob("nightly/*.json"))]
    if (folder / "backward.json").exists():
        sweeps.append(harness.read_json(folder / "backward.json"))
    points = [p for p in map(point, sweeps) if p["ratios"]]
    return sorted(points, key=lambda p: p["date"])


def point(record: dict[str, Any]) -> dict[str, Any]:
    """One record's point in `history`."""
    groups: dict[str, list[float]] = {}
    for (head_dim, causal, seqlen, *_), systems in by_cell(record["rows"]).items():
        if "auto" in systems and seqlen in (1024, 16384):
            name = f"d {head_dim}, {'causal' if causal else 'full'}"
            groups.setdefault(name, []).append(systems["auto"]["ratio_to_matmul"])
    environment = record["environment"]
    return {
        "date": environment["date"],
        "commit": environment["commit"],
        "device": environment["device"],
        "ratios": {name: statistics.geometric_mean(values) for name, values in groups.items()},
    }
