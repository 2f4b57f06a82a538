"""What every measurement here shares: the clock, the memory gauge, and the record of where it was taken."""

import importlib.util
import json
import platform
import subprocess
from collections.abc import Callable
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import dash_flash_attn
from dash_flash_attn.lab.calibrate import median_ms

ROOT = Path(__file__).resolve().parent.parent


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


def matmul_tflops(n: int = 8192) -> float:
    """What the GPU reaches right now in an n x n x n product of normal bfloat16 matrices."""
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * n**3 / median_ms(lambda: a @ b) / 1e9


def extra_bytes(run: Callable[[], tuple[torch.Tensor, ...]]) -> int:
    """The most memory that a call holds beside what was there before and what it returns."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - sum(x.untyped_storage().nbytes() for x in results)


def load_module(path: Path) -> ModuleType:
    """The module in the file `path`."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Writes a result, with its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
