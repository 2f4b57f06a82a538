"""The nightly run: GPU tests, quick sweeps, the bits and the soak, compared with the last accepted record.

There are two sweeps: the paper's shapes (`backward`) and a few others (`lengths`).

Exits with 1, and says why, if a test or a soak case failed, a cell lost more than 3 % of its ratio to the
matmul, a bit differs, or there is nothing accepted to compare with. A slower cell is measured again, three
times as long, before it counts. Leaves record.json and report.html.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dash_flash_attn.lab import clocks

from . import bits, compare, harness, report

FOLDER = harness.ROOT / "nightly"
ROUNDS_AGAIN = 3 * clocks.ROUNDS


def step(
    title: str, out: Path, *arguments: str, environment: dict[str, str] | None = None
) -> dict[str, Any] | None:
    """Runs Python with arguments in the project's folder; the record that it writes to `out`, None if none.

    Each step is a process of its own: a kernel that fails takes the GPU from its process only.
    """
    print(f"\n== {title}", flush=True)
    out.unlink(missing_ok=True)
    start = time.monotonic()
    status = subprocess.run(
        [sys.executable, *arguments], cwd=harness.ROOT, env={**os.environ, **(environment or {})}
    ).returncode  # fmt: skip
    print(f"== {title}: exit status {status}, {time.monotonic() - start:.0f} s", flush=True)
    return harness.read_json(out) if out.exists() else None


def quick_sweep(title: str, kind: str, out: Path, rounds: int, *more: str) -> dict[str, Any] | None:
    """The quick form of one of `compare.SWEEPS`, as a step."""
    arguments = ("-m", "benchmarks", kind, "--quick", "--rounds", str(rounds), *more, "--out", str(out))
    return step(title, out, *arguments)


def measured_again(
    kind: str, sweep: dict[str, Any], accepted: dict[str, Any], folder: Path
) -> dict[str, Any]:
    """The sweep, with the rows of its slower cells from a longer measurement."""
    names = compare.slower_cells(compare.accepted_rows(accepted, kind), sweep["rows"])
    if not names:
        return sweep
    again = quick_sweep(
        f"{len(names)} cells again", kind, folder / f"{kind}_again.json", ROUNDS_AGAIN,
        "--cells", ",".join(names),
    )  # fmt: skip
    if again is None:
        return sweep
    return {**sweep, "rows": merged(sweep["rows"], again["rows"]), "measured_again": names}


def merged(rows: Sequence[harness.Row], again: Sequence[harness.Row]) -> list[harness.Row]:
    """The rows, of which those that were measured again are replaced; a failure replaces nothing."""
    newer = {(row["cell"], row["system"]): row for row in again if "error" not in row}
    return [newer.get((row["cell"], row.get("system")), row) for row in rows]


def main(argv: Sequence[str]) -> int:
    """Runs everything, and prints the verdict."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks nightly", description=__doc__)
    parser.add_argument("--soak-seconds", type=float, default=60, help="of the soak (60)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where results go (nightly/)")
    options = parser.parse_args(argv)
    harness.require_kernels()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()

    def out(name: str) -> Path:
        return folder / f"{name}.json"

    environment = harness.environment()
    accepted = compare.last_accepted(environment["device"], compare.HISTORY)
    record: dict[str, Any] = {"kind": "nightly", "environment": environment}
    record["tests"] = step(
        "GPU tests", out("tests"), "-m", "pytest", "-q", "-m", "gpu",
        environment={"DASH_GPU_RECORD": str(out("tests"))},
    )  # fmt: skip
    for kind, title in compare.SWEEPS.items():
        sweep = quick_sweep(title, kind, out(kind), clocks.ROUNDS)
        record[kind] = measured_again(kind, sweep, accepted[1], folder) if sweep and accepted else sweep
    record["bits"] = step("bits", out("bits"), "-m", "benchmarks", "bits", "--out", str(out("bits")))
    record["soak"] = step(
        "soak", out("soak"), "-m", "benchmarks", "soak", "--seconds", str(options.soak_seconds),
        "--out", str(out("soak")),
    )  # fmt: skip
    record["seconds"] = round(time.monotonic() - start, 1)
    known = harness.read_json(bits.ACCEPTED) if bits.ACCEPTED.exists() else None
    verdict = compare.judge(record, accepted, known)
    record["verdict"] = verdict.as_json()
    harness.write_json(out("record"), record)
    report.write(folder / "report.html", record)
    print(f"\n{out('record')}, {folder / 'report.html'}; {record['seconds']:.0f} s")
    print("\n".join(verdict.lines()))
    if not verdict.passed and not set(verdict.problems) - {"slower", "bits", "baseline"}:
        print("If that is meant: python -m benchmarks accept --because '...'")
    return 0 if verdict.passed else 1
