"""The operators under torch.vmap: what it maps over becomes a part of the batch.

The bits of a batch entry do not depend on the others, so they are those of calls one by one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def forward(
    info: Any, dims: Sequence[int | None], q: Tensor, k: Tensor, v: Tensor, *options: object
) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
    """The rule of `dash_flash_attn::forward`, for torch.library.register_vmap."""
    tensors = _into_batch(info.batch_size, dims, (q, k, v))
    results = torch.ops.dash_flash_attn.forward.default(*tensors, *options)
    return _out_of_batch(info.batch_size, results), (0, 0)


def backward(
    info: Any,
    dims: Sequence[int | None],
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    causal: bool,
    schedule: str,
    sm_margin: int,
    dlse: Tensor | None = None,
) -> tuple[tuple[Tensor, ...], tuple[int, int, int]]:
    """The rule of `dash_flash_attn::backward`, for torch.library.register_vmap."""
    tensors = _into_batch(info.batch_size, dims, (dout, q, k, v, out, lse))
    (dlse,) = _into_batch(info.batch_size, dims[10:] or (None,), (dlse,))
    results = torch.ops.dash_flash_attn.backward.default(
        *tensors, softmax_scale, causal, schedule, sm_margin, dlse
    )
    return _out_of_batch(info.batch_size, results), (0, 0, 0)


def _into_batch(
    size: int, dims: Sequence[int | None], tensors: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """(batch, ...) and, where dims says so, one dimension more of `size`: all (size * batch, ...)."""
    merged = []
    for x, dim in zip(tensors, dims, strict=False):
        if x is not None:
            x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            x = x.flatten(0, 1)
        merged.append(x)
    return merged


def _out_of_batch(size: int, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(x.view(size, x.shape[0] // size, *x.shape[1:]) for x in tensors)
