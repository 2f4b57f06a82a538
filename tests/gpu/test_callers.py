"""Callers with modes, transforms, compilers and tensors of their own, and with options that ask for nothing.

Their results have the bits of the plain call, or are right where there is no such call.
"""

import pytest
import torch
from cases import Case, assert_same, backward, plain
from oracle import attention, gradients, same_bits
from torch.fx.experimental import symbolic_shapes
from wrapper import Wrapper

from dash_flash_attn import flash_attn_func

CASE = Case(300, 300, 4, 4, 64, torch.bfloat16, True)


def test_deterministic_without_asking() -> None:
    """A call with deterministic=False, which is the default, has the bits of one with True."""
    case = Case(2048, 2048, 16, 16, 128, torch.bfloat16, False, batch=1)
    (dout, q, k, v, *_), expected = plain(case)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for deterministic in [False] * 20 + [True]:
        out = flash_attn_func(*leaves, deterministic=deterministic)
        assert_same(torch.autograd.grad(out, leaves, dout), expected)


@pytest.mark.usefixtures("gpu", "deterministic_mode")
def test_unordered_in_deterministic_mode() -> None:
    tensors, _ = plain(CASE)
    with pytest.raises(RuntimeError, match="^schedule: .*torch.use_deterministic_algorithms"):
        backward(CASE, tensors, "unordered")
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(UserWarning, match="^schedule: .*'unordered' is not deterministic"):
        backward(CASE, tensors, "unordered")


@pytest.mark.parametrize("window_size", [(-1, 0), (None, 0), (299, 0), (1000, 0)])
def test_windows_that_are_the_causal_mask(window_size) -> None:
    (dout, q, k, v, *_), expected = plain(CASE)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attn_func(*leaves, window_size=window_size)
    assert_same(torch.autograd.grad(out, leaves, dout), expected)


# cuDNN's forward and torch's FlashAttention-2, with and without a mask, queries that see no key, single rows.
NEGATIVE = [
    (300, 300, 4, 4, 64, False),
    (300, 300, 4, 2, 128, True),
    (256, 256, 2, 2, 128, True),
    (500, 200, 4, 2, 64, True),
    (200, 517, 8, 1, 128, False),
    (1, 400, 4, 2, 64, True),
]


@pytest.mark.parametrize("case", NEGATIVE, ids=str)
@pytest.mark.usefixtures("gpu")
def test_negative_scale(case) -> None:
    """The scale of negated queries; against float64, since kernels look for maxima and mask with -inf."""
    case = Case(*case[:5], torch.bfloat16, case[5])
    q, k, v, dout = case.inputs()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = flash_attn_func(*leaves, -0.3, case.causal, return_attn_probs=True)
    results = out, *torch.autograd.grad(out, leaves, dout)
    exact_out, exact_lse = attention(*leaves, -0.3, case.causal)
    for x, exact in zip(results, gradients(dout, q, k, v, -0.3, case.causal), strict=True):
        assert x.isfinite().all() and (x.double() - exact).norm() <= 1e-2 * exact.norm()
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-3, atol=1e-3)
    positive = flash_attn_func(-q, k, v, 0.3, case.causal)
    assert torch.equal(out, positive)
    negated = torch.autograd.grad(positive, leaves, dout)
    assert all(map(torch.equal, results[1:], negated))


@pytest.mark.parametrize(
    "dtypes", [(torch.float32,) * 3, (torch.float32, torch.bfloat16, torch.float16)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype, dtypes) -> None:
    (dout, *inputs, _, _), _ = plain(CASE)
    leaves = [x.detach().to(other).requires_grad_() for x, other in zip(inputs, dtypes, strict=True)]

    def attention_of(*leaves):
        return flash_attn_func(*leaves, causal=True)

    out = attention_of(*(x.to(dtype) for x in leaves))
    expected = out, *torch.autograd.grad(out, leaves, dout.to(dtype))
    with torch.autocast("cuda", dtype=dtype):
        for function in (attention_of, torch.compile(attention_of, fullgraph=True)):
            out = function(*leaves)
            assert_same((out, *torch.autograd.grad(out, leaves, dout.to(dtype))), expected)


def test_zeros_without_memory_and_negated_views() -> None:
    """What kernels must not take the address of."""
    tensors, expected = plain(CASE)
    dout, q, k, v, out, lse = tensors
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    result = flash_attn_func(*leaves, causal=True)
    negated = torch.autograd.grad(result, leaves, torch._neg_view(-dout), retain_graph=True)
    assert_same(negated, expected)
    nothing = torch._efficientzerotensor(out.shape, dtype=out.dtype, device="cuda")
    for x in torch.autograd.grad(result, leaves, nothing):
        assert not x.any()
    assert same_bits(flash_attn_func(q, k, torch._neg_view(-v), causal=True), out)


def test_transforms() -> None:
    """torch.func: per-sample gradients, and a batch of gradients, with the bits of single calls."""
    (dout, q, k, v, *_), expected = plain(CASE)

    def attention_of(q, k, v):
        return flash_attn_func(q, k, v, causal=True)

    _, pull = torch.func.vjp(attention_of, q, k, v)
    assert_same(pull(dout), expected)
    for x, y in zip(torch.func.vmap(pull)(torch.stack((dout, dout))), expected, strict=True):
        assert_same(x, (y, y))
    samples = [x.unsqueeze(1) for x in (dout, q, k, v)]

    def gradients_of(dout, q, k, v):
        return torch.func.vjp(attention_of, q, k, v)[1](dout)

    per_sample = torch.func.vmap(gradients_of)(*samples)
    assert_same([x.squeeze(1) for x in per_sample], expected)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention_of(*leaves)
    batched = torch.autograd.grad(out, leaves, torch.stack((dout, dout)), is_grads_batched=True)
    assert_same([x[1] for x in batched], expected)


@pytest.mark.skipif(not hasattr(symbolic_shapes, "has_static_value"), reason="each scale is a constant to it")
def test_scales_of_a_compiled_function() -> None:
    (dout, q, k, v, *_), _ = plain(CASE)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def attention_of(q, k, v, scale):
        return flash_attn_func(q, k, v, scale, causal=True)

    torch._dynamo.reset()
    compiled = torch.compile(attention_of, fullgraph=True)
    for i, scale in enumerate((0.1, 0.2, -0.3, *(0.4 + 0.05 * n for n in range(10)))):
        with torch.compiler.set_stance("fail_on_recompile" if i > 1 else "default"):
            out = compiled(*leaves, scale)
        expected = attention_of(*leaves, scale)
        assert_same((out,), (expected,))
        found = (torch.autograd.grad(x, leaves, dout) for x in (out, expected))
        assert_same(*found)


@pytest.mark.parametrize("place", range(3), ids=["q", "k", "v"])
def test_one_tensor_without_memory_of_its_own(place: int) -> None:
    """Like that of a collective which is under way, here in q, k or v alone: kernels need its numbers."""
    (dout, *tensors, out, _), expected = plain(CASE)
    leaves = [x.detach().requires_grad_(i != place) for i, x in enumerate(tensors)]
    result = flash_attn_func(*(Wrapper(x) if i == place else x for i, x in enumerate(leaves)), causal=True)
    assert same_bits(result, out)
    by = [i for i in range(3) if i != place]
    assert_same(torch.autograd.grad(result, [leaves[i] for i in by], dout), [expected[i] for i in by])


REFUSED = [
    (TypeError, {"dtype": torch.float32}),
    (TypeError, {"dtype": torch.float64}),
    (NotImplementedError, {"head_dim": 80}),
    (NotImplementedError, {"heads_q": 65536}),
    (ValueError, {"heads_k": 3}),
]


@pytest.mark.parametrize(("error", "change"), REFUSED, ids=str)
def test_a_dry_run_refuses_what_cuda_refuses(error: type[Exception], change: dict) -> None:
    """On meta and here: the same error, and the same words but for the device."""
    options = {"heads_q": 4, "heads_k": 2, "head_dim": 64, "dtype": torch.bfloat16} | change
    messages = []
    for device in ("cuda", "meta"):
        q, k, v = (
            torch.empty(1, 8, options[heads], options["head_dim"], dtype=options["dtype"], device=device)
            for heads in ("heads_q", "heads_k", "heads_k")
        )
        with pytest.raises(error) as refused:
            flash_attn_func(q, k, v)
        messages.append(str(refused.value))
    cuda, meta = messages
    assert cuda == meta.replace("on meta, as on CUDA,", "on CUDA")
