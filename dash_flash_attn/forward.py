"""The forward pass on CUDA: torch's own kernels behind one function.

The bits of a result may depend on shape, dtype, mask and inputs of its batch entry, not on the batch around
it. So the kernels used here never split a row's keys over CTAs, which torch's FlashAttention-2 does by
occupancy unless the call has the variable-length form.
"""

import torch
from torch import Tensor

from .layout import addressable
from .torch_settings import unfilled_memory

# None: cuDNN where it can, FlashAttention-2 elsewhere. "cudnn" or "flash": only that one, for measurements.
BACKEND: str | None = None


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Softmax attention on CUDA with its log-sum-exp.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), bfloat16 or float16, not empty.
        k, v: (batch, seqlen_k, heads_k, head_dim); heads_k divides heads_q; seqlen_k is not 0.
        softmax_scale: factor on the scores.
        causal: query r sees key c if c <= r + seqlen_k - seqlen_q.

    Returns:
        out, contiguous, like q; lse, float32 (batch, heads_q, seqlen_q), contiguous. A query that sees no
        key has out = 0 and lse = -inf.
    """
    q, k, v = map(addressable, (q, k, v))
    backend = BACKEND or ("cudnn" if cudnn_applies(q, k) else "flash")
    with unfilled_memory():
        out, lse = (_cudnn if backend == "cudnn" else _flash)(q, k, v, softmax_scale, causal)
    blind = q.shape[1] - k.shape[1] if causal else 0
    if blind > 0:
        # The kernels differ in what they leave here: +inf, -inf.
        out[:, :blind] = 0
        lse[:, :, :blind] = -torch.inf
    return out, lse


def cudnn_applies(q: Tensor, k: Tensor) -> bool:
    """Whether cuDNN computes this call.

    Its causal mask is aligned top-left, it refuses single rows, and with few queries and many keys it might
    split a row's keys, which would depend on the batch. Equal lengths are what was measured not to.
    """
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    return seqlen_q == seqlen_k > 1


def _cudnn(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        None,
        True,
        is_causal=causal,
        scale=softmax_scale,
    )
    return out.transpose(1, 2).contiguous(), _by_head(lse, q)


def _flash(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    if q.shape[1] == 1 and q.shape[2] != k.shape[2]:
        # A single query of grouped heads goes to a decoding path that splits the keys. Two do not; under a
        # causal mask the second is the one that sees every key.
        out, lse = _flash(q.expand(-1, 2, -1, -1).contiguous(), k, v, softmax_scale, causal)
        return out[:, 1:].contiguous(), lse[:, :, 1:].contiguous()
    batch, seqlen_q = q.shape[:2]
    seqlen_k = k.shape[1]
    starts_q = _starts(batch, seqlen_q, q.device)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        starts_q,
        starts_q if seqlen_k == seqlen_q else _starts(batch, seqlen_k, q.device),
        seqlen_q,
        seqlen_k,
        0.0,
        causal,
        False,
        scale=softmax_scale,
    )
    return out.view(q.shape), _by_head(lse, q)


def _starts(batch: int, seqlen: int, device: torch.device) -> Tensor:
    return torch.arange(0, (batch + 1) * seqlen, seqlen, dtype=torch.int32, device=device)


def _by_head(lse: Tensor, q: Tensor) -> Tensor:
    """torch's log-sum-exp, in one of three shapes, as contiguous (batch, heads_q, seqlen_q)."""
    batch, seqlen_q, heads_q, _ = q.shape
    if lse.dim() == 2:  # (heads_q, batch * seqlen_q): the variable-length form
        return lse.view(heads_q, batch, seqlen_q).transpose(0, 1).contiguous()
    return lse.reshape(batch, heads_q, seqlen_q)  # (..., seqlen_q) or (..., seqlen_q, 1)
