"""The operators that write into tensors of the caller: `dash_flash_attn::forward_into`, `backward_into`.

They have no derivative, make no node for autograd, and cast nothing under torch.autocast.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import ops
from .checks import check_gradient_tensors, check_output, check_tensors, lse_dtype
from .dispatch import unobserved

_DEVICES = ("cpu", "cuda")


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_scale: float, causal: bool, sm_margin: int
) -> Tensor:
    """Writes the output of `dash_flash_attn::forward` into out, and returns the log-sum-exp."""
    if forward_ad._current_level >= 0:
        ops.refuse_tangents(q=q, k=k, v=v, out_=out)
    with torch.no_grad():
        if not unobserved(q, k, v, out):
            softmax_scale, scale_factor = ops.split_scale(softmax_scale)
            return _FORWARD_INTO(q, k, v, out, softmax_scale, causal, sm_margin, scale_factor)
        lse = _forward_into(q, k, v, out, softmax_scale, causal, sm_margin)
        _written(out)
        return lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    softmax_scale: float,
    causal: bool,
    schedule: str,
    sm_margin: int,
) -> None:
    """Writes the results of `dash_flash_attn::backward` into dq, dk and dv, as far as they are given."""
    tensors = dout, q, k, v, out, lse
    given = [x for x in (dq, dk, dv) if x is not None]
    if forward_ad._current_level >= 0:
        ops.refuse_tangents(dout=dout, q=q, k=k, v=v, out=out, softmax_lse=lse, dq=dq, dk=dk, dv=dv)
    options = causal, schedule, sm_margin
    with torch.no_grad():
        if not unobserved(*tensors, *given):
            softmax_scale, scale_factor = ops.split_scale(softmax_scale)
            _BACKWARD_INTO(*tensors, dq, dk, dv, softmax_scale, *options, scale_factor)
            return
        _backward_into(*tensors, dq, dk, dv, softmax_scale, *options)
        _written(*given)


def _written(*tensors: Tensor) -> None:
    """Autograd then notices where one of them was saved for a backward. torch's own way does so by itself."""
    for x in tensors:
        if not x.is_inference():
            torch.autograd.graph.increment_version(x)


def _forward_into(q, k, v, out, softmax_scale, causal, sm_margin, scale_factor=None):
    _check_forward(q, k, v, out)
    options = softmax_scale, causal, "auto", sm_margin, scale_factor
    result, lse = ops.FORWARD_KERNELS[q.device.type](q, k, v, *options)
    out.copy_(result)
    return lse


def _forward_fake(q, k, v, out, *options):
    _check_forward(q, k, v, out)
    batch, seqlen_q, heads_q, _ = q.shape
    return q.new_empty((batch, heads_q, seqlen_q), dtype=lse_dtype(q))


def _backward_into(
    dout, q, k, v, out, lse, dq, dk, dv, softmax_scale, causal, schedule, sm_margin, scale_factor=None
):
    _check_backward(dout, q, k, v, out, lse, dq, dk, dv)
    into = dq, dk, dv
    options = softmax_scale, causal, schedule, sm_margin, None, scale_factor, into
    results = ops.BACKWARD_KERNELS[q.device.type](dout, q, k, v, out, lse, *options)
    for given, result in zip(into, results, strict=True):
        if given is not None and given is not result:
            given.copy_(result)


def _backward_fake(dout, q, k, v, out, lse, dq, dk, dv, *options):
    _check_backward(dout, q, k, v, out, lse, dq, dk, dv)


def _check_forward(q, k, v, out):
    check_tensors(q, k, v)
    check_output("out_", out, q, (q.dtype,))


def _check_backward(dout, q, k, v, out, lse, dq, dk, dv):
    check_gradient_tensors(dout, q, k, v, out, lse, lse_name="softmax_lse")
    for name, x, like in (("dq", dq, q), ("dk", dk, k), ("dv", dv, v)):
        if x is not None:
            check_output(name, x, like, (q.dtype, lse_dtype(q)))


def _define(name, kernel, fake, mutates, schema):
    define = torch.library.custom_op
    operator = define(
        f"dash_flash_attn::{name}", kernel, mutates_args=mutates, device_types=_DEVICES, schema=schema
    )
    operator.register_fake(fake)
    return getattr(torch.ops.dash_flash_attn, name).default


_FORWARD_INTO = _define(
    "forward_into", _forward_into, _forward_fake, ("out_",),
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) out_, float softmax_scale, bool causal, int sm_margin, "
    "Tensor? scale_factor=None) -> Tensor",
)  # fmt: skip
_BACKWARD_INTO = _define(
    "backward_into", _backward_into, _backward_fake, ("dq", "dk", "dv"),
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!)? dq, "
    "Tensor(b!)? dk, Tensor(c!)? dv, float softmax_scale, bool causal, str schedule, int sm_margin, "
    "Tensor? scale_factor=None) -> ()",
)  # fmt: skip
