"""Tensors, streams, graphs and devices as callers bring them: the same bits as the plain call."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import Case, assert_same, backward, captured, forward, plain
from oracle import gradients, same_bits

from dash_flash_attn import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func

CASE = Case(300, 300, 4, 4, 64, torch.bfloat16, True)


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
    (_, *tensors), _ = plain(CASE)
    ones = torch.ones_like(q)
    assert_same((q.grad, k.grad, v.grad), backward(CASE, (ones, *tensors), "auto"))


def test_packed_tensors() -> None:
    (dout, q, k, v, *_), expected = plain(CASE)
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
    tensors, expected = plain(CASE)
    dout, q, k, v, *_ = tensors

    def step():
        out, lse = forward(CASE, q, k, v)
        return out, *backward(CASE, (dout, q, k, v, out, lse), "auto")

    graph, results = captured(step)
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
    tensors, expected = plain(CASE)
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

    def step() -> None:
        for x in leaves:
            x.grad = None
        flash_attn_func(*leaves, causal=True, deterministic=True).backward(dout)

    graph, _ = captured(step)
    graph.replay()
    assert_same([x.grad for x in leaves], plain(CASE)[1])


def test_another_stream() -> None:
    """Work goes to the caller's stream: it sees what that stream wrote before, and nothing waits for it."""
    tensors, expected = plain(CASE)
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
    tensors, expected = plain(CASE)
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


def test_torch_compile() -> None:
    (dout, q, k, v, *_), expected = plain(CASE)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    compiled = torch.compile(lambda *x: flash_attn_func(*x, causal=True, deterministic=True), fullgraph=True)
    compiled(*leaves).backward(dout)
    assert_same([x.grad for x in leaves], expected)


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
