"""The functions that users call, with the argument names and positions of FlashAttention-3."""

from collections.abc import Sequence

from torch import Tensor

from . import ops
from .checks import (
    check_attention,
    check_causal,
    check_dense,
    check_features,
    check_heads_q,
    check_schedule,
    check_window,
    scale_for,
)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int | None] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int | None = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    schedule: str | None = None,
    deterministic_schedule: str | None = None,
    dropout_p: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention, out = softmax(softmax_scale * q k^T + mask) v, with a reproducible backward.

    On a GPU of compute capability 9.0 the backward runs this package's kernels, on other GPUs torch's
    FlashAttention-2 (with one warning), on the CPU the reference. The forward is always reproducible, and so
    is the backward, but with schedule="unordered": the same inputs give the same bits on every run.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim). On CUDA bfloat16 or float16 with head_dim 64 or 128; on the
            CPU also float32 and float64, and any head_dim. Under torch.autocast q, k and v are cast.
        k, v: (batch, seqlen_k, heads_k, head_dim), in q's dtype and on its device. heads_k divides heads_q;
            query head i reads KV head i // (heads_q / heads_k).
        softmax_scale: factor on the scores, 1 / sqrt(head_dim) by default. Not 0, and no tensor: a scale that
            is learned is multiplied into q.
        causal: query r sees key c only if c <= r + seqlen_k - seqlen_q: the mask is aligned to the lower
            right corner. A query that sees no key gets out = 0, and contributes zeros to every gradient.
        window_size: (left, right), how many keys a query sees on either side of that diagonal, -1 or None
            for all. Only windows that leave the mask as it is: (-1, 0) is another way to write causal=True,
            and a side that reaches all keys is no limit.
        deterministic: no effect, for callers of FlashAttention: the backward is deterministic with True and
            with False, since no other order of its sums is faster.
        sm_margin: streaming multiprocessors that the backward leaves to other kernels. No effect on the bits.
        return_attn_probs: also return the log-sum-exp, as FlashAttention-3 does.
        schedule: "naive", "descending", "shift" or "symmetric_shift": the sequence in which the backward
            visits tiles and the order of its sums (arXiv 2601.21824). None or "auto" chooses by shape alone.
            "unordered" is the control that the others are measured against: it visits as "auto" does and sums
            dq in the order of arrival, so that on CUDA each run has other bits.
        deterministic_schedule: another name for schedule.
        num_splits, pack_gqa: no effect: the keys of a row are never split, and query heads never packed.
        qv, q_descale, k_descale, v_descale, attention_chunk, softcap, dropout_p, alibi_slopes: accepted where
            they ask for nothing (None, 0; a softcap of 0 or less), for callers of FlashAttention-2 and 3.

    Returns:
        out, like q. With return_attn_probs also lse, (batch, heads_q, seqlen_q) in float32: the natural
        logarithm of the sum of the exponentials of the scaled scores, -inf for a query that sees no key.
        Both have gradients.

    Raises:
        ValueError, TypeError: tensors that do not fit together, a scale that is 0 or not finite, an unknown
            schedule, "unordered" with deterministic=True.
        NotImplementedError: an option that is not supported.
        RuntimeError: "unordered" under torch.use_deterministic_algorithms(True), unless it only warns; in the
            backward, if a cyclic schedule needs more SMs than sm_margin leaves.
        Nothing has been launched then.
    """
    check_attention(q, k, v)
    scale = scale_for(q, softmax_scale)
    causal = check_window(window_size, check_causal(causal), q.shape[1], k.shape[1])
    check_features(
        qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk,
        softcap=softcap, num_splits=num_splits, pack_gqa=pack_gqa, dropout_p=dropout_p,
        alibi_slopes=alibi_slopes, sm_margin=sm_margin,
    )  # fmt: skip
    name = check_schedule(schedule, deterministic_schedule, deterministic)
    out, lse = ops.attention(q, k, v, scale, causal, name, sm_margin)
    return (out, lse) if return_attn_probs else out


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int | None] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int | None = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    schedule: str | None = None,
    deterministic_schedule: str | None = None,
    dropout_p: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attn_func` for keys and values in one tensor.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim).
        kv: (batch, seqlen_k, 2, heads_k, head_dim), keys first. Read in place; its gradient has its shape.

    The other arguments, the result and the errors are those of `flash_attn_func`.
    """
    check_dense("kv", kv)
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ValueError(f"kv: expected (batch, seqlen, 2, heads, head_dim), got {tuple(kv.shape)}")
    k, v = kv.unbind(2)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, qv, q_descale, k_descale, v_descale, window_size, attention_chunk,
        softcap, num_splits, pack_gqa, deterministic, sm_margin, return_attn_probs,
        schedule=schedule, deterministic_schedule=deterministic_schedule, dropout_p=dropout_p,
        alibi_slopes=alibi_slopes,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int | None] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    schedule: str | None = None,
    deterministic_schedule: str | None = None,
    dropout_p: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attn_func` for queries, keys and values in one tensor.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim), or, with num_heads_q, (batch, seqlen, heads_q + 2 heads_k,
            head_dim). Read in place; its gradient has its shape.
        num_heads_q: heads_q of a tensor with four dimensions.

    The other arguments, the result and the errors are those of `flash_attn_func`.
    """
    check_dense("qkv", qkv)
    check_heads_q(num_heads_q)
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        if num_heads_q not in (None, qkv.shape[3]):
            raise ValueError(f"num_heads_q: qkv says {qkv.shape[3]}, got {num_heads_q}")
        q, k, v = qkv.unbind(2)
    elif qkv.dim() == 4:
        if num_heads_q is None:
            raise ValueError("num_heads_q: needed for a qkv of four dimensions")
        rest = qkv.shape[2] - num_heads_q
        if num_heads_q < 1 or rest < 2 or rest % 2:
            raise ValueError(f"num_heads_q: {num_heads_q} of {qkv.shape[2]} heads leave no pairs of k and v")
        q, k, v = qkv.split([num_heads_q, rest // 2, rest // 2], dim=2)
    else:
        raise ValueError(
            "qkv: expected (batch, seqlen, 3, heads, head_dim) or (batch, seqlen, heads, head_dim), "
            f"got {tuple(qkv.shape)}"
        )
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk,
        softcap, deterministic=deterministic, sm_margin=sm_margin, return_attn_probs=return_attn_probs,
        schedule=schedule, deterministic_schedule=deterministic_schedule, dropout_p=dropout_p,
        alibi_slopes=alibi_slopes,
    )  # fmt: skip
