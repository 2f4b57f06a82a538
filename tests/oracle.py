"""Dense attention in float64: what every implementation is measured against."""

import torch
from torch import Tensor

# The tests' tensors are small: more threads gain nothing, and beside a busy compiler they lose much.
torch.set_num_threads(1)


def visible(seqlen_q: int, seqlen_k: int, causal: bool, device: torch.device | str = "cpu") -> Tensor:
    """(seqlen_q, seqlen_k): whether query r sees key c; a causal mask ends in the lower right corner."""
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    return mask.tril(seqlen_k - seqlen_q) if causal else mask


def attention(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Differentiable; out like q in float64, and the log-sum-exp, (batch, heads_q, seqlen_q)."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    mask = visible(q.shape[2], k.shape[2], causal, q.device)
    scores = (softmax_scale * q @ k.mT).masked_fill(~mask, -torch.inf)
    # The softmax of a row without a visible key is no number; its output is 0.
    p = torch.softmax(scores, dim=-1).masked_fill(~mask.any(-1, keepdim=True), 0.0)
    return (p @ v).transpose(1, 2), torch.logsumexp(scores, dim=-1)


def gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, dq, dk and dv in float64, head by head, so that long sequences fit into memory."""
    group = q.shape[2] // k.shape[2]
    mask = visible(q.shape[1], k.shape[1], causal, q.device)
    blind = ~mask.any(-1, keepdim=True)
    out, dq, dk, dv = (torch.zeros_like(x, dtype=torch.float64) for x in (q, q, k, v))
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            q_h, do_h = q[b, :, h].double(), dout[b, :, h].double()
            k_h, v_h = k[b, :, h // group].double(), v[b, :, h // group].double()
            scores = (softmax_scale * q_h @ k_h.T).masked_fill(~mask, -torch.inf)
            p = torch.softmax(scores, dim=-1).masked_fill(blind, 0.0)
            o_h = p @ v_h
            ds = p * (do_h @ v_h.T - (do_h * o_h).sum(-1, keepdim=True)) * softmax_scale
            out[b, :, h] = o_h
            dq[b, :, h] = ds @ k_h
            dk[b, :, h // group] += ds.T @ q_h
            dv[b, :, h // group] += p.T @ do_h
    return out, dq, dk, dv


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Equal as bits: distinguishes the two zeros, and a NaN equals itself."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.dtype == y.dtype and torch.equal(x.contiguous().view(integer), y.contiguous().view(integer))
