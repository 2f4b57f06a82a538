"""Attention tile by tile, in plain torch: what runs on the CPU, and the specification of the kernel.

The backward adds in the kernel's orders: the contributions to a query tile's dQ in the order of the ranks
that a schedule gives, those to a KV tile's dK and dV in the order of its chain. For 16-bit tensors the
operands of every product are 16 bits wide and the sums float32, as on the tensor cores; float32 is computed
in float32 and float64 in float64.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from . import _native
from .checks import lse_dtype
from .schedule import make_policy


def forward(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Softmax attention, one query tile after the other with a running maximum and sum.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), float16, bfloat16, float32 or float64.
        k, v: (batch, seqlen_k, heads_k, head_dim); heads_k divides heads_q.
        softmax_scale: factor on the scores.
        causal: query r sees key c if c <= r + seqlen_k - seqlen_q.

    Returns:
        out like q, and the natural log-sum-exp of the scores, (batch, heads_q, seqlen_q) in float32 (float64
        for float64). A query that sees no key has out = 0 and lse = -inf.
    """
    batch, seqlen_q, heads_q, _ = q.shape
    grid = _grid(q, k, causal)
    heads_k = k.shape[2]
    wide = lse_dtype(q)
    qh = _by_head(q, heads_k, wide)
    kh, vh = _by_head(k, heads_k, wide), _by_head(v, heads_k, wide)
    out = torch.empty_like(qh)
    lse = qh.new_empty(qh.shape[:-1])
    for q_tile in range(grid.q_tiles()):
        rows = slice(q_tile * grid.q_rows, (q_tile + 1) * grid.q_rows)
        total = torch.zeros_like(qh[..., rows, :])
        row_max = total.new_full((*total.shape[:-1], 1), -math.inf)
        row_sum = torch.zeros_like(row_max)
        shift = row_sum
        for kv_tile in range(grid.contributors(q_tile)):
            keys = slice(kv_tile * grid.kv_rows, (kv_tile + 1) * grid.kv_rows)
            scores = _scores(grid, qh[..., rows, :], kh[..., keys, :], q_tile, kv_tile, softmax_scale)
            new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
            # Without a visible key so far the maximum is -inf, and -inf - (-inf) is no number.
            shift = new_max.masked_fill(new_max == -math.inf, 0.0)
            p = torch.exp(scores - shift)
            decay = torch.exp(row_max - shift)
            row_sum = row_sum * decay + p.sum(-1, keepdim=True)
            total = total * decay + _rounded(p, q.dtype) @ vh[..., keys, :]
            row_max = new_max
        out[..., rows, :] = total / row_sum.masked_fill(row_sum == 0, 1.0)
        lse[..., rows] = (shift + row_sum.log()).squeeze(-1)
    return _by_row(out, q.shape, q.dtype), lse.reshape(batch, heads_q, seqlen_q)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    causal: bool,
    schedule: str,
    dlse: Tensor | None = None,
    rounded: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `forward`, every sum in the order that `schedule` fixes.

    Args:
        dout, out: like q.
        q, k, v, softmax_scale, causal: as in `forward`.
        lse: what `forward` returned. With more keys than these, out and lse may be those of all of them.
        schedule: "naive", "descending", "shift" or "symmetric_shift".
        dlse: a gradient of lse, like lse. It does not matter where lse is -inf.
        rounded: False keeps the sums as they were added up, float32 for 16-bit tensors.

    Returns:
        dq, dk and dv, like q, k and v. Rows that no mask lets through get zeros.
    """
    heads_q, heads_k = q.shape[2], k.shape[2]
    grid = _grid(q, k, causal)
    policy = make_policy(schedule, grid)
    wide = lse_dtype(q)
    qh, doh, oh = (_by_head(x, heads_k, wide) for x in (q, dout, out))
    kh, vh = (_by_head(x, heads_k, wide).squeeze(2) for x in (k, v))
    lse_h = lse.reshape(qh.shape[:-1]).to(wide).unsqueeze(-1)
    blind = lse_h == -math.inf
    lse_h = lse_h.masked_fill(blind, math.inf)  # no visible key: every probability is 0
    delta = (doh * oh).sum(-1, keepdim=True)
    if dlse is not None:
        # The derivative of lse by a score is its probability, so dS = P (dP - (D - dlse)).
        delta = delta - dlse.reshape(lse_h.shape).to(wide).masked_fill(blind, 0.0)
    dqh, dk, dv = torch.empty_like(qh), torch.empty_like(kh), torch.empty_like(vh)
    # A chain walks the query heads of its part of the group; dK and dV are summed part after part.
    parts = _native.part_sizes(heads_q, heads_k, grid, q.shape[3], policy.waits_in_line)
    for way in range(policy.ways):
        mine = (slice(None), slice(way, None, policy.ways))
        begin = 0
        for size in parts:
            part = (*mine, slice(begin, begin + size))
            inputs = doh[part], qh[part], kh[mine], vh[mine], lse_h[part], delta[part]
            # Contiguous, since a product's bits may depend on the strides.
            inputs = tuple(x.contiguous() for x in inputs)
            tasks = tasks_in_order(policy, grid, size, way)
            dqh[part], dk_part, dv_part = _chains(*inputs, grid, tasks, softmax_scale, q.dtype)
            dk[mine] = dk_part if begin == 0 else dk[mine] + dk_part
            dv[mine] = dv_part if begin == 0 else dv[mine] + dv_part
            begin += size
    dtype = q.dtype if rounded else wide
    gradients = (dqh * softmax_scale, q), (dk * softmax_scale, k), (dv, v)
    dq, dk, dv = (_by_row(x, like.shape, dtype) for x, like in gradients)
    return dq, dk, dv


def _chains(doh, qh, kh, vh, lse_h, delta, grid, tasks, softmax_scale, dtype) -> tuple[Tensor, ...]:
    """The sums of `tasks`, in heads that all go one way: dQ and dK without their factor, and dV."""
    dqh, dk_parts, dv_parts = torch.zeros_like(qh), torch.zeros_like(kh), torch.zeros_like(vh)
    for kv_tile, head, q_tile in tasks:
        rows = slice(q_tile * grid.q_rows, (q_tile + 1) * grid.q_rows)
        keys = slice(kv_tile * grid.kv_rows, (kv_tile + 1) * grid.kv_rows)
        q_t, do_t, k_t, v_t = qh[:, :, head, rows], doh[:, :, head, rows], kh[:, :, keys], vh[:, :, keys]
        p = torch.exp(_scores(grid, q_t, k_t, q_tile, kv_tile, softmax_scale) - lse_h[:, :, head, rows])
        dp = do_t @ v_t.mT
        ds = _rounded(p * (dp - delta[:, :, head, rows]), dtype)
        dv_parts[:, :, keys] += _rounded(p, dtype).mT @ do_t
        dk_parts[:, :, keys] += ds.mT @ q_t
        dqh[:, :, head, rows] += ds @ k_t
    return dqh, dk_parts, dv_parts


def tasks_in_order(policy, grid, group: int, way: int = 0) -> Iterator[tuple[int, int, int]]:
    """(KV tile, head of the group, query tile), as tickets let them happen in heads that go a way.

    A chain advances while the ticket of the query tile that it visits equals its rank there. Chains could be
    served in any sequence: every single sum meets its summands in the same order. RuntimeError if no chain
    can advance, which a valid schedule never lets happen.
    """
    tickets = [[0] * grid.q_tiles() for _ in range(group)]
    chains = {kv_tile: policy.walk(kv_tile, group, way).tolist() for kv_tile in range(grid.kv_tiles())}
    steps = dict.fromkeys(chains, 0)
    left = sum(map(len, chains.values()))
    while left:
        before = left
        for kv_tile, walk in chains.items():
            for head, q_tile in walk[steps[kv_tile] :]:
                if tickets[head][q_tile] != policy.rank(kv_tile, q_tile, way):
                    break
                yield kv_tile, head, q_tile
                tickets[head][q_tile] += 1
                steps[kv_tile] += 1
                left -= 1
        if left == before:
            raise RuntimeError(f"the schedule {policy} stalls with {left} tasks left")


def _grid(q: Tensor, k: Tensor, causal: bool) -> _native.TileGrid:
    return _native.call_grid(q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], causal)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as an operand of a product of `dtype` tensors, in the accumulators' width."""
    return x.to(dtype).to(x.dtype)


def _by_head(x: Tensor, blocks: int, dtype: torch.dtype) -> Tensor:
    """(batch, rows, heads, dim) -> (batch, blocks, heads / blocks, rows, dim).

    Contiguous, since a product's bits may depend on the strides.
    """
    return x.transpose(1, 2).unflatten(1, (blocks, -1)).to(dtype).contiguous()


def _by_row(x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The inverse of `_by_head`: contiguous, (batch, rows, heads, dim)."""
    batch, rows, heads, dim = shape
    return x.reshape(batch, heads, rows, dim).transpose(1, 2).to(dtype).contiguous()


def _scores(grid, q: Tensor, k: Tensor, q_tile: int, kv_tile: int, softmax_scale: float) -> Tensor:
    scores = (q @ k.mT) * softmax_scale
    if grid.causal and grid.needs_mask(kv_tile, q_tile):
        row = torch.arange(q.shape[-2], device=q.device).unsqueeze(1) + q_tile * grid.q_rows
        key = torch.arange(k.shape[-2], device=q.device) + kv_tile * grid.kv_rows
        scores.masked_fill_(key > row + grid.offset(), -math.inf)
    return scores
