"""Whether a night's record is as good as the last accepted one: speed, bits, tests and soak."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import bits, harness
from .tables import OURS, Rows, by_cell, cell_of, cell_words, good

LIMIT = 0.03
"""How much of the ratio to the matmul a cell may lose."""

SWEEPS = {"backward": "quick sweep", "lengths": "lengths"}
"""The parts of a night's record that are compared by speed, and what they are called."""

HISTORY = harness.RESULTS / "nightly"
"""The accepted records, one file each; their names sort by date."""


@dataclass(frozen=True)
class Slower:
    """A cell that has lost more than the limit; ratios to the matmul."""

    cell: str
    system: str
    before: float
    now: float

    def __str__(self) -> str:
        lost = 1 - self.now / self.before
        ratios = f"{self.before:.3f} of the matmul, now {self.now:.3f}"
        return f"{self.cell}, {self.system}: {lost:.1%} slower ({ratios})"


@dataclass
class Verdict:
    """What a comparison came to. It passed if there are no problems.

    Args:
        problems: what is wrong, by kind: "tests", "soak", "cells" (not measured), "slower", "bits",
            "baseline" (nothing accepted to compare with).
        notes: what else should be known.
        accepted: the file that speed was compared with.
    """

    problems: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    accepted: str | None = None

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not any(self.problems.values())

    def add(self, kind: str, *problems: object) -> None:
        """Something is wrong."""
        if problems:
            self.problems.setdefault(kind, []).extend(map(str, problems))

    def lines(self) -> list[str]:
        """All of it, one line each, the verdict first."""
        return [
            "PASSED" if self.passed else "FAILED",
            *(f"{kind}: {problem}" for kind, problems in self.problems.items() for problem in problems),
            *(f"note: {note}" for note in self.notes),
        ]

    def as_json(self) -> dict[str, Any]:
        """For a record."""
        return {"passed": self.passed, **asdict(self)}


def slower(accepted: Rows, rows: Rows, limit: float = LIMIT) -> list[Slower]:
    """The cells of our systems whose ratio to the matmul fell by more than `limit` of itself."""
    now = by_cell(rows)
    return [
        Slower(cell_words(cell), name, row["ratio_to_matmul"], now[cell][name]["ratio_to_matmul"])
        for cell, systems in by_cell(accepted).items()
        for name, row in systems.items()
        if name in OURS
        and name in now.get(cell, {})
        and now[cell][name]["ratio_to_matmul"] < (1 - limit) * row["ratio_to_matmul"]
    ]


def missing(accepted: Rows, rows: Rows) -> list[str]:
    """The cells of our systems that were measured before, and now are not even failures."""
    there = {(cell_of(row), row.get("system")) for row in rows}
    measured = by_cell(rows)  # where "auto" may stand for a schedule
    return [
        f"{cell_words(cell)}, {name}: not measured"
        for cell, systems in by_cell(accepted).items()
        for name in systems
        if name in OURS and name not in measured.get(cell, {}) and not {(cell, name), (cell, None)} & there
    ]


def slower_cells(accepted: Rows, rows: Rows, limit: float = LIMIT) -> list[str]:
    """The names of the cells in which a system is slower, as `backward --cells` takes them."""
    words = {finding.cell for finding in slower(accepted, rows, limit)}
    return list(dict.fromkeys(row["cell"] for row in good(rows) if cell_words(cell_of(row)) in words))


def last_accepted(device: str | None, folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest accepted record of the same GPU model: a ratio to the matmul is another on another GPU."""
    for path in sorted(folder.glob("*.json"), reverse=True):
        record = harness.read_json(path)
        if record["environment"]["device"] == device:
            return path, record
    return None


def accepted_rows(record: dict[str, Any], kind: str) -> Rows:
    """An accepted record's rows of one of SWEEPS; none where it is older than that sweep."""
    return record[kind]["rows"] if record.get(kind) else []


def judge(
    record: dict[str, Any],
    accepted: tuple[Path, dict[str, Any]] | None,
    accepted_bits: dict[str, Any] | None,
    limit: float = LIMIT,
) -> Verdict:
    """The verdict on a night's record.

    Args:
        record: with "tests", those of SWEEPS, "bits" and "soak": records, or None for a step that left none.
        accepted: the record to compare with, and where it is.
        accepted_bits: the accepted record of `bits`.
        limit: see LIMIT.
    """
    verdict = Verdict()
    tests, found, soak = (record.get(key) for key in ("tests", "bits", "soak"))
    if tests is None:
        verdict.add("tests", "the GPU tests left no record")
    elif tests["exit_status"] or not tests["passed"]:
        failed = tests["failed_tests"] or [f"exit status {tests['exit_status']}, {tests['passed']} passed"]
        verdict.add("tests", *failed)
    if soak is None:
        verdict.add("soak", "it left no record")
    else:
        verdict.add("soak", *(f"{'; '.join(f['problems'])}: {f['command']}" for f in soak["failed"]))
        if not soak["cases"]:
            verdict.add("soak", "no case ran")
    if accepted is None:
        verdict.add("baseline", f"no accepted times of {record['environment']['device']}")
    else:
        verdict.accepted = accepted[0].name
    for kind, name in SWEEPS.items():
        sweep = record.get(kind)
        if sweep is None:
            verdict.add("cells", f"the {name} left no record")
            continue
        ours = [row for row in harness.failures(sweep["rows"]) if row.get("system", "auto") in OURS]
        verdict.add("cells", *(f"{harness.row_name(row)}: {row['error']}" for row in ours))
        if accepted is None:
            continue
        if rows := accepted_rows(accepted[1], kind):
            verdict.add("slower", *slower(rows, sweep["rows"], limit))
            verdict.add("cells", *missing(rows, sweep["rows"]))
        else:
            verdict.notes.append(f"the cells of the {name} are new: {accepted[0].name} has none")
    if found is None:
        verdict.add("bits", "no hashes were computed")
    elif accepted_bits is None:
        verdict.add("baseline", "no accepted bits")
    else:
        verdict.add("bits", *bits.compare(accepted_bits, found))
        new = [name for name in found["cases"] if name not in accepted_bits["cases"]]
        verdict.notes += [f"bits of {name} are new" for name in new]
    if record["environment"].get("uncommitted_changes"):
        verdict.notes.append("the working tree has uncommitted changes")
    return verdict
