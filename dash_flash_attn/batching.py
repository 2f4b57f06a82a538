"""The operators under torch.vmap: what it maps over becomes a part of the batch.

The bits of a batch entry do not depend on the others, so they are those of calls one by one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_TENSORS = 3  # forward's, before its options
_GRADIENT_TENSORS = 6  # the same of backward
_DLSE = 10


def forward(
    info: Any, dims: Sequence[int | None], *arguments: Any
) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
    """The rule of `dash_flash_attn::forward`, for torch.library.register_vmap."""
    merged = _into_batch(info.batch_size, dims, arguments, range(_TENSORS))
    results = torch.ops.dash_flash_attn.forward.default(*merged)
    return _out_of_batch(info.batch_size, results), (0, 0)


def backward(
    info: Any, dims: Sequence[int | None], *arguments: Any
) -> tuple[tuple[Tensor, ...], tuple[int, int, int]]:
    """The rule of `dash_flash_attn::backward`, for torch.library.register_vmap."""
    merged = _into_batch(info.batch_size, dims, arguments, (*range(_GRADIENT_TENSORS), _DLSE))
    results = torch.ops.dash_flash_attn.backward.default(*merged)
    return _out_of_batch(info.batch_size, results), (0, 0, 0)


def _into_batch(
    size: int, dims: Sequence[int | None], arguments: Sequence[Any], batched: Sequence[int]
) -> list[Any]:
    """The arguments with the tensors at `batched`, (batch, ...) and perhaps a dimension more, as (size * batch, ...)."""
    merged = list(arguments)
    for place, (x, dim) in enumerate(zip(arguments, dims, strict=True)):
        if place in batched and x is not None:
            x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            merged[place] = x.flatten(0, 1)
        elif dim is not None:
            raise NotImplementedError("scale_factor: it must be the same for all that vmap maps over")
    return merged


def _out_of_batch(size: int, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(x.view(size, x.shape[0] // size, *x.shape[1:]) for x in tensors)
