"""Both passes with results in tensors of the caller, and no node in autograd's graph.

The backward's kernels write in place where nobody watches a call. Where somebody does (a compiler, a
profiler, a tensor subclass: dispatch.py), a call is the operator and a copy, which a compiler fuses with what
comes next. An operator that writes would save the copy. But torch 2.13's compiler puts two calls that write
to one tensor into a wrong order with its readers: gradients would be wrong, without an error.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import ops
from .dispatch import unobserved


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, softmax_scale: float, causal: bool, sm_margin: int
) -> tuple[Tensor, Tensor]:
    """`dash_flash_attn::forward` without autocast, and out in the given tensor, unless that is None."""
    kind = "cuda" if q.is_cuda else "cpu"
    as_it_is = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
    with torch.no_grad(), as_it_is:
        result, lse = ops.attention(q, k, v, softmax_scale, causal, "auto", sm_margin)
        if out is None:
            return result, lse
        return out.copy_(result), lse


def backward(
    tensors: Sequence[Tensor],
    places: Sequence[Tensor | None],
    softmax_scale: float,
    causal: bool,
    schedule: str,
    sm_margin: int,
) -> None:
    """`dash_flash_attn::backward`, and its results in tensors that fit.

    Args:
        tensors: dout, q, k, v, out and lse.
        places: for dq, dk and dv; None for what is not wanted. float32 ones get sums that are not rounded.
        softmax_scale, causal, schedule, sm_margin: as the operator takes them.
    """
    given = [x for x in places if x is not None]
    rounded = all(x.dtype == tensors[1].dtype for x in given)
    # Where there are tangents the operator looks for them.
    direct = forward_ad._current_level < 0 and unobserved(*tensors, *given)
    softmax_scale, scale_factor = ops.split_scale(softmax_scale)
    options = softmax_scale, causal, schedule, sm_margin, None, scale_factor, rounded
    with torch.no_grad():
        if direct:
            results = ops.BACKWARD_KERNELS[tensors[0].device.type](*tensors, *options, into=places)
        else:
            results = ops.BACKWARD(*tensors, *options)
        for place, result in zip(places, results, strict=True):
            if place is None:
                continue
            if place is not result:
                place.copy_(result)
            elif not place.is_inference():
                # As copy_ does: autograd shall notice where this tensor was saved for a backward.
                torch.autograd.graph.increment_version(place)
