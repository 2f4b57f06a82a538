"""Finds the kernel library, and says whether a GPU can run it.

The environment variable DASH_STRICT=1 makes it an error where a GPU cannot, instead of a warning.
"""

import atexit
import functools
import os
import sys
import warnings
from pathlib import Path

import torch

from . import _native

LIBRARY = Path(__file__).parent / "lib" / "libdash_kernels.so"
CAPABILITY = (9, 0)

FALLBACK_COSTS = "2.0 to 3.8 times as long"
"""The backward of FlashAttention-2 on an H200, measured on the paper's 24 shapes."""


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


@functools.cache
def falls_back(device: int) -> bool:
    """Whether torch's FlashAttention-2 takes the kernels' place on the CUDA device of this index.

    The first time a warning says so. RuntimeError instead, each time, where DASH_STRICT=1.
    """
    reason = unusable(device)
    if reason is None:
        return False
    if os.environ.get("DASH_STRICT") == "1":
        raise RuntimeError(f"dash_flash_attn: {reason}, and DASH_STRICT=1 refuses to run without the kernels")
    takes = ""
    if torch.cuda.get_device_capability(device) == CAPABILITY:
        name = torch.cuda.get_device_name(device)
        takes = (
            f". EVERY BACKWARD TAKES {FALLBACK_COSTS.upper()} on this {name}, which could run the kernels. "
            "Install where nvcc is: with DASH_REQUIRE_CUDA=1 a build fails without it. DASH_STRICT=1 makes "
            "this warning an error"
        )
    warnings.warn(
        f"dash_flash_attn: {reason}; the backward is torch's FlashAttention-2, where schedule and sm_margin "
        f"have no meaning{takes}",
        stacklevel=2,
    )
    return True
