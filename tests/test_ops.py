"""What torch needs of an operator: schema, tracing, autograd; and tensors of any layout."""

from functools import partial

import pytest
import torch
from oracle import same_bits
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from dash_flash_attn import flash_attn_func, ops
from dash_flash_attn.checks import CUDA_MAX_HEADS, check_gradient_tensors, check_tensors
from dash_flash_attn.layout import addressable

FORWARD = torch.ops.dash_flash_attn.forward.default
BACKWARD = torch.ops.dash_flash_attn.backward.default


def qkv(dtype=torch.float32, requires_grad=False, seqlen_q=70, seqlen_k=140):
    """q, k and v with two query heads a KV head."""
    torch.manual_seed(0)
    shapes = ((2, seqlen_q, 4, 32), (2, seqlen_k, 2, 32), (2, seqlen_k, 2, 32))
    return [torch.randn(shape).to(dtype).requires_grad_(requires_grad) for shape in shapes]


def gradients(function, tensors, dout):
    """dq, dk and dv."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    return torch.autograd.grad(function(*leaves), leaves, dout)


def deterministic_attention(q, k, v):
    return flash_attn_func(q, k, v, causal=True, deterministic=True, schedule="symmetric-shift")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_opcheck_forward(causal: bool, dtype: torch.dtype) -> None:
    torch.library.opcheck(FORWARD, (*qkv(dtype, requires_grad=True), 0.2, causal))
    torch.library.opcheck(FORWARD, (*qkv(dtype, requires_grad=True), 0.2, causal, "shift", 4))
    factor = torch.tensor(2.0, dtype=torch.float64)
    torch.library.opcheck(FORWARD, (*qkv(dtype, requires_grad=True), 0.2, causal, "shift", 4, factor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck_backward(dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype)
    out, lse = FORWARD(q, k, v, 0.2, True)
    dout = torch.randn_like(out)
    torch.library.opcheck(BACKWARD, (dout, q, k, v, out, lse, 0.2, True, "shift", 0))
    factor = torch.tensor(2.0, dtype=torch.float64)
    dlse = torch.randn_like(lse)
    torch.library.opcheck(BACKWARD, (dout, q, k, v, out, lse, 0.2, True, "shift", 0, dlse, factor))
    torch.library.opcheck(BACKWARD, (dout, q, k, v, out, lse, 0.2, True, "shift", 0, dlse, factor, False))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 5), (5, 0)])
def test_opcheck_empty(seqlen_q: int, seqlen_k: int) -> None:
    q, k, v = qkv(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    out, lse = FORWARD(q, k, v, 0.2, True)
    torch.library.opcheck(FORWARD, (q, k, v, 0.2, True))
    torch.library.opcheck(BACKWARD, (out, q, k, v, out, lse, 0.2, True, "auto", 0))


def test_torch_compile() -> None:
    tensors = qkv()
    dout = torch.randn_like(tensors[0])
    compiled = torch.compile(deterministic_attention, fullgraph=True, backend="aot_eager")
    for x, y in zip(
        gradients(compiled, tensors, dout), gradients(deterministic_attention, tensors, dout), strict=True
    ):
        assert same_bits(x, y)


def test_torch_compile_with_dynamic_shapes() -> None:
    compiled = torch.compile(deterministic_attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for seqlen in (30, 130, 257):
        tensors = qkv(seqlen_q=seqlen, seqlen_k=seqlen)
        dout = torch.randn_like(tensors[0])
        for x, y in zip(
            gradients(compiled, tensors, dout), gradients(deterministic_attention, tensors, dout), strict=True
        ):
            assert same_bits(x, y)


def test_errors_reach_the_caller_of_a_compiled_function() -> None:
    q, k, v = qkv()
    with pytest.raises(Exception, match="head_dim"):
        torch.compile(flash_attn_func, backend="aot_eager")(q[..., :16], k, v)


def test_the_operator_and_the_function_are_the_same() -> None:
    tensors = qkv()
    dout = torch.randn_like(tensors[0])

    def operator(q, k, v):
        return FORWARD(q, k, v, causal=True, softmax_scale=32**-0.5, schedule="symmetric_shift")[0]

    assert same_bits(operator(*tensors), deterministic_attention(*tensors))
    for x, y in zip(
        gradients(operator, tensors, dout), gradients(deterministic_attention, tensors, dout), strict=True
    ):
        assert same_bits(x, y)
    q, k, v = tensors
    for attention in (operator, deterministic_attention):
        with pytest.raises(ValueError, match="^k: expected q's batch and head_dim"):
            attention(q.requires_grad_(), k[..., :16], v)


def test_options_left_out_have_their_defaults_in_the_backward() -> None:
    tensors = qkv()
    dout = torch.randn_like(tensors[0])
    left_out = gradients(lambda q, k, v: FORWARD(q, k, v, 0.2, True)[0], tensors, dout)
    given = gradients(lambda q, k, v: FORWARD(q, k, v, 0.2, True, "auto", 0)[0], tensors, dout)
    for x, y in zip(left_out, given, strict=True):
        assert same_bits(x, y)


def test_a_tracer_sees_both_operators() -> None:
    """A mode below autograd gets the operators, not what they are made of."""

    def step(*leaves):
        return torch.autograd.grad(deterministic_attention(*leaves).sum(), leaves)

    graph = make_fx(step, tracing_mode="fake")(*qkv(requires_grad=True)).graph
    called = [node.target for node in graph.nodes if node.op == "call_function"]
    assert called.count(FORWARD) == called.count(BACKWARD) == 1


def test_checkpoints() -> None:
    """The saved tensors come from a second forward, which runs inside the backward."""
    tensors = qkv()
    dout = torch.randn_like(tensors[0])
    expected = gradients(deterministic_attention, tensors, dout)
    save_forward = partial(create_selective_checkpoint_contexts, [FORWARD])
    for options in ({}, {"context_fn": save_forward}):

        def attention(*leaves, options=options):
            return checkpoint(deterministic_attention, *leaves, use_reentrant=False, **options)

        for x, y in zip(gradients(attention, tensors, dout), expected, strict=True):
            assert same_bits(x, y)


def test_compiled_backward_of_an_eager_forward() -> None:
    leaves = qkv(requires_grad=True)
    out = deterministic_attention(*leaves).sum()
    expected = torch.autograd.grad(out, leaves, retain_graph=True)
    captured = torch._dynamo.utils.counters["compiled_autograd"]["captures"]
    whole = {"compiled_autograd": True, "compiled_autograd_kwargs_override": {"fullgraph": True}}
    with torch._dynamo.config.patch(whole):
        torch.compile(lambda out: out.backward(), backend="aot_eager")(out)
    assert torch._dynamo.utils.counters["compiled_autograd"]["captures"] == captured + 1
    for x, y in zip(leaves, expected, strict=True):
        assert same_bits(x.grad, y)


def test_gradient_of_a_sum_has_stride_zero() -> None:
    leaves = qkv(requires_grad=True)
    deterministic_attention(*leaves).sum().backward()
    expected = gradients(deterministic_attention, leaves, torch.ones_like(leaves[0]))
    for x, y in zip(leaves, expected, strict=True):
        assert same_bits(x.grad, y)


def test_layouts_do_not_matter() -> None:
    tensors = qkv(torch.bfloat16)
    dout = torch.randn_like(tensors[0])
    expected = gradients(deterministic_attention, tensors, dout)
    for change in (
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
        lambda x: torch.stack((x, x), dim=-1)[..., 0],
    ):
        leaves = [change(x).detach().requires_grad_() for x in tensors]
        assert not any(x.is_contiguous() for x in leaves)
        deterministic_attention(*leaves).backward(change(dout))
        for x, y in zip(leaves, expected, strict=True):
            assert same_bits(x.grad, y)


def test_what_bulk_copies_can_read_is_not_copied() -> None:
    x = torch.randn(2, 24, 4, 64).bfloat16()
    for view in (x, x.transpose(1, 2), x[:, ::2], x[:, 1:, 1:], torch.stack((x, x, x), dim=2)[:, :, 1]):
        assert addressable(view) is view


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[..., ::2],
        lambda x: x[:, :, :, 1:],
        lambda x: x[..., :60].contiguous(),
        lambda x: x[:1, :1, :1].expand(2, 24, 4, 64),
        lambda x: x[:1].as_strided((1, 24, 4, 64), (3, 256, 64, 1)),
        lambda x: x[:, :, :1].as_strided((2, 24, 1, 64), (6144, 256, 0, 1)),
    ],
)
def test_what_they_cannot_read_is_copied(view) -> None:
    odd = view(torch.randn(2, 24, 4, 64).bfloat16())
    even = addressable(odd)
    assert same_bits(even, odd)
    if even.shape[-1] % 8 == 0:  # else the caller has a head dimension without kernels
        assert addressable(even) is even
    assert even.stride() == torch.empty(odd.shape).stride()


def test_only_what_needs_a_gradient_gets_one() -> None:
    q, k, v = qkv()
    k.requires_grad_()
    flash_attn_func(q, k, v).sum().backward()
    assert k.grad is not None and q.grad is None and v.grad is None
    with torch.no_grad():
        assert not flash_attn_func(q, k, v).requires_grad


def test_no_second_derivative() -> None:
    leaves = qkv(requires_grad=True)
    (dq,) = torch.autograd.grad(flash_attn_func(*leaves).sum(), leaves[0], create_graph=True)
    assert same_bits(dq, torch.autograd.grad(flash_attn_func(*leaves).sum(), leaves[0])[0])
    with pytest.raises(NotImplementedError, match="no derivative"):
        dq.sum().backward()


def test_gradients_that_do_not_fit_are_refused() -> None:
    q, k, v = qkv()
    out, lse = FORWARD(q, k, v, 0.2, True)
    options = (0.2, True, "auto", 0)
    for name, args in {
        "dout": (out[:, 1:], q, k, v, out, lse),
        "out": (out, q, k, v, out[:, 1:], lse),
        "lse": (out, q, k, v, out, lse[:, :, 1:]),
    }.items():
        with pytest.raises(ValueError, match=f"^{name}: "):
            BACKWARD(*args, *options)
    with pytest.raises(TypeError, match="^dout: "):
        BACKWARD(out.double(), q, k, v, out, lse, *options)
    with pytest.raises(ValueError, match="^dlse: "):
        BACKWARD(out, q, k, v, out, lse, *options, lse[:, :, 1:])
    with pytest.raises(TypeError, match="^dlse: "):
        BACKWARD(out, q, k, v, out, lse, *options, lse.double())


def test_a_factor_of_the_scale() -> None:
    """How a compiled function passes a scale that it does not know."""
    q, k, v = leaves = qkv(requires_grad=True)
    expected = FORWARD(q, k, v, 0.2, True)[0]
    out = FORWARD(q, k, v, 2.0, True, "auto", 0, torch.tensor(0.1, dtype=torch.float64))[0]
    assert same_bits(out, expected)
    dout = torch.randn_like(out)
    assert all(map(same_bits, *(torch.autograd.grad(x, leaves, dout) for x in (out, expected))))
    with pytest.raises(ValueError, match="^softmax_scale: "):
        FORWARD(q, k, v, 2.0, True, "auto", 0, torch.tensor(0.0))
    with pytest.raises(TypeError, match="^scale_factor: "):
        FORWARD(q, k, v, 2.0, True, "auto", 0, torch.tensor(0.1, requires_grad=True))


@pytest.mark.parametrize("stray", ["dout", "out", "lse", "dlse"])
def test_backward_refuses_tensors_of_another_device(stray: str) -> None:
    """A kernel would take their address for one of its own GPU."""
    q, k, v = qkv()
    out, lse = FORWARD(q, k, v, 0.2, False)
    tensors = {"dout": torch.randn_like(out), "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": lse}
    tensors[stray] = tensors[stray].to("meta")
    with pytest.raises(ValueError, match=f"^{stray}: expected q's device"):
        check_gradient_tensors(**tensors)


def test_more_heads_than_a_launch_has_are_refused() -> None:
    q = torch.empty((1, 1, CUDA_MAX_HEADS + 1, 64), dtype=torch.bfloat16, device="meta")
    check_tensors(*(On("cpu", q),) * 3)  # any number will do
    for kind in ("cuda", "meta"):
        with pytest.raises(NotImplementedError, match="^q: .* 65535"):
            check_tensors(*(On(kind, q),) * 3)


class On:
    """A meta tensor that says it is on another device."""

    def __init__(self, kind: str, tensor: torch.Tensor) -> None:
        self.device = torch.device(kind)
        self.tensor = tensor

    def __getattr__(self, name):
        return getattr(self.tensor, name)


def names_of(prefix: str, profiler) -> set[str]:
    """Of all events that were seen."""
    return {event.name for event in profiler.events() if event.name.startswith(prefix)}


def test_calls_that_nobody_watches_skip_the_dispatcher(monkeypatch) -> None:
    """And those that somebody watches do not; the results are the same."""
    tensors, dout = qkv(requires_grad=True), torch.ones(2, 70, 4, 32)
    expected = gradients(deterministic_attention, tensors, dout)
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Watch():
        watched = gradients(deterministic_attention, tensors, dout)
    assert FORWARD in seen and BACKWARD in seen
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        profiled = gradients(deterministic_attention, tensors, dout)
    assert names_of("dash_flash_attn::", profiler) == {
        "dash_flash_attn::forward", "dash_flash_attn::backward",
    }  # fmt: skip
    for other in (watched, profiled):
        assert all(map(same_bits, expected, other))

    def never(*arguments):
        raise AssertionError("through the dispatcher")

    monkeypatch.setattr(ops, "_FORWARD", never)
    monkeypatch.setattr(ops, "BACKWARD", never)
    assert all(map(same_bits, expected, gradients(deterministic_attention, tensors, dout)))
    with pytest.raises(AssertionError, match="through the dispatcher"), Watch():
        deterministic_attention(*tensors)


@pytest.mark.parametrize("place", range(3))
def test_forward_mode_is_refused(place: int) -> None:
    """A tangent would be lost without a word."""
    tensors = [x.detach() for x in qkv()]
    name = "qkv"[place]
    with forward_ad.dual_level():
        tensors[place] = forward_ad.make_dual(tensors[place], torch.ones_like(tensors[place]))
        with pytest.raises(NotImplementedError, match=f"^{name}: .* no forward-mode"):
            flash_attn_func(*tensors)
    tensors = qkv()

    def of_one(x):
        return flash_attn_func(*tensors[:place], x, *tensors[place + 1 :])

    with pytest.raises(NotImplementedError, match=f"^{name}: .* no forward-mode"):
        torch.func.jvp(of_one, (tensors[place],), (tensors[place],))


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("place", range(2), ids=["dout", "dlse"])
def test_forward_mode_over_the_backward_is_refused(place: int, create_graph: bool) -> None:
    leaves = qkv(requires_grad=True)
    results = flash_attn_func(*leaves, return_attn_probs=True)
    gradients = [torch.ones_like(x) for x in results]
    name = ("dout", "dlse")[place]
    with forward_ad.dual_level():
        gradients[place] = forward_ad.make_dual(gradients[place], gradients[place])
        with pytest.raises(NotImplementedError, match=f"^{name}: .* no forward-mode"):
            torch.autograd.grad(results, leaves, gradients, create_graph=create_graph)
