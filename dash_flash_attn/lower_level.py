"""Both passes as functions of their own, for libraries of ring and context-parallel attention.

They have FlashAttention-3's names, argument names and positions. They make no node in autograd's graph, since
their caller is an autograd function. It calls them for each block of keys, and merges the results.
"""

import torch
from torch import Tensor

from . import into
from .checks import (
    check_attention,
    check_count,
    check_dense,
    check_features,
    check_flag,
    check_none,
    check_place,
    check_schedule,
    check_statistics,
    check_window,
    lse_dtype,
    scale_for,
)

_NO_LENGTHS = "there are no batches of variable length"
_NO_CACHE = "there is no cache of keys and values"
_NO_ROTATION = "there are no rotary embeddings"


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int | None = -1,
    window_size_right: int | None = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int | None = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The forward pass of `flash_attn_func`, without a node in autograd's graph.

    Args:
        q, k, v, softmax_scale, causal, sm_margin: as in `flash_attn_func`, but torch.autocast casts nothing.
        out_: gets a copy of the output: q's shape, dtype and device, any strides but 0.
        window_size_left, window_size_right: the two sides of `flash_attn_func`'s window_size.
        max_seqlen_q, max_seqlen_k, rotary_interleaved, num_splits, pack_gqa: no effect.
        k_new to seqused_k, page_table to v_descale, scheduler_metadata: must be None.
        attention_chunk, softcap: must be 0; softcap may be below.

    Returns:
        (out, lse, out_accum, lse_accum). out is out_ or a new tensor like q. lse, (batch, heads_q, seqlen_q)
        in float32, is -inf for a query that sees no key. The last two, FlashAttention-3's parts of rows whose
        keys it splits, are empty, as they are there without splits.

    Raises:
        ValueError, TypeError, NotImplementedError: as `flash_attn_func`, before anything is launched.
    """
    check_attention(q, k, v)
    scale = scale_for(q, softmax_scale)
    causal = check_flag("causal", causal)
    causal = _mask(q, k, causal, window_size_left, window_size_right)
    _check_lengths(
        max_seqlen_q, max_seqlen_k, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        cu_seqlens_k_new=cu_seqlens_k_new, seqused_q=seqused_q, seqused_k=seqused_k, leftpad_k=leftpad_k,
    )  # fmt: skip
    check_none(_NO_CACHE, k_new=k_new, v_new=v_new, page_table=page_table, kv_batch_idx=kv_batch_idx)
    check_none(
        _NO_ROTATION, rotary_cos=rotary_cos, rotary_sin=rotary_sin, seqlens_rotary=seqlens_rotary
    )  # fmt: skip
    check_none("its format is FlashAttention-3's", scheduler_metadata=scheduler_metadata)
    check_flag("rotary_interleaved", rotary_interleaved)
    check_features(
        qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk,
        softcap=softcap, num_splits=num_splits, pack_gqa=pack_gqa, sm_margin=sm_margin,
    )  # fmt: skip
    if out_ is not None:
        check_dense("out_", out_)
        check_place("out_", out_, q, (q.dtype,))
    out, lse = into.forward(q, k, v, out_, scale, causal, sm_margin)
    return out, lse, _nothing(q), _nothing(q)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int | None = -1,
    window_size_right: int | None = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
    *,
    schedule: str | None = None,
) -> Tensor:
    """The backward pass of `flash_attn_func`, which writes into dq, dk and dv.

    It is linear in what the keys contribute: with the out and the log-sum-exp of all keys, the results for
    blocks of keys are these keys' dk and dv, and add up to dq.

    Args:
        dout, out: (batch, seqlen_q, heads_q, head_dim), like q.
        q, k, v: as in `flash_attn_func`.
        softmax_lse: (batch, heads_q, seqlen_q) in float32, of any strides (copied unless contiguous).
            out and softmax_lse are those of `_flash_attn_forward`, or of more keys than k has.
        dq, dk, dv: where the results go: shape, dtype and device of q, k and v. None for what is not wanted,
            but not for all of them. Strides are any but 0. The kernels write in place where the last
            dimension is contiguous, and address and other strides are multiples of 16 bytes; elsewhere a copy
            follows. They overlap neither each other nor the inputs. On the CPU any of them may also be
            float32 for 16-bit inputs: it gets the sums before they are rounded.
        softmax_scale, deterministic, sm_margin, schedule: as in `flash_attn_func`.
        is_causal: its causal.
        window_size_left, window_size_right: the two sides of its window_size.
        cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k: must be None.
        max_seqlen_q, max_seqlen_k: no effect.
        softcap: must be 0 or less.

    Returns:
        An empty float32 tensor, in the place of FlashAttention-3's softmax_d: the kernels do not keep that.

    Raises:
        ValueError, TypeError, NotImplementedError: as `flash_attn_func`, and by its name for a tensor that
            does not fit. float32 for 16-bit gradients on CUDA: NotImplementedError.
        RuntimeError: as in the backward of `flash_attn_func`.
        Nothing has been launched then.
    """
    check_attention(q, k, v)
    tensors = dout, q, k, v, out, softmax_lse
    for name, x in (("dout", dout), ("out", out), ("softmax_lse", softmax_lse)):
        check_dense(name, x)
    check_statistics("softmax_lse", softmax_lse, q)
    places = dq, dk, dv
    for name, x, like in zip(("dq", "dk", "dv"), places, (q, k, v), strict=True):
        if x is not None:
            check_dense(name, x)
            check_place(name, x, like, (q.dtype, lse_dtype(q)))
    if dq is None and dk is None and dv is None:
        raise ValueError("dq, dk, dv: all are None, and the gradients are not returned")
    scale = scale_for(q, softmax_scale)
    causal = check_flag("is_causal", is_causal)
    causal = _mask(q, k, causal, window_size_left, window_size_right)
    _check_lengths(
        max_seqlen_q, max_seqlen_k, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        sequed_q=sequed_q, sequed_k=sequed_k,
    )  # fmt: skip
    check_features(softcap=softcap, sm_margin=sm_margin)
    name = check_schedule(schedule, None, deterministic)
    into.backward(tensors, places, scale, causal, name, sm_margin)
    return _nothing(q)


def _mask(q: Tensor, k: Tensor, causal: bool, left: int | None, right: int | None) -> bool:
    names = "window_size_left, window_size_right"
    return check_window((left, right), causal, q.shape[1], k.shape[1], names)


def _check_lengths(max_seqlen_q: object, max_seqlen_k: object, **tensors: object) -> None:
    check_none(_NO_LENGTHS, **tensors)
    for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if value is not None:
            check_count(name, value, "tokens")


def _nothing(q: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.float32, device=q.device)
