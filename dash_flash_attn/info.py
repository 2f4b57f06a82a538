"""`python -m dash_flash_attn info`: versions, the GPUs, and whether the kernels can run on them."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterator, Sequence

import torch

from . import kernels
from ._version import __version__


def built_with() -> str | None:
    """The nvcc that the kernels were compiled with ("nvcc 13.0.88"), or None where there are none."""
    report = kernels.LIBRARY.with_name("ptxas_report.txt")
    if not (kernels.LIBRARY.exists() and report.exists()):
        return None
    with report.open() as lines:
        return lines.readline().strip()


def unusable() -> str | None:
    """Why the kernels can run on no GPU of this machine, or None where they can."""
    if reason := kernels.not_loaded():
        return reason
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    reasons = [kernels.unusable(device) for device in range(torch.cuda.device_count())]
    return None if None in reasons else reasons[0]


def facts() -> Iterator[tuple[str, str]]:
    """(what, value) pairs, in the order in which they are printed."""
    yield "dash_flash_attn", __version__
    yield "Python", platform.python_version()
    yield "torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    yield "kernels built with", built_with() or "not built"
    for device in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(device)
        yield (
            f"GPU {device}",
            f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {gpu.multi_processor_count} SMs, "
            f"{kernels.unusable(device) or 'usable'}",
        )
    reason = unusable()
    yield "kernels usable", "yes" if reason is None else f"no: {reason}"


def main(argv: Sequence[str]) -> int:
    """Prints the facts. The arguments are the command line's after `info`."""
    parser = argparse.ArgumentParser(prog="python -m dash_flash_attn info", description=__doc__)
    parser.parse_args(argv)
    for what, value in facts():
        print(f"{what:<20}{value}")
    return 0
