"""The operators under torch.vmap: what it maps over becomes a part of the batch.

The bits of a batch entry do not depend on the others, so they are those of calls one by one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def forward(
    info: Any, dims: Sequence[int | None], *arguments: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The rule of `dash_flash_attn::forward`, for torch.library.register_vmap."""
    return _with_larger_batch(torch.ops.dash_flash_attn.forward.default, info.batch_size, dims, arguments)


def backward(
    info: Any, dims: Sequence[int | None], *arguments: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The rule of `dash_flash_attn::backward`, for torch.library.register_vmap."""
    return _with_larger_batch(torch.ops.dash_flash_attn.backward.default, info.batch_size, dims, arguments)


def _with_larger_batch(
    operator: Callable[..., tuple[Tensor, ...]],
    size: int,
    dims: Sequence[int | None],
    arguments: Sequence[Any],
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Calls with tensors (size, batch, ...) as (size * batch, ...), and takes the results apart again.

    Args:
        operator: the operator.
        size: what is mapped over.
        dims: for each argument, which of its dimensions that is, None where it has none.
        arguments: the operator's.
    """
    merged = list(arguments)
    batch = 0
    for place, (x, dim) in enumerate(zip(arguments, dims, strict=True)):
        if not isinstance(x, Tensor):
            continue
        if x.dim() - (dim is not None) < 3:
            if dim is not None:
                raise NotImplementedError("scale_factor: it must be the same for all that vmap maps over")
            continue
        x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        batch = x.shape[1]
        merged[place] = x.flatten(0, 1)
    results = operator(*merged)
    return tuple(x.view(size, batch, *x.shape[1:]) for x in results), (0,) * len(results)
