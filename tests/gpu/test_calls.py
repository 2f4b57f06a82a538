"""Tensors, streams, graphs and devices as callers bring them: the same bits as the plain call."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cases import Case, backward, forward
from oracle import attention, gradients, same_bits
from torch.fx.experimental import symbolic_shapes

from dash_flash_attn import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func, kernels

CASE = Case(300, 300, 4, 4, 64, torch.bfloat16, True)


def plain(case: Case = CASE) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """(dout, q, k, v, out, lse) and their gradients."""
    q, k, v, dout = case.inputs()
    tensors = dout, q, k, v, *forward(case, q, k, v)
    return tensors, backward(case, tensors, "auto")


def assert_same(xs, ys) -> None:
    for x, y in zip(xs, ys, strict=True):
        assert same_bits(x, y)


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """The same values in memory as (batch, heads, seqlen, head_dim)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def spread(x: torch.Tensor) -> torch.Tensor:
    """The same values with a gap after each number."""
    return torch.stack((x, torch.zeros_like(x)), dim=-1)[..., 0]


def shifted(x: torch.Tensor) -> torch.Tensor:
    """The same values at an address that is no multiple of 16 bytes."""
    storage = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return storage[1:].view(x.shape).copy_(x)


def padded(x: torch.Tensor) -> torch.Tensor:
    """The same values in rows of an odd length."""
    wide = torch.empty(*x.shape[:-1], x.shape[-1] + 3, dtype=x.dtype, device=x.device)
    wide[..., :-3] = x
    return wide[..., :-3]


@pytest.mark.parametrize("change", [heads_first, spread, shifted, padded], ids=lambda f: f.__name__)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_strides(head_dim: int, change) -> None:
    case = CASE._replace(head_dim=head_dim)
    tensors, expected = plain(case)
    *views, lse = tensors
    views = [change(x) for x in views]
    assert all(not x.is_contiguous() or x.data_ptr() % 16 for x in views)
    results = backward(case, (*views, lse), "auto")
    assert_same(results, expected)
    assert all(x.is_contiguous() for x in results)  # as their fake says
    out, lse2 = forward(case, *views[1:4])
    assert same_bits(out, tensors[4]) and same_bits(lse2, lse)


def test_dimensions_of_size_one_with_odd_strides() -> None:
    case = Case(200, 200, 1, 1, 64, torch.bfloat16, False, batch=1)
    tensors, expected = plain(case)
    *views, lse = tensors
    odd = [x.as_strided(x.shape, (7, x.stride(1), 3, 1)) for x in views]
    assert_same(backward(case, (*odd, lse), "auto"), expected)


def test_gradient_of_a_sum_has_stride_zero() -> None:
    q, k, v, _ = (x.requires_grad_() for x in CASE.inputs())
    flash_attn_func(q, k, v, causal=True, deterministic=True).sum().backward()
    (_, *tensors), _ = plain()
    ones = torch.ones_like(q)
    assert_same((q.grad, k.grad, v.grad), backward(CASE, (ones, *tensors), "auto"))


def test_packed_tensors() -> None:
    (dout, q, k, v, *_), expected = plain()
    qkv = torch.stack((q, k, v), dim=2).requires_grad_()
    flash_attn_qkvpacked_func(qkv, causal=True, deterministic=True).backward(dout)
    assert_same(qkv.grad.unbind(2), expected)
    q, kv = q.clone().requires_grad_(), torch.stack((k, v), dim=2).requires_grad_()
    flash_attn_kvpacked_func(q, kv, causal=True, deterministic=True).backward(dout)
    assert_same((q.grad, *kv.grad.unbind(2)), expected)


@pytest.mark.parametrize("filling", [False, True])
def test_cuda_graph(filling: bool, request: pytest.FixtureRequest) -> None:
    if filling:
        request.getfixturevalue("deterministic_mode")
    tensors, expected = plain()
    dout, q, k, v, *_ = tensors

    def step():
        out, lse = forward(CASE, q, k, v)
        return out, *backward(CASE, (dout, q, k, v, out, lse), "auto")

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for _ in range(3):
        for x in results:
            x.fill_(torch.nan)
        graph.replay()
        assert_same(results, (tensors[4], *expected))
    # The graph reads its inputs anew.
    other_q, other_k, other_v, other_dout = CASE.inputs(seed=1)
    for x, other in ((q, other_q), (k, other_k), (v, other_v), (dout, other_dout)):
        x.copy_(other)
    graph.replay()
    assert_same(results, step())


def test_graph_of_the_first_call(tmp_path: Path) -> None:
    """In a fresh process, with nothing of ours run before the capture begins."""
    tensors, expected = plain()
    torch.save((tensors, expected), tmp_path / "tensors.pt")
    script = f"""
import torch
import dash_flash_attn
tensors, expected = torch.load({str(tmp_path / "tensors.pt")!r}, map_location="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    results = torch.ops.dash_flash_attn.backward(*tensors, {CASE.scale}, {CASE.causal}, "auto", 0)
graph.replay()
torch.cuda.synchronize()
assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_captured_training_step() -> None:
    q, k, v, dout = CASE.inputs()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        flash_attn_func(*leaves, causal=True, deterministic=True).backward(dout)
    torch.cuda.current_stream().wait_stream(stream)
    for x in leaves:
        x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flash_attn_func(*leaves, causal=True, deterministic=True).backward(dout)
    graph.replay()
    assert_same([x.grad for x in leaves], plain()[1])


def test_another_stream() -> None:
    """Work goes to the caller's stream: it sees what that stream wrote before, and nothing waits for it."""
    tensors, expected = plain()
    stream = torch.cuda.Stream()
    late = [torch.zeros_like(x) for x in tensors]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for x, value in zip(late, tensors, strict=True):
            x.copy_(value)
        results = backward(CASE, tuple(late), "auto")
        results = [x.clone() for x in results]
    stream.synchronize()
    assert_same(results, expected)


def test_a_device_that_is_not_current() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    tensors, expected = plain()
    moved = tuple(x.to("cuda:1") for x in tensors)
    assert torch.cuda.current_device() == 0
    results = backward(CASE, moved, "auto")
    assert all(x.device.index == 1 for x in results)
    assert_same([x.to("cuda:0") for x in results], expected)


def test_empty_tensors() -> None:
    for seqlen_q, seqlen_k, batch in ((0, 5, 2), (5, 0, 2), (5, 5, 0)):
        case = Case(seqlen_q, seqlen_k, 4, 2, 64, torch.bfloat16, True, batch=batch)
        q, k, v, dout = case.inputs()
        out, lse = forward(case, q, k, v)
        grads = backward(case, (dout, q, k, v, out, lse), "auto")
        assert not out.any() and (lse == -torch.inf).all()
        assert [x.shape for x in grads] == [x.shape for x in (q, k, v)] and not any(x.any() for x in grads)


def test_deterministic_without_asking() -> None:
    """A call with deterministic=False, which is the default, has the bits of one with True."""
    case = Case(2048, 2048, 16, 16, 128, torch.bfloat16, False, batch=1)
    (dout, q, k, v, *_), expected = plain(case)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for deterministic in [False] * 20 + [True]:
        out = flash_attn_func(*leaves, deterministic=deterministic)
        assert_same(torch.autograd.grad(out, leaves, dout), expected)


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "fallback"])
def test_unordered_in_deterministic_mode(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, _ = plain()
    if not kernel:
        monkeypatch.setattr(kernels, "unusable", lambda device: "this test says so")
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="^schedule: .*torch.use_deterministic_algorithms"):
            backward(CASE, tensors, "unordered")
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.warns(UserWarning, match="^schedule: .*'unordered' is not deterministic"):
            backward(CASE, tensors, "unordered")
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("window_size", [(-1, 0), (None, 0), (299, 0), (1000, 0)])
def test_windows_that_are_the_causal_mask(window_size) -> None:
    (dout, q, k, v, *_), expected = plain()
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
@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "fallback"])
def test_negative_scale(kernel: bool, case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale of negated queries; against float64, since kernels look for maxima and mask with -inf."""
    if not kernel:
        monkeypatch.setattr(kernels, "unusable", lambda device: "this test says so")
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


# Square, more and fewer queries than keys (some see none), groups whole and in parts, every head dimension.
WITH_DLSE = [
    Case(300, 300, 4, 4, 64, torch.bfloat16, True),
    Case(300, 300, 4, 2, 128, torch.float16, False),
    Case(500, 200, 4, 2, 64, torch.bfloat16, True),
    Case(517, 200, 8, 2, 128, torch.bfloat16, True),
    Case(129, 700, 8, 1, 128, torch.float16, True),
    Case(2049, 2049, 8, 1, 64, torch.bfloat16, True, batch=1),
    Case(1, 65, 2, 2, 128, torch.bfloat16, True),
]


@pytest.mark.parametrize("case", WITH_DLSE, ids=lambda case: case.name)
@pytest.mark.parametrize("with_out", [True, False], ids=["both", "lse"])
def test_gradient_of_the_log_sum_exp(with_out: bool, case: Case) -> None:
    q, k, v, dout = case.inputs()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    results = flash_attn_func(*leaves, causal=case.causal, return_attn_probs=True)
    exact = attention(*exact_leaves, case.scale, case.causal)
    blind = exact[1] == -torch.inf
    # As large as dout's part in D. Where no key is seen lse has no gradient, whatever is asked for.
    dlse = 8 * torch.randn_like(results[1])
    exact_dlse = dlse.double().masked_fill(blind, 0.0)
    dlse = dlse.masked_fill(blind, torch.nan)
    place = slice(0 if with_out else 1, 2)
    found = torch.autograd.grad(results[place], leaves, (dout, dlse)[place], retain_graph=True)
    expected = torch.autograd.grad(
        (exact[0], exact[1].masked_fill(blind, 0.0))[place],
        exact_leaves,
        (dout.double(), exact_dlse)[place],
        allow_unused=True,
    )
    for name, x, y in zip(("dq", "dk", "dv"), found, expected, strict=True):
        y = torch.zeros_like(x, dtype=torch.float64) if y is None else y  # v does not matter to lse
        assert x.isfinite().all() and (x.double() - y).norm() <= 1e-2 * y.norm() + 1e-4, name
    again = torch.autograd.grad(results[place], leaves, (dout, dlse)[place])
    assert_same(found, again)


def test_the_layout_of_a_gradient_of_the_log_sum_exp_does_not_matter() -> None:
    tensors, expected = plain()
    lse = tensors[-1]
    dlse = torch.randn_like(lse)
    results = backward(CASE, tensors, "auto", dlse=dlse)
    strided = dlse.transpose(1, 2).contiguous().transpose(1, 2)
    assert not strided.is_contiguous()
    assert_same(backward(CASE, tensors, "auto", dlse=strided), results)
    assert_same(backward(CASE, tensors, "auto", dlse=torch.zeros_like(lse)), expected)
    one = torch.ones((), device="cuda").expand(lse.shape)
    assert_same(backward(CASE, tensors, "auto", dlse=one), backward(CASE, tensors, "auto", dlse=one.clone()))


def test_the_fallback_has_no_gradient_of_the_log_sum_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "unusable", lambda device: "this test says so")
    tensors, _ = plain()
    with pytest.raises(NotImplementedError, match="^lse: its gradient needs"):
        backward(CASE, tensors, "auto", dlse=torch.ones_like(tensors[-1]))


@pytest.mark.parametrize(
    "dtypes", [(torch.float32,) * 3, (torch.float32, torch.bfloat16, torch.float16)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype, dtypes) -> None:
    (dout, *inputs, _, _), _ = plain()
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
    tensors, expected = plain()
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
    (dout, q, k, v, *_), expected = plain()

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
    (dout, q, k, v, *_), _ = plain()
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


def test_torch_compile() -> None:
    (dout, q, k, v, *_), expected = plain()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    compiled = torch.compile(lambda *x: flash_attn_func(*x, causal=True, deterministic=True), fullgraph=True)
    compiled(*leaves).backward(dout)
    assert_same([x.grad for x in leaves], expected)


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernels, "unusable", lambda device: "this test says so")
    kernels.falls_back.cache_clear()
    yield
    kernels.falls_back.cache_clear()


@pytest.mark.usefixtures("without_kernels")
def test_other_gpus_take_flash_attention_2() -> None:
    case = Case(500, 400, 8, 2, 128, torch.bfloat16, True)
    with pytest.warns(UserWarning, match="this test says so"):
        tensors, results = plain(case)
    dout, q, k, v, *_ = tensors
    for x, exact in zip(results, gradients(dout, q, k, v, case.scale, True)[1:], strict=True):
        assert (x.double() - exact).norm() < 1e-2 * exact.norm()
    for _ in range(20):
        assert_same(backward(case, tensors, "auto"), results)


@pytest.mark.usefixtures("without_kernels", "deterministic_mode")
@pytest.mark.filterwarnings("ignore:dash_flash_attn")
@pytest.mark.parametrize("warn_only", [False, True])
def test_flash_attention_2_in_torch_deterministic_mode(warn_only: bool) -> None:
    """Where torch only warns of what is not deterministic, its own call would be one of these."""
    case = Case(2048, 2048, 16, 16, 128, torch.bfloat16, False, batch=1)
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    tensors, expected = plain(case)
    for _ in range(20):
        assert_same(backward(case, tensors, "auto"), expected)
    assert torch.is_deterministic_algorithms_warn_only_enabled() == warn_only


@pytest.fixture
def deterministic_mode() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "case", [CASE, Case(500, 400, 8, 2, 128, torch.bfloat16, False)], ids=lambda case: case.name
)
def test_deterministic_mode_fills_no_memory(case: Case, request: pytest.FixtureRequest) -> None:
    """torch would fill what the kernels write anyway. The second case's forward is FlashAttention-2."""
    q, k, v, dout = case.inputs()

    def step() -> tuple[torch.Tensor, ...]:
        out, lse = forward(case, q, k, v)
        return out, lse, *backward(case, (dout, q, k, v, out, lse), "auto")

    def filled(call) -> int:
        with torch.profiler.profile(record_shapes=True) as profile:
            call()
        events = [event for event in profile.events() if event.name == "aten::fill_"]
        return sum(0 not in event.input_shapes[0] for event in events)

    expected, in_plain_mode = step(), filled(step)
    request.getfixturevalue("deterministic_mode")
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert filled(lambda: torch.empty(7, device="cuda")) == 1, "the control: there is nothing to avoid"
    assert filled(step) == in_plain_mode
    assert_same(step(), expected)
