"""What every measurement shares: records, progress, clocks, the memory gauge, going on after a failure."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

import dash_flash_attn
from dash_flash_attn import info, kernels
from dash_flash_attn.lab.clocks import ROUNDS, Clock, Run, turns

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

MATMUL = "matmul"
"""What all times are compared with: an 8192 x 8192 x 8192 product, timed in the same rounds."""
MATMUL_SIZE = 8192

Row = dict[str, Any]
Cell = TypeVar("Cell")


# Times.


def interleaved(
    runs: Mapping[str, Run], clock: Clock, rounds: int = ROUNDS, seed: str = ""
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Times calls in `turns`, whose order is that of `seed`.

    Returns:
        The milliseconds of each call in each round, and the errors of those that failed, which leave the
        rounds then.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    errors: dict[str, str] = {}
    for name in turns(list(runs), rounds, seed):
        if name in errors:
            continue
        try:
            times[name].append(clock(runs[name]))
        except Exception as error:
            errors[name] = one_line(error)
            del times[name]
            check_gpu()
    return times, errors


@functools.cache
def matmul() -> Run:
    """A product of two normal bfloat16 matrices of MATMUL_SIZE."""
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return lambda: a @ b


def matmul_tflops(ms: float) -> float:
    """TFLOP/s of the product that takes so long."""
    return 2 * MATMUL_SIZE**3 / ms / 1e9


def extra_bytes(run: Callable[[], Iterable[torch.Tensor]]) -> int:
    """The most memory that a call holds beside what was there before and what it returns."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = list(run())
    torch.cuda.synchronize()
    returned = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in results}
    return torch.cuda.max_memory_allocated() - before - sum(returned.values())


# Failures.


class GpuLost(RuntimeError):
    """A kernel has failed in a way after which this process can run none."""


def check_gpu() -> None:
    """Raises GpuLost if nothing more can run on the GPU; frees what a failed call has left in the cache."""
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise GpuLost(one_line(error)) from error
    torch.cuda.empty_cache()


def one_line(error: BaseException) -> str:
    """An exception's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def require_kernels() -> None:
    """Ends the program where our kernels cannot run: it would measure torch's fallback."""
    reason = info.unusable() or kernels.unusable(torch.cuda.current_device())
    if reason:
        raise SystemExit(f"benchmarks: {reason}")


# Progress.


def progress(cells: Sequence[Cell], name: Callable[[Cell], str] = str) -> Iterator[Cell]:
    """The cells; before each a line that says which one it is, and about how long the rest takes."""
    start = time.monotonic()
    for done, cell in enumerate(cells):
        passed = time.monotonic() - start
        left = f", about {_clock_face(passed / done * (len(cells) - done))} left" if done else ""
        print(f"[{done + 1}/{len(cells)}] {_clock_face(passed)}{left}: {name(cell)}", flush=True)
        yield cell


def _clock_face(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


# Records.


def environment() -> dict[str, Any]:
    """The GPU, the versions and the commit that a result belongs to; None where one cannot be told."""
    gpu = torch.cuda.is_available()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if gpu else None,
        "sms": torch.cuda.get_device_properties().multi_processor_count if gpu else None,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "dash_flash_attn": dash_flash_attn.__version__,
        "python": platform.python_version(),
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "uncommitted_changes": bool(_output("git", "-C", str(ROOT), "status", "--porcelain")),
    }


def _output(*command: str) -> str | None:
    """What a command prints, None where it fails or is not there."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Writes a record, with its folder if needed; rows one a line, so that two records can be compared."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dumps(record) + "\n")


def dumps(value: Any, indent: str = "") -> str:
    """JSON in which a list's elements, and what is deeper than that, take one line each."""
    deeper = indent + " "
    if isinstance(value, Mapping) and value:
        parts = [f"{deeper}{json.dumps(str(key))}: {dumps(item, deeper)}" for key, item in value.items()]
    elif isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
        parts = [deeper + json.dumps(item) for item in value]
        return "[\n" + ",\n".join(parts) + f"\n{indent}]"
    else:
        return json.dumps(value)
    return "{\n" + ",\n".join(parts) + f"\n{indent}}}"


def read_json(path: Path) -> dict[str, Any]:
    """A record. Raises ValueError for a file that is none; OSError."""
    try:
        record = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no record ({error})") from None
    if not isinstance(record, dict):
        raise ValueError(f"{path} is no record")
    return record


def load_module(path: Path) -> ModuleType:
    """The module in the file `path`. Raises OSError where it cannot be read."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Commands.


def parser(command: str, description: str | None) -> argparse.ArgumentParser:
    """A command line with what all measurements have: --quick and --out."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--quick", action="store_true", help="fewer cells: less than two minutes of GPU time")
    made.add_argument(
        "--out", type=Path, help=f"record (benchmarks/results/{command}.json, or {command}_quick.json)"
    )
    return made


def record_path(command: str, options: argparse.Namespace) -> Path:
    """Where a measurement's record goes. The quick form leaves the full form's record alone."""
    return options.out or RESULTS / (f"{command}_quick.json" if options.quick else f"{command}.json")


def measure(
    command: str,
    options: argparse.Namespace,
    cells: Sequence[Cell],
    measure_cell: Callable[[Cell], list[Row]],
    *,
    describe: Callable[[Cell], Row],
    name: Callable[[Cell], str] = str,
    show: Callable[[Row], str],
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Measures cell after cell, printing rows as they come and writing the record after each.

    Args:
        command: the record's kind, and the name of its file.
        options: of `parser`.
        cells: what to measure.
        measure_cell: the rows of a cell. If it raises, the cell has one row, with the error, and the next
            one follows; after GpuLost every later cell gets such a row.
        describe: the columns of a cell's row where that row is an error.
        name: a cell as the progress shows it.
        show: a row as a line.
        settings: more for the record.
    """
    path = record_path(command, options)
    start = time.monotonic()
    record: dict[str, Any] = {
        "kind": command,
        "form": "quick" if options.quick else "full",
        "environment": environment(),
        **(settings or {}),
        "seconds": 0.0,
        "rows": [],
    }
    lost = None
    for cell in progress(cells, name):
        try:
            if lost:
                raise GpuLost(f"not run, since the GPU failed before: {lost}")
            rows = measure_cell(cell)
        except Exception as error:
            rows = [{**describe(cell), "error": one_line(error)}]
            if lost is None:
                try:
                    check_gpu()
                except GpuLost as gone:
                    lost = str(gone)
        for row in rows:
            print("  " + (f"FAILED {row_name(row)}: {row['error']}" if "error" in row else show(row)))
        record["rows"] += rows
        # Written as they come: a run that is cut off leaves what it has measured.
        record["seconds"] = round(time.monotonic() - start, 1)
        write_json(path, record)
    failed = failures(record["rows"])
    print(f"{len(record['rows'])} rows, {len(failed)} failed, {record['seconds']:.0f} s; written to {path}")
    return record


def run(
    command: str,
    options: argparse.Namespace,
    cells: Sequence[Cell],
    measure_cell: Callable[[Cell], list[Row]],
    tables: Callable[[list[Row]], Iterable[Any]],
    **columns: Any,
) -> int:
    """A command from its options to its exit status: `measure`, and the tables of its rows.

    Args:
        command, options, cells, measure_cell, columns: see `measure`.
        tables: of all rows; each has `markdown()`.

    Returns 1 if a row failed. Ends the program where our kernels cannot run.
    """
    require_kernels()
    rows = measure(command, options, cells, measure_cell, **columns)["rows"]
    for table in tables(rows):
        print("\n" + table.markdown())
    return int(bool(failures(rows)))


def row_name(row: Row) -> str:
    """The columns that say what a row is about."""
    return " ".join(str(row[key]) for key in ("cell", "model", "system") if key in row)


def failures(rows: Iterable[Row]) -> list[Row]:
    """The rows of cells that could not be measured."""
    return [row for row in rows if "error" in row]
