"""Settings of a test; and a record of a run: where DASH_GPU_RECORD names a file, what passed goes there."""

import collections
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dash_flash_attn import kernels

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


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a GPU that cannot run them. The first call warns."""
    monkeypatch.setattr(kernels, "unusable", lambda device: "this test says so")
    kernels.falls_back.cache_clear()
    yield
    kernels.falls_back.cache_clear()


@pytest.fixture
def deterministic_mode() -> Iterator[None]:
    """torch.use_deterministic_algorithms(True) for a test, which may set warn_only."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["kernels", "fallback"])
def gpu(request: pytest.FixtureRequest) -> None:
    """A GPU with the kernels, and one without them."""
    if request.param == "fallback":
        request.getfixturevalue("without_kernels")
        with pytest.warns(UserWarning, match="this test says so"):
            kernels.falls_back(torch.cuda.current_device())
