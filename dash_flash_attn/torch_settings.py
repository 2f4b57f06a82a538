"""Settings of torch that belong to the process, switched for one call; and memory that heeds none of them."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.utils import deterministic

# Autograd runs a thread for each device. A block of one setting may stand in a block of the other.
_switching = threading.RLock()
_UNCHANGED = contextlib.nullcontext()


@contextlib.contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """torch.use_deterministic_algorithms(enabled) for a block, and what was set before after it.

    With warn_only off, whatever it was: torch's FlashAttention-2 would warn and add with atomics.
    """
    with _switching:
        before = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(enabled)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warn_only)


def fills_memory() -> bool:
    """Whether torch fills new memory, as it does in deterministic mode unless it is told not to."""
    return torch.are_deterministic_algorithms_enabled() and deterministic.fill_uninitialized_memory


def unfilled_memory() -> AbstractContextManager[None]:
    """A block in which torch leaves new memory as it is: for its own kernels that write all of it.

    Meanwhile other threads' memory is not filled either. `uninitialized` needs no such block.
    """
    return _without_filling() if fills_memory() else _UNCHANGED


@contextlib.contextmanager
def _without_filling() -> Iterator[None]:
    with _switching:
        deterministic.fill_uninitialized_memory = False
        try:
            yield
        finally:
            deterministic.fill_uninitialized_memory = True


def uninitialized(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A contiguous tensor for somebody who writes all of it: torch.empty, but it is never filled.

    On CUDA `device` must be the current one.
    """
    if not fills_memory():
        return torch.empty(shape, dtype=dtype, device=device)
    numbers = torch.Size(shape).numel()
    storage = torch.UntypedStorage(numbers * dtype.itemsize, device=device)
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, torch.Size(shape))


def uninitialized_like(x: Tensor) -> Tensor:
    """`uninitialized` with x's shape, dtype and device.

    torch.empty_like takes half of torch.empty's time.
    """
    if fills_memory():
        return uninitialized(x.shape, x.dtype, x.device)
    return torch.empty_like(x, memory_format=torch.contiguous_format)
