"""The kernels and torch's FlashAttention-2 against float64, on the same inputs."""

import pytest
import torch
from cases import SCHEDULES, Case, backward, forward, grid
from oracle import gradients, same_bits

from dash_flash_attn import forward as forward_module
from dash_flash_attn import ops


def distance(x: torch.Tensor, reference: torch.Tensor) -> float:
    return (x.double() - reference).norm().item()


def flash2(case: Case, dout, q, k, v) -> tuple[torch.Tensor, ...]:
    """torch's FlashAttention-2 by the package's own fallback, which is tested by it too."""
    out, lse = forward_module._flash(q, k, v, case.scale, case.causal)
    return out, *ops._backward_flash2(dout, q, k, v, out, lse, case.scale, case.causal, True)


@pytest.mark.parametrize("case", grid(unequal=48), ids=lambda case: case.name)
def test_no_further_from_float64_than_flash_attention_2(case: Case) -> None:
    q, k, v, dout = case.inputs()
    reference = gradients(dout, q, k, v, case.scale, case.causal)
    peer = flash2(case, dout, q, k, v)
    out, lse = forward(case, q, k, v)
    for schedule in (*SCHEDULES, "unordered"):
        ours = backward(case, (dout, q, k, v, out, lse), schedule)
        for name, x, y, exact in zip(("out", "dq", "dk", "dv"), (out, *ours), peer, reference, strict=True):
            assert x.shape == exact.shape and x.isfinite().all(), (schedule, name)
            # Where the true value is 0 (one key: dq, dk) both errors are rounding noise of float32.
            noise = 1e-5 * exact.numel() ** 0.5
            floor = noise if exact.norm() < noise else 1e-6 * exact.norm().item()
            error, allowed = distance(x, exact), 1.1 * distance(y, exact) + floor
            assert error <= allowed, f"{schedule}, {name}: error {error:.3e}, allowed {allowed:.3e}"


@pytest.mark.parametrize("softmax_scale", [0.01, 1.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_softmax_scale(head_dim: int, softmax_scale: float) -> None:
    case = Case(300, 300, 4, 2, head_dim, torch.bfloat16, True)
    q, k, v, dout = case.inputs()
    reference = gradients(dout, q, k, v, softmax_scale, True)
    out, lse = torch.ops.dash_flash_attn.forward(q, k, v, softmax_scale, True)
    ours = torch.ops.dash_flash_attn.backward(dout, q, k, v, out, lse, softmax_scale, True, "auto", 0)
    for x, exact in zip((out, *ours), reference, strict=True):
        assert distance(x, exact) <= 1e-2 * exact.norm().item()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_queries_that_see_no_key(schedule: str, head_dim: int) -> None:
    case = Case(500, 200, 4, 2, head_dim, torch.bfloat16, True)
    q, k, v, dout = case.inputs()
    out, lse = forward(case, q, k, v)
    grads = backward(case, (dout, q, k, v, out, lse), schedule)
    blind = case.seqlen_q - case.seqlen_k
    assert (out[:, :blind] == 0).all() and (lse[:, :, :blind] == -torch.inf).all()
    assert (grads[0][:, :blind] == 0).all()
    assert all(x.isfinite().all() for x in grads)
    # They must not matter to anything else: other values there, the same bits elsewhere.
    q2, dout2 = q.clone(), dout.clone()
    q2[:, :blind], dout2[:, :blind] = 7.0, -3.0
    again = backward(case, (dout2, q2, k, v, *forward(case, q2, k, v)), schedule)
    assert all(torch.equal(x, y) for x, y in zip(grads, again, strict=True))


@pytest.mark.parametrize("schedule", ["naive", "shift"])
def test_more_heads_than_an_estimated_quotient_tells_apart(schedule: str) -> None:
    """csrc/schedule/tile_grid.h, quotient: its first estimate is off by more than one in the millions."""
    case = Case(1, 1, 66, 66, 64, torch.bfloat16, False, batch=65535)
    q, k, v, dout = case.inputs()
    lse = (q.float() * k).sum(-1).transpose(1, 2).contiguous() * case.scale
    # With one key all probabilities are 1.
    dq, dk, dv = backward(case, (dout, q, k, v, v, lse), schedule)
    assert same_bits(dv, dout)
    assert max(dq.abs().max().item(), dk.abs().max().item()) < 1e-3
