"""Finds the kernel library, and says whether a GPU can run it."""

import atexit
import functools
import sys
from pathlib import Path

import torch

from . import _native

LIBRARY = Path(__file__).parent / "lib" / "libdash_kernels.so"
CAPABILITY = (9, 0)


@functools.cache
def not_loaded() -> str | None:
    """Loads the kernel library. None if that worked, else why not."""
    if not LIBRARY.exists():
        return "the package was built without its kernels"
    try:
        _native.load_kernels(str(LIBRARY))
    except RuntimeError as error:
        return f"the kernel library cannot be loaded ({error})"
    atexit.register(_last_words)
    return None


def _last_words() -> None:
    """Says which wait never ended: all that CUDA's own error tells by then is that a kernel failed."""
    if torch.cuda.is_initialized() and (report := _native.stuck_report()):
        print(report, file=sys.stderr)


@functools.cache
def unusable(device: int) -> str | None:
    """Why the kernels cannot run on the CUDA device of this index, or None where they can."""
    capability = torch.cuda.get_device_capability(device)
    if capability != CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"{name} has compute capability {capability[0]}.{capability[1]}, the kernels are for 9.0"
    return not_loaded()
