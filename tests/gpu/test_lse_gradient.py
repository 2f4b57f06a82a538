"""The backward with a gradient of the log-sum-exp, against autograd in float64: kernels, callers."""

import pytest
import torch
from cases import SCHEDULES, Case, assert_same, backward, forward, plain
from oracle import attention, same_bits
from torch import Tensor

from dash_flash_attn import _native, flash_attn_func, kernels
from dash_flash_attn.layout import matrix

BF16, FP16 = torch.bfloat16, torch.float16
CASES = [
    Case(300, 300, 4, 4, 64, BF16, True),
    Case(300, 300, 4, 4, 128, FP16, False),
    Case(1000, 1000, 8, 2, 128, BF16, True),
    Case(1000, 700, 6, 3, 64, FP16, True),  # 300 blind queries: whole tiles, and a part of one
    Case(500, 400, 8, 1, 128, BF16, True),
    Case(200, 333, 8, 1, 128, FP16, True),
    Case(1, 129, 3, 3, 64, BF16, False),
    Case(2048, 2048, 16, 1, 128, BF16, False, batch=1),  # parts of a group
    Case(2048, 2048, 64, 64, 64, BF16, False, batch=1),  # both sides of the L2 cache
]


def prepared(case: Case) -> tuple[tuple[Tensor, ...], Tensor, int]:
    """(dout, q, k, v, out, lse), a gradient of lse, and how many queries see no key."""
    q, k, v, dout = case.inputs()
    tensors = dout, q, k, v, *forward(case, q, k, v)
    g = torch.Generator("cuda").manual_seed(1)
    dlse = 3 * torch.randn(tensors[5].shape, generator=g, device="cuda")
    return tensors, dlse, max(0, case.seqlen_q - case.seqlen_k) if case.causal else 0


def gradients(case: Case, tensors: tuple[Tensor, ...], dlse: Tensor | None, schedule: str) -> list[Tensor]:
    """dq, dk and dv from the native function."""
    assert kernels.not_loaded() is None
    dout, q, k, v, out, lse = tensors
    results = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    sizes = case.batch, case.seqlen_q, case.seqlen_k, case.heads_q, case.heads_k, case.head_dim
    workspace = torch.empty(
        _native.workspace_bytes(*sizes, case.causal, schedule), dtype=torch.uint8, device="cuda"
    )
    _native.backward(
        *map(matrix, (q, k, v, out, dout, *results)), lse.data_ptr(),
        0 if dlse is None else dlse.data_ptr(), workspace.data_ptr(), sizes, case.scale, case.causal,
        "bf16" if case.dtype == BF16 else "fp16", schedule, True, 0, 0, 10_000_000_000,
        torch.cuda.current_stream().cuda_stream,
    )  # fmt: skip
    return results


def exact(case: Case, tensors: tuple[Tensor, ...], dlse: Tensor, blind: int) -> tuple[Tensor, ...]:
    """The gradients of sum(out * dout) + sum(lse * dlse), by autograd in float64."""
    dout, *inputs = tensors[:4]
    leaves = [x.double().requires_grad_() for x in inputs]
    out, lse = attention(*leaves, case.scale, case.causal)
    loss = (out * dout).sum() + (lse * dlse)[:, :, blind:].sum()
    return torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_value(case: Case) -> None:
    tensors, dlse, blind = prepared(case)
    expected = exact(case, tensors, dlse, blind)
    without = gradients(case, tensors, None, "shift")
    dlse[:, :, :blind] = torch.nan  # of no meaning there
    for schedule in SCHEDULES:
        results = gradients(case, tensors, dlse, schedule)
        for name, x, y in zip(("dq", "dk", "dv"), results, expected, strict=True):
            error = (x.double() - y).norm() / y.norm()
            assert error < 1e-2, f"{schedule}: {name} is off by {error:.1%}"
        for x, y in zip(results, gradients(case, tensors, dlse, schedule), strict=True):
            assert same_bits(x, y), schedule
    # It matters to dQ and dK, and not at all to dV.
    for x, y in zip(expected[:2], without[:2], strict=True):
        assert (x - y.double()).norm() > 0.1 * x.norm()
    assert same_bits(gradients(case, tensors, dlse, "shift")[2], without[2])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_gradient_of_zero_is_none(case: Case) -> None:
    tensors, dlse, _ = prepared(case)
    with_zeros = gradients(case, tensors, torch.zeros_like(dlse), "shift")
    for x, y in zip(with_zeros, gradients(case, tensors, None, "shift"), strict=True):
        assert same_bits(x, y)


@pytest.mark.parametrize("case", [CASES[2], CASES[3], CASES[8]], ids=lambda case: case.name)
def test_repeats_its_bits(case: Case) -> None:
    tensors, dlse, _ = prepared(case)
    first = gradients(case, tensors, dlse, "shift")
    for run in range(20):
        for x, y in zip(gradients(case, tensors, dlse, "shift"), first, strict=True):
            assert same_bits(x, y), f"run {run}"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("results", ["out and lse", "lse"])
def test_public_function(results: str, case: Case) -> None:
    """A loss of lse, with and without one of out."""
    (dout, q, k, v, *_), dlse, blind = prepared(case)
    only_lse = results == "lse"
    exact_dout = torch.zeros_like(dout) if only_lse else dout
    expected = exact(case, (exact_dout, q, k, v), dlse, blind)
    dlse[:, :, :blind] = torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = flash_attn_func(*leaves, causal=case.causal, return_attn_probs=True)
    outputs, given = ((lse,), (dlse,)) if only_lse else ((out, lse), (dout, dlse))
    found = torch.autograd.grad(outputs, leaves, given, retain_graph=True)
    for name, x, y in zip(("dq", "dk", "dv"), found, expected, strict=True):
        assert x.isfinite().all(), name
        error = (x.double() - y).norm()
        # v does not matter to lse: its gradient is 0, and so is the allowed error.
        assert error <= 1e-2 * y.norm(), f"{name} is off by {error:.3g} of {y.norm():.3g}"
    assert_same(torch.autograd.grad(outputs, leaves, given), found)


@pytest.mark.usefixtures("gpu")
def test_the_layout_of_a_gradient_of_the_log_sum_exp_does_not_matter() -> None:
    tensors, expected = plain(CASES[0])
    lse = tensors[-1]
    dlse = torch.randn_like(lse)
    results = backward(CASES[0], tensors, "auto", dlse=dlse)
    strided = dlse.transpose(1, 2).contiguous().transpose(1, 2)
    assert not strided.is_contiguous()
    assert_same(backward(CASES[0], tensors, "auto", dlse=strided), results)
    # Not bit by bit: the fallback adds what this makes of dQ and dK, and -0 + 0 is +0.
    assert all(map(torch.equal, backward(CASES[0], tensors, "auto", dlse=torch.zeros_like(lse)), expected))
    one = torch.ones((), device="cuda").expand(lse.shape)
    assert_same(
        backward(CASES[0], tensors, "auto", dlse=one), backward(CASES[0], tensors, "auto", dlse=one.clone())
    )
