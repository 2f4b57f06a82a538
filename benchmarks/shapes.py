"""The problems that the backward is timed on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dash_flash_attn.lab.calibrate import HIDDEN, PAPER_SHAPES, TOKENS, Shape

__all__ = [
    "HIDDEN",
    "LLAMA3_8B",
    "PAPER_SHAPES",
    "SHORT",
    "SINGLE",
    "TOKENS",
    "Shape",
    "cell_name",
    "counted_pairs",
    "describe",
    "flop",
    "fp32_dq_bytes",
    "inputs",
]

SHORT = tuple(shape for shape in PAPER_SHAPES if shape.seqlen <= 1024)
"""The paper's shapes with the shortest sequences."""

SINGLE = tuple(Shape(128, True, 2048, 1, 32, kv_heads) for kv_heads in (4, 1))
"""One sequence, which leaves a GPU little to do at a time."""

LLAMA3_8B = tuple(Shape(128, True, seqlen, TOKENS // seqlen, 32, 8) for seqlen in (2048, 4096, 8192, 16384))
"""The attention of LLaMA3-8B."""


def cell_name(shape: Shape) -> str:
    """A short name without spaces: d128-causal-n2048-b8-h16-kv16; n2048-k512 with another number of keys."""
    mask = "causal" if shape.causal else "full"
    tokens = f"n{shape.seqlen}" + (f"-k{shape.seqlen_k}" if shape.seqlen_k is not None else "")
    return f"d{shape.head_dim}-{mask}-{tokens}-b{shape.batch}-h{shape.heads}-kv{shape.kv_heads}"


def describe(shape: Shape) -> dict[str, Any]:
    """The columns that say which shape a row is of."""
    return {"cell": cell_name(shape), **shape.columns()}


def inputs(shape: Shape, device: str = "cuda") -> list[Tensor]:
    """q, k, v and dout, standard normal in bfloat16; the same ones each time."""
    generator = torch.Generator(device).manual_seed(0)
    queries, keys = (shape.seqlen, shape.heads), (shape.keys, shape.kv_heads)
    return [
        torch.randn(
            shape.batch,
            *size,
            shape.head_dim,
            generator=generator,
            device=device,
            dtype=torch.bfloat16,
        )
        for size in (queries, keys, keys, queries)
    ]


def flop(shape: Shape) -> float:
    """Operations of a backward: five products, each of two operations a head dimension and counted pair."""
    return 10 * shape.batch * shape.heads * shape.head_dim * counted_pairs(shape)


def counted_pairs(shape: Shape) -> float:
    """Pairs of a query and a key that count as work in one head.

    Under a causal mask the paper counts half of a square, which is half a pair a query less than the mask
    leaves. Where queries and keys are of unlike number, the pairs that it leaves: query r sees key c if
    c <= r + keys - queries.
    """
    if not shape.causal:
        return shape.seqlen * shape.keys
    if shape.seqlen_k is None:
        return shape.seqlen**2 / 2
    # The last queries see a triangle, all of them what is left of it.
    triangle = min(shape.seqlen, shape.keys)
    return triangle * (triangle + 1) // 2 + shape.seqlen * max(0, shape.keys - shape.seqlen)


def fp32_dq_bytes(shape: Shape) -> int:
    """The size of a float32 dQ."""
    return 4 * shape.batch * shape.seqlen * shape.heads * shape.head_dim
