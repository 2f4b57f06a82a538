"""Ring attention in one process, made from the lower-level functions as its libraries do.

A rank has a part of the queries and, step by step, each part of the keys. Under a causal mask parts are
zigzag: the sequence is cut into two chunks a rank, and rank i has chunk i and the i-th one from the end. So a
step has the mask, or no mask and half of the keys or half of the queries.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from dash_flash_attn import _flash_attn_backward, _flash_attn_forward


def parts(x: Tensor, ranks: int, causal: bool) -> list[Tensor]:
    """What each rank has of x, (batch, seqlen, heads, head_dim)."""
    if not causal:
        return list(x.chunk(ranks, dim=1))
    chunks = x.chunk(2 * ranks, dim=1)
    return [torch.cat((chunks[i], chunks[-1 - i]), dim=1) for i in range(ranks)]


def whole(shards: list[Tensor], causal: bool) -> Tensor:
    """The inverse of `parts`."""
    if not causal:
        return torch.cat(shards, dim=1)
    halves = [x.chunk(2, dim=1) for x in shards]
    return torch.cat([first for first, _ in halves] + [last for _, last in reversed(halves)], dim=1)


def steps(rank: int, ranks: int, rows: int, causal: bool) -> Iterator[tuple[int, slice, slice, bool]]:
    """(whose keys, which queries, which of these keys, mask) of each step of a rank; `rows` in each part."""
    everything, half = slice(None), rows // 2
    for step in range(ranks):
        owner = (rank - step) % ranks
        if not causal or owner == rank:
            yield owner, everything, everything, causal
        elif owner < rank:
            yield owner, everything, slice(0, half), False
        else:
            yield owner, slice(half, rows), everything, False


def forward(
    q: list[Tensor], k: list[Tensor], v: list[Tensor], softmax_scale: float, causal: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Each rank's out, and its log-sum-exp over all keys. Merged in the log-sum-exp's dtype."""
    ranks, outs, lses = len(q), [], []
    for rank in range(ranks):
        out = lse = None
        for owner, rows, keys, mask in steps(rank, ranks, q[rank].shape[1], causal):
            block, block_lse, _, _ = _flash_attn_forward(
                q[rank][:, rows],
                k[owner][:, keys],
                v[owner][:, keys],
                softmax_scale=softmax_scale,
                causal=mask,
            )
            if out is None:
                # In rows, as out is: what the backward gets has strides.
                out, lse = block.to(block_lse.dtype), block_lse.transpose(1, 2).contiguous()
                continue
            block_lse = block_lse.transpose(1, 2)
            before = lse[:, rows].clone()
            lse[:, rows] = torch.logaddexp(before, block_lse)
            out[:, rows] *= torch.exp(before - lse[:, rows]).unsqueeze(-1)
            out[:, rows] += torch.exp(block_lse - lse[:, rows]).unsqueeze(-1) * block
        outs.append(out.to(q[rank].dtype))
        lses.append(lse.transpose(1, 2))
    return outs, lses


def backward(
    dout: list[Tensor],
    q: list[Tensor],
    k: list[Tensor],
    v: list[Tensor],
    outs: list[Tensor],
    lses: list[Tensor],
    softmax_scale: float,
    causal: bool,
    buffer_dtype: torch.dtype,
) -> list[list[Tensor]]:
    """dq, dk and dv of each rank: the sums, in lse's dtype, of buffers that each step writes into."""
    ranks = len(q)
    sums = [[torch.zeros_like(x, dtype=lses[0].dtype) for x in shards] for shards in (q, k, v)]
    for rank in range(ranks):
        buffers = [torch.empty_like(x[rank], dtype=buffer_dtype) for x in (q, k, v)]
        for owner, rows, keys, mask in steps(rank, ranks, q[rank].shape[1], causal):
            dq, dk, dv = (x[:, y] for x, y in zip(buffers, (rows, keys, keys), strict=True))
            _flash_attn_backward(
                dout[rank][:, rows], q[rank][:, rows], k[owner][:, keys], v[owner][:, keys],
                outs[rank][:, rows], lses[rank][:, :, rows], dq=dq, dk=dk, dv=dv,
                softmax_scale=softmax_scale, is_causal=mask,
            )  # fmt: skip
            sums[0][rank][:, rows] += dq
            sums[1][owner][:, keys] += dk
            sums[2][owner][:, keys] += dv
    return sums


def attention(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, ranks: int, softmax_scale: float, causal: bool,
    buffer_dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    """out, dq, dk and dv of the whole sequence."""
    dout, q, k, v = (parts(x, ranks, causal) for x in (dout, q, k, v))
    outs, lses = forward(q, k, v, softmax_scale, causal)
    sums = backward(dout, q, k, v, outs, lses, softmax_scale, causal, buffer_dtype)
    return [whole(x, causal) for x in (outs, *sums)]
