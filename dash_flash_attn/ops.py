"""The two operators that torch sees, `dash_flash_attn::forward` and `dash_flash_attn::backward`.

Those that write into tensors of the caller are in into.py.

Both have a CPU implementation (reference.py), one for CUDA, a fake for tracing, an autograd formula, and
rules for torch.autocast, torch.vmap (batching.py) and DTensors (sharding.py). Calling them directly is the
same as calling the public functions, less the checks of options.
"""

import functools

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from . import _native, batching, kernels, reference, sharding
from .checks import UNORDERED, alert_unordered, check_gradient_tensors, check_scale, check_tensors, lse_dtype
from .dispatch import autocast, is_constant, unobserved
from .forward import attention_forward
from .layout import addressable, is_addressable, matrix
from .torch_settings import deterministic_algorithms, unfilled_memory, uninitialized, uninitialized_like

# A CTA that waits this long for its turn ends the kernel with an error instead of hanging the job.
WAIT_LIMIT_NS = 10_000_000_000

_ELEMENT = {torch.bfloat16: "bf16", torch.float16: "fp16"}

# A block in which an operator's call goes past its autograd kernel, to a tracer or the device's kernel.
_below_autograd = torch._C._AutoDispatchBelowAutograd

_library = torch.library.Library("dash_flash_attn", "DEF")
# schedule and sm_margin matter to forward's gradient only. softmax_scale is multiplied by scale_factor, a
# number in a tensor on the CPU: a compiler takes a float for a constant, and compiles anew for each.
_library.define(
    "forward(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal, str schedule='auto', "
    "int sm_margin=0, Tensor? scale_factor=None) -> (Tensor out, Tensor lse)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float softmax_scale, "
    "bool causal, str schedule, int sm_margin, Tensor? dlse=None, Tensor? scale_factor=None) "
    "-> (Tensor dq, Tensor dk, Tensor dv)",
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


def _whole_scale(softmax_scale: float, scale_factor: Tensor | None) -> float:
    """The factor on the scores. ValueError as from the public functions, which could not know it yet."""
    return softmax_scale if scale_factor is None else check_scale(softmax_scale * scale_factor.item())


def _zero_gradients(*inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.new_zeros(x.shape) for x in inputs)


def _forward_cpu(q, k, v, softmax_scale, causal, schedule="auto", sm_margin=0, scale_factor=None):
    check_tensors(q, k, v)
    if q.numel() == 0 or k.numel() == 0:
        return _empty_forward(q)
    softmax_scale = _whole_scale(softmax_scale, scale_factor)
    # Its products are what they are, whatever the caller wants of his own.
    with torch.autocast("cpu", enabled=False):
        return reference.forward(q, k, v, softmax_scale, causal)


def _forward_cuda(q, k, v, softmax_scale, causal, schedule="auto", sm_margin=0, scale_factor=None):
    check_tensors(q, k, v)
    if q.numel() == 0 or k.numel() == 0:
        return _empty_forward(q)
    kernels.falls_back(q.device.index)  # to be told of before anything runs, not in the first backward
    softmax_scale = _whole_scale(softmax_scale, scale_factor)
    if softmax_scale < 0:  # kernels take the greatest product for the greatest score
        q, softmax_scale = -q, -softmax_scale
    with torch.cuda.device(q.device.index):
        return attention_forward(q, k, v, softmax_scale, causal)


def _forward_fake(q, k, v, softmax_scale, causal, schedule="auto", sm_margin=0, scale_factor=None):
    check_tensors(q, k, v)
    batch, seqlen_q, heads_q, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads_q, seqlen_q), dtype=lse_dtype(q))


# `into` is the place for dq, dk and dv, or None where they have none: into.py. Results are these very tensors
# where that costs no copy; else the caller copies.


def _backward_cpu(
    dout,
    q,
    k,
    v,
    out,
    lse,
    softmax_scale,
    causal,
    schedule,
    sm_margin,
    dlse=None,
    scale_factor=None,
    into=None,
):
    check_gradient_tensors(dout, q, k, v, out, lse, dlse)
    alert_unordered(schedule)
    if q.numel() == 0 or k.numel() == 0:
        return _zero_gradients(q, k, v)
    if schedule in ("auto", UNORDERED):
        schedule = auto_schedule(q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], causal)
    softmax_scale = _whole_scale(softmax_scale, scale_factor)
    with torch.autocast("cpu", enabled=False):
        rounded = into is None  # a copy rounds as well, and not where the place is for the whole sums
        return reference.backward(dout, q, k, v, out, lse, softmax_scale, causal, schedule, dlse, rounded)


def _backward_cuda(
    dout,
    q,
    k,
    v,
    out,
    lse,
    softmax_scale,
    causal,
    schedule,
    sm_margin,
    dlse=None,
    scale_factor=None,
    into=None,
):
    check_gradient_tensors(dout, q, k, v, out, lse, dlse)
    alert_unordered(schedule)
    batch, seqlen_q, heads_q, head_dim = q.shape
    seqlen_k, heads_k = k.shape[1:3]
    if q.numel() == 0 or k.numel() == 0:
        return _zero_gradients(q, k, v)
    softmax_scale = _whole_scale(softmax_scale, scale_factor)
    if softmax_scale < 0:  # the kernels' mask is a product of -inf: see _forward_cuda
        options = -softmax_scale, causal, schedule, sm_margin, dlse, None, into
        dq, dk, dv = _backward_cuda(dout, -q, k, v, out, lse, *options)
        return dq.neg_(), dk, dv
    ordered = schedule != UNORDERED
    device = q.device
    index = device.index
    if kernels.falls_back(index):
        return _backward_flash2(dout, q, k, v, out, lse, softmax_scale, causal, ordered, dlse)
    if schedule in ("auto", UNORDERED):
        schedule = auto_schedule(seqlen_q, seqlen_k, heads_q, heads_k, head_dim, causal)
    workspace_bytes = _native.workspace_bytes(
        batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim, causal, schedule
    )
    with torch.cuda.device(index):
        q, k, v, out, dout = map(addressable, (q, k, v, out, dout))
        lse = lse.contiguous()
        if dlse is not None:
            dlse = dlse.contiguous()
        dq, dk, dv = map(_place_for, (q, k, v), into or (None, None, None))
        workspace = uninitialized((workspace_bytes,), torch.uint8, device)
        _native.backward(
            *map(matrix, (q, k, v, out, dout, dq, dk, dv)),
            lse.data_ptr(),
            dlse.data_ptr() if dlse is not None else 0,
            workspace.data_ptr(),
            (batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim),
            softmax_scale,
            causal,
            _ELEMENT[q.dtype],
            schedule,
            ordered,
            index,
            sm_margin,
            WAIT_LIMIT_NS,
            torch._C._cuda_getCurrentRawStream(index),
        )
    return dq, dk, dv


def _place_for(x: Tensor, given: Tensor | None) -> Tensor:
    """Where kernels can write the gradient of x."""
    return given if given is not None and is_addressable(given) else uninitialized_like(x)


def _backward_fake(
    dout, q, k, v, out, lse, softmax_scale, causal, schedule, sm_margin, dlse=None, scale_factor=None
):
    check_gradient_tensors(dout, q, k, v, out, lse, dlse)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _backward_flash2(dout, q, k, v, out, lse, softmax_scale, causal, deterministic, dlse=None):
    """torch's own FlashAttention-2 backward, for GPUs without our kernels."""
    blind = lse == -torch.inf
    # It expects +inf where a query sees no key.
    lse = lse.masked_fill(blind, torch.inf)
    unused = torch.empty(0, dtype=torch.int64, device=q.device)  # the random state of a dropout

    def gradients_for(dout, v, out):
        dout, v, out = map(addressable, (dout, v, out))
        gradients = torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse, None, None, q.shape[1], k.shape[1], 0.0, causal, unused, unused,
            scale=softmax_scale,
        )  # fmt: skip
        return [x.contiguous() for x in gradients]

    with torch.cuda.device(q.device), deterministic_algorithms(deterministic), unfilled_memory():
        q, k = map(addressable, (q, k))
        dq, dk, dv = gradients_for(dout, v, out)
        if dlse is not None:
            # It knows none of lse: dQ lacks scale * dlse * P K, which is an attention with K for V, and dK
            # lacks scale * P^T (dlse Q), which is what dV is to an output's gradient of dlse Q.
            factor = (softmax_scale * dlse.masked_fill(blind, 0.0)).transpose(1, 2).unsqueeze(-1)
            keys, _ = attention_forward(q, k, k, softmax_scale, causal)
            dq += (factor * keys).to(q.dtype)
            dk += gradients_for((factor * q).to(q.dtype), v, out)[2]
    return dq, dk, dv


class _Attention(torch.autograd.Function):
    """The forward operator as a node of autograd's graph."""

    @staticmethod
    def forward(ctx, q, k, v, options, forward):
        out, lse = forward(q, k, v, *options)
        *ctx.options, scale_factor = options
        ctx.save_for_backward(q, k, v, out, lse, scale_factor)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return None, None, None, None, None
        # Read before the block below: a checkpoint computes the saved tensors now, and with autograd.
        q, k, v, out, lse, scale_factor = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        if forward_ad._current_level >= 0:
            refuse_tangents(dout=dout, dlse=dlse)
        arguments = dout, q, k, v, out, lse, *ctx.options, dlse, scale_factor
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            # With create_graph=True the operator's own node refuses a second derivative. A compiler that
            # traces this function does not know the block below.
            gradients = _BACKWARD(*arguments)
        elif unobserved(dout, q, k, v, out, lse) and (dlse is None or unobserved(dlse)):
            gradients = BACKWARD_KERNELS[dout.device.type](*arguments)
        else:
            with _below_autograd():
                gradients = _BACKWARD(*arguments)
        return *gradients, None, None


class _Backward(torch.autograd.Function):
    """The backward operator as a node of autograd's graph, which ends there."""

    @staticmethod
    def forward(ctx, *arguments):
        return _call_below_autograd(_BACKWARD, *arguments)

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError("dash_flash_attn: the backward pass has no derivative")


# Without torch.autograd.Function's own apply, which takes longer. Its way to the levels of torch.func is not
# open to an operator's kernel: each level calls that anew, as it calls those of torch's own operators.
_attention_node = super(torch.autograd.Function, _Attention).apply
_backward_node = super(torch.autograd.Function, _Backward).apply


def _forward_autograd(q, k, v, softmax_scale, causal, schedule="auto", sm_margin=0, scale_factor=None):
    sharding.register()
    if scale_factor is not None and scale_factor.requires_grad:
        raise TypeError("scale_factor: it would get no gradient, multiply q by it")
    options = softmax_scale, causal, schedule, sm_margin, scale_factor
    return _differentiable(functools.partial(_call_below_autograd, _FORWARD), q, k, v, options)


def _backward_autograd(dout, q, k, v, out, lse, *options):
    tensors = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": (*options, None)[4]}
    if forward_ad._current_level >= 0:
        refuse_tangents(**tensors)
    needed = any(x is not None and x.requires_grad for x in tensors.values())
    arguments = dout, q, k, v, out, lse, *options
    if torch.is_grad_enabled() and needed:
        return _node(_backward_node, *arguments)
    return _call_below_autograd(_BACKWARD, *arguments)


def _in_levels():
    """Whether torch.func's transforms are at work: grad, vmap and what is made of them."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _node(node, *arguments):
    if not _in_levels():
        return node(*arguments)
    with enable_single_level_autograd_function():
        return node(*arguments)


def _call_below_autograd(operator, *arguments):
    if not _in_levels():
        with _below_autograd():
            return operator(*arguments)
    # A node is made with autograd off, which is not meant for the levels further out: they come below.
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), _below_autograd():
        return operator(*arguments)


def _differentiable(forward, q, k, v, options):
    """forward(q, k, v, *options), with a gradient where one is asked for."""
    if forward_ad._current_level >= 0:
        refuse_tangents(q=q, k=k, v=v)
    if not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
        return forward(q, k, v, *options)
    return _node(_attention_node, q, k, v, options, forward)


def _forward_autocast(kind, q, k, v, *options):
    key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, "Autocast" + kind.upper()))
    with torch._C._ExcludeDispatchKeyGuard(key):
        return _FORWARD(*autocast(kind, q, k, v), *options)


def attention(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, schedule: str, sm_margin: int
) -> tuple[Tensor, Tensor]:
    """The operator `dash_flash_attn::forward`, on the shortest way."""
    options = softmax_scale, causal, schedule, sm_margin, None
    kind = "cuda" if q.is_cuda else "cpu"
    # The operator would cast as well, but a compiler's cache knows a graph by what is in it, and the dtype of
    # autocast is not: torch 2.11 runs the graph of the one dtype for another one.
    if torch.is_autocast_enabled(kind):
        q, k, v = autocast(kind, q, k, v)
    if unobserved(q, k, v):
        return _differentiable(FORWARD_KERNELS[kind], q, k, v, options)
    if not torch.compiler.is_compiling():
        sharding.register()
    softmax_scale, scale_factor = split_scale(softmax_scale)
    return _FORWARD(q, k, v, softmax_scale, causal, schedule, sm_margin, scale_factor)


def split_scale(softmax_scale: float) -> tuple[float, Tensor | None]:
    """The scale as the operators take it: softmax_scale and scale_factor."""
    if not torch.compiler.is_compiling() or is_constant(softmax_scale):
        return softmax_scale, None
    return 1.0, torch.ones((), dtype=torch.float64, device="cpu") * softmax_scale


def refuse_tangents(**tensors: Tensor | None) -> None:
    """NotImplementedError for a tensor that carries a tangent, by its name: it would be lost."""
    for name, x in tensors.items():
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"{name}: it carries a tangent, and there is no forward-mode derivative"
            )


# What runs on a device, past the dispatcher.
FORWARD_KERNELS = {"cpu": _forward_cpu, "cuda": _forward_cuda}
BACKWARD_KERNELS = {"cpu": _backward_cpu, "cuda": _backward_cuda}
for _kind in ("cpu", "cuda"):
    _library.impl("forward", FORWARD_KERNELS[_kind], _kind.upper())
    _library.impl("backward", BACKWARD_KERNELS[_kind], _kind.upper())
    _library.impl("forward", functools.partial(_forward_autocast, _kind), "Autocast" + _kind.upper())
torch.library.register_fake("dash_flash_attn::forward", _forward_fake, lib=_library)
torch.library.register_fake("dash_flash_attn::backward", _backward_fake, lib=_library)
_library.impl("forward", _forward_autograd, "Autograd")
_library.impl("backward", _backward_autograd, "Autograd")
torch.library.register_vmap("dash_flash_attn::forward", batching.forward, lib=_library)
torch.library.register_vmap("dash_flash_attn::backward", batching.backward, lib=_library)
