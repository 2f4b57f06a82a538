"""Keeps a record of a run: where DASH_GPU_RECORD names a file, what passed on which machine goes there."""

import collections
import os
import time
from pathlib import Path

import pytest

_started = time.monotonic()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Writes the record."""
    path = os.environ.get("DASH_GPU_RECORD")
    if not path:
        return
    from benchmarks.harness import environment, write_json

    stats = session.config.pluginmanager.get_plugin("terminalreporter").stats
    counts = {outcome: len(stats.get(outcome, ())) for outcome in ("passed", "failed", "skipped", "error")}
    passed = collections.Counter(report.nodeid.split("::")[0] for report in stats.get("passed", ()))
    record = {
        "environment": environment(),
        "seconds": round(time.monotonic() - _started, 1),
        "exit_status": int(exitstatus),
        **counts,
        "passed_by_file": dict(sorted(passed.items())),
        "skipped_why": {report.nodeid: str(report.longrepr[2]) for report in stats.get("skipped", ())},
        "failed_tests": [report.nodeid for kind in ("failed", "error") for report in stats.get(kind, ())],
    }
    write_json(Path(path), record)
