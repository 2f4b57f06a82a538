"""The problems that the backward is timed on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dash_flash_attn.lab.calibrate import PAPER_SHAPES, TOKENS, Shape

__all__ = [
    "LLAMA3_8B",
    "PAPER_SHAPES",
    "SHORT",
    "SINGLE",
    "Shape",
    "cell_name",
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
    """A short name without spaces: d128-causal-n2048-b8-h16-kv16."""
    mask = "causal" if shape.causal else "full"
    return f"d{shape.head_dim}-{mask}-n{shape.seqlen}-b{shape.batch}-h{shape.heads}-kv{shape.kv_heads}"


def describe(shape: Shape) -> dict[str, Any]:
    """The columns that say which shape a row is of."""
    return {"cell": cell_name(shape), **shape._asdict()}


def inputs(shape: Shape, device: str = "cuda") -> list[Tensor]:
    """q, k, v and dout, standard normal in bfloat16; the same ones each time."""
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(
            shape.batch,
            shape.seqlen,
            heads,
            shape.head_dim,
            generator=generator,
            device=device,
            dtype=torch.bfloat16,
        )
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    ]


def flop(shape: Shape) -> float:
    """Operations of a backward: five products of the attention matrix's size, half under a causal mask."""
    products = 10 * shape.batch * shape.heads * shape.seqlen**2 * shape.head_dim
    return products / 2 if shape.causal else products


def fp32_dq_bytes(shape: Shape) -> int:
    """The size of a float32 dQ."""
    return 4 * shape.batch * shape.seqlen * shape.heads * shape.head_dim
