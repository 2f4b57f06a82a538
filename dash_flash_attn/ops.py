"""The two operators that torch sees, `dash_flash_attn::forward` and `dash_flash_attn::backward`.

Both have a CPU implementation (reference.py), one for CUDA, a fake for tracing and an autograd formula.
Calling them directly is the same as calling the public functions, less the checks of options.
"""

import functools

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _native, kernels, reference
from .checks import check_gradient_tensors, check_tensors, lse_dtype
from .forward import attention_forward
from .layout import addressable, matrix
from .torch_settings import deterministic_algorithms, unfilled_memory, uninitialized, uninitialized_like

# A CTA that waits this long for its turn ends the kernel with an error instead of hanging the job.
WAIT_LIMIT_NS = 10_000_000_000

_ELEMENT = {torch.bfloat16: "bf16", torch.float16: "fp16"}

# A block in which an operator's call goes past its autograd kernel, to a tracer or the device's kernel.
_below_autograd = torch._C._AutoDispatchBelowAutograd
_PLAIN = (Tensor, torch.nn.Parameter)

_library = torch.library.Library("dash_flash_attn", "DEF")
# The last three arguments of forward matter to its gradient only.
_library.define(
    "forward(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal, str schedule='auto', "
    "bool deterministic=True, int sm_margin=0) -> (Tensor out, Tensor lse)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float softmax_scale, "
    "bool causal, str schedule, bool deterministic, int sm_margin) -> (Tensor dq, Tensor dk, Tensor dv)",
    tags=torch.Tag.pt2_compliant_tag,
)
_FORWARD = torch.ops.dash_flash_attn.forward.default
_BACKWARD = torch.ops.dash_flash_attn.backward.default


@functools.lru_cache  # every call of an operator asks
def auto_schedule(
    seqlen_q: int, seqlen_k: int, heads_q: int, heads_k: int, head_dim: int, causal: bool
) -> str:
    """The schedule behind "auto".

    A function of the shape of one batch entry, since the bits depend on it.
    """
    groups = heads_q > heads_k
    grid = _native.call_grid(seqlen_q, seqlen_k, heads_q, heads_k, head_dim, causal)
    if not causal:
        return "shift"
    # Chains that wait in line are near each other's query tiles, which then stay in the L2 cache, in all
    # heads of a group. But the last one starts late, by a reduction for each before it: there must be enough
    # to do after that.
    if groups and head_dim == 128 and seqlen_q > 16384 and heads_q * grid.q_tiles() >= 8192:
        return "descending"
    # Half of the KV tiles are more than one cycle of symmetric_shift (docs/lab.md, "Above 128 KV tiles").
    if seqlen_k > 16384:
        return "shift"
    if seqlen_q != seqlen_k:
        return "symmetric_shift"
    # In a square, heads of a pair that go opposite ways never wait, and do not mind how many they are.
    if _native.policy("shift", grid).ways == 2:
        return "shift"
    # At head dimension 64 chains of shift are one query tile apart, in which groups lose less.
    if head_dim == 64:
        return "symmetric_shift" if seqlen_k > 1024 and not groups else "shift"
    # Where the first chains of some heads fill the SMs, symmetric_shift keeps the best in step, with the
    # least in use at a time. All parts of a group then end at once, and must not be too many for that.
    in_line = _native.SymmetricShift.waits_in_line
    parts = _native.part_sizes(heads_q, heads_k, grid, head_dim, in_line)
    steps = max(parts) * grid.q_tiles()
    fills = _native.SymmetricShift(grid).fills() and 8 * len(parts) <= steps
    return "symmetric_shift" if fills else "shift"


def _empty_forward(q: Tensor) -> tuple[Tensor, Tensor]:
    """No query, or no key to see."""
    batch, seqlen_q, heads_q, _ = q.shape
    lse = q.new_full((batch, heads_q, seqlen_q), -torch.inf, dtype=lse_dtype(q))
    return q.new_zeros(q.shape), lse


def _zero_gradients(*inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.new_zeros(x.shape) for x in inputs)


def _forward_cpu(q, k, v, softmax_scale, causal, schedule="auto", deterministic=True, sm_margin=0):
    check_tensors(q, k, v)
    if q.numel() == 0 or k.numel() == 0:
        return _empty_forward(q)
    return reference.forward(q, k, v, softmax_scale, causal)


def _forward_cuda(q, k, v, softmax_scale, causal, schedule="auto", deterministic=True, sm_margin=0):
    check_tensors(q, k, v)
    if q.numel() == 0 or k.numel() == 0:
        return _empty_forward(q)
    kernels.falls_back(q.device.index)  # to be told of before anything runs, not in the first backward
    with torch.cuda.device(q.device.index):
        return attention_forward(q, k, v, softmax_scale, causal)


def _forward_fake(q, k, v, softmax_scale, causal, schedule="auto", deterministic=True, sm_margin=0):
    check_tensors(q, k, v)
    batch, seqlen_q, heads_q, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads_q, seqlen_q), dtype=lse_dtype(q))


def _backward_cpu(dout, q, k, v, out, lse, softmax_scale, causal, schedule, deterministic, sm_margin):
    check_gradient_tensors(dout, q, k, v, out, lse)
    if q.numel() == 0 or k.numel() == 0:
        return _zero_gradients(q, k, v)
    if schedule == "auto":
        schedule = auto_schedule(q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], causal)
    return reference.backward(dout, q, k, v, out, lse, softmax_scale, causal, schedule)


def _backward_cuda(dout, q, k, v, out, lse, softmax_scale, causal, schedule, deterministic, sm_margin):
    check_gradient_tensors(dout, q, k, v, out, lse)
    batch, seqlen_q, heads_q, head_dim = q.shape
    seqlen_k, heads_k = k.shape[1:3]
    if q.numel() == 0 or k.numel() == 0:
        return _zero_gradients(q, k, v)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    device = q.device
    index = device.index
    if kernels.falls_back(index):
        return _backward_flash2(dout, q, k, v, out, lse, softmax_scale, causal, deterministic)
    if schedule == "auto":
        schedule = auto_schedule(seqlen_q, seqlen_k, heads_q, heads_k, head_dim, causal)
    workspace_bytes = _native.workspace_bytes(
        batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim, causal, schedule
    )
    with torch.cuda.device(index):
        q, k, v, out, dout = map(addressable, (q, k, v, out, dout))
        lse = lse.contiguous()
        dq, dk, dv = map(uninitialized_like, (q, k, v))
        workspace = uninitialized((workspace_bytes,), torch.uint8, device)
        _native.backward(
            *map(matrix, (q, k, v, out, dout, dq, dk, dv)),
            lse.data_ptr(),
            0,
            workspace.data_ptr(),
            (batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim),
            softmax_scale,
            causal,
            _ELEMENT[q.dtype],
            schedule,
            deterministic,
            index,
            sm_margin,
            WAIT_LIMIT_NS,
            torch._C._cuda_getCurrentRawStream(index),
        )
    return dq, dk, dv


def _backward_fake(dout, q, k, v, out, lse, softmax_scale, causal, schedule, deterministic, sm_margin):
    check_gradient_tensors(dout, q, k, v, out, lse)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _backward_flash2(dout, q, k, v, out, lse, softmax_scale, causal, deterministic):
    """torch's own FlashAttention-2 backward, for GPUs without our kernels."""
    # It expects +inf where a query sees no key.
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    unused = torch.empty(0, dtype=torch.int64, device=q.device)  # the random state of a dropout
    with torch.cuda.device(q.device), deterministic_algorithms(deterministic), unfilled_memory():
        q, k, v, out, dout = map(addressable, (q, k, v, out, dout))
        gradients = torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse, None, None, q.shape[1], k.shape[1], 0.0, causal, unused, unused,
            scale=softmax_scale,
        )  # fmt: skip
        return tuple(x.contiguous() for x in gradients)


def _unobserved(*tensors: Tensor) -> bool:
    """Whether an operator's call can go straight to the device's kernel, since nobody else looks at it.

    The dispatcher would ask subclasses, modes, transforms, tracers and profilers, and then call the kernel by
    way of C++: of a small call that is a fifth of its CPU time (docs/experiments.md).
    """
    return (
        all(type(x) in _PLAIN for x in tensors)
        and tensors[0].device.type in _FORWARD_KERNELS
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch._C._get_tracing_state()
        and not torch.autograd._profiler_enabled()
    )


class _Attention(torch.autograd.Function):
    """The forward operator as a node of autograd's graph."""

    @staticmethod
    def forward(ctx, q, k, v, options, forward):
        out, lse = forward(q, k, v, *options)
        ctx.options = options
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, _dlse):
        if dout is None:
            return None, None, None, None, None
        # Read before the block below: a checkpoint computes the saved tensors now, and with autograd.
        arguments = dout, *ctx.saved_tensors, *ctx.options
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            # With create_graph=True the operator's own node refuses a second derivative. A compiler that
            # traces this function does not know the block below.
            gradients = _BACKWARD(*arguments)
        elif _unobserved(*arguments[:3]):
            gradients = _BACKWARD_KERNELS[dout.device.type](*arguments)
        else:
            with _below_autograd():
                gradients = _BACKWARD(*arguments)
        return *gradients, None, None


def _forward_autograd(q, k, v, softmax_scale, causal, schedule="auto", deterministic=True, sm_margin=0):
    """What torch.library.register_autograd makes, but that takes 20 us longer (docs/experiments.md)."""
    options = softmax_scale, causal, schedule, deterministic, sm_margin
    return _differentiable(_forward_below_autograd, q, k, v, options)


def _forward_below_autograd(*arguments):
    with _below_autograd():
        return _FORWARD(*arguments)


def _differentiable(forward, q, k, v, options):
    """forward(q, k, v, *options), with a gradient where one is asked for."""
    if forward_ad._current_level >= 0:
        _refuse_tangents(q=q, k=k, v=v)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Attention.apply(q, k, v, options, forward)
    return forward(q, k, v, *options)


def attention(q: Tensor, k: Tensor, v: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    """The operator `dash_flash_attn::forward` with all its arguments, on the shortest way."""
    if _unobserved(q, k, v):
        return _differentiable(_FORWARD_KERNELS[q.device.type], q, k, v, options)
    return _FORWARD(q, k, v, *options)


def _refuse_tangents(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        if forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"{name}: it carries a tangent, and there is no forward-mode derivative"
            )


def _no_second_gradient(ctx, *_):
    raise NotImplementedError("dash_flash_attn: the backward pass has no derivative")


_FORWARD_KERNELS = {"cpu": _forward_cpu, "cuda": _forward_cuda}
_BACKWARD_KERNELS = {"cpu": _backward_cpu, "cuda": _backward_cuda}
for _kind in ("cpu", "cuda"):
    _library.impl("forward", _FORWARD_KERNELS[_kind], _kind.upper())
    _library.impl("backward", _BACKWARD_KERNELS[_kind], _kind.upper())
torch.library.register_fake("dash_flash_attn::forward", _forward_fake, lib=_library)
torch.library.register_fake("dash_flash_attn::backward", _backward_fake, lib=_library)
_library.impl("forward", _forward_autograd, "Autograd")
torch.library.register_autograd("dash_flash_attn::backward", _no_second_gradient, lib=_library)
