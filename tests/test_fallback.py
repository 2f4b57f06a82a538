"""What the fallback makes of torch's FlashAttention-2, with a stand-in for that in float64."""

import contextlib

import pytest
import torch
from oracle import attention

from dash_flash_attn import ops, reference


def flash2(dout, q, k, v, out, lse, *options, scale):
    """torch.ops.aten._flash_attention_backward, which knows no gradient of lse."""
    causal = options[5]
    assert not (lse == -torch.inf).any(), "it takes +inf for a query that sees no key"
    lse = lse.masked_fill(lse == torch.inf, -torch.inf)
    return reference.backward(dout, q, k, v, out, lse, scale, causal, "shift")


@pytest.mark.parametrize("scale", [0.3, -0.3])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "heads_q", "causal"),
    [(70, 50, 4, True), (50, 70, 2, True), (33, 64, 8, False)],
)
def test_gradient_of_the_log_sum_exp(
    seqlen_q: int, seqlen_k: int, heads_q: int, causal: bool, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash2)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(ops, "attention_forward", reference.forward)
    torch.manual_seed(0)
    q, dout = torch.randn(2, 2, seqlen_q, heads_q, 64, dtype=torch.float64)
    k, v = torch.randn(2, 2, seqlen_k, 2, 64, dtype=torch.float64)
    out, lse = reference.forward(q, k, v, scale, causal)
    dlse = torch.randn_like(lse)
    blind = max(0, seqlen_q - seqlen_k) if causal else 0
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    exact_out, exact_lse = attention(*leaves, scale, causal)
    loss = (exact_out * dout).sum() + (exact_lse * dlse)[:, :, blind:].sum()
    expected = torch.autograd.grad(loss, leaves)
    dlse[:, :, :blind] = torch.nan  # of no meaning there
    found = ops._backward_flash2(dout, q, k, v, out, lse, scale, causal, True, dlse)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)
