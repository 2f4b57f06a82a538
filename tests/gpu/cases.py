"""Shapes for the GPU tests, and calls that every test of them makes."""

import random
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

import torch
from oracle import same_bits
from torch import Tensor

from dash_flash_attn.schedule import SCHEDULES

LENGTHS = (1, 63, 64, 65, 127, 128, 129, 255, 257, 1000, 1024, 2049, 4097)
HEADS = ((4, 4), (8, 2), (8, 1), (3, 3), (7, 1))  # query heads, KV heads: pairs or not, groups of 4, 8 and 7


class Case(NamedTuple):
    """One attention problem. Lengths in tokens."""

    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    dtype: torch.dtype
    causal: bool
    batch: int = 2

    @property
    def name(self) -> str:
        """What pytest shows."""
        dtype = "bf16" if self.dtype == torch.bfloat16 else "fp16"
        mask = "causal" if self.causal else "full"
        lengths = f"{self.batch}x{self.seqlen_q}x{self.seqlen_k}"
        return f"{lengths}-h{self.heads_q}/{self.heads_k}-d{self.head_dim}-{dtype}-{mask}"

    @property
    def scale(self) -> float:
        """The default factor on the scores."""
        return self.head_dim**-0.5

    def inputs(self, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and dout, standard normal, on the current GPU."""
        g = torch.Generator("cuda").manual_seed(seed)

        def normal(seqlen: int, heads: int) -> Tensor:
            shape = (self.batch, seqlen, heads, self.head_dim)
            return torch.randn(shape, generator=g, device="cuda", dtype=self.dtype)

        q, k, v = normal(self.seqlen_q, self.heads_q), *(normal(self.seqlen_k, self.heads_k) for _ in "kv")
        return q, k, v, normal(self.seqlen_q, self.heads_q)


def grid(unequal: int) -> list[Case]:
    """Every length with itself for each mask and head dimension, and `unequal` pairs of lengths."""
    rng = random.Random(0)
    dtypes = (torch.bfloat16, torch.float16)
    cases = [
        Case(n, n, *HEADS[i % 5], head_dim, dtypes[i % 2], causal)
        for causal in (False, True)
        for head_dim in (64, 128)
        for i, n in enumerate(LENGTHS, start=causal + head_dim // 64)
    ]
    while unequal:
        seqlen_q, seqlen_k = rng.choice(LENGTHS), rng.choice(LENGTHS)
        if seqlen_q != seqlen_k:
            heads, head_dim = rng.choice(HEADS), rng.choice((64, 128))
            cases.append(Case(seqlen_q, seqlen_k, *heads, head_dim, rng.choice(dtypes), rng.random() < 0.7))
            unequal -= 1
    return cases


def forward(case: Case, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse from the operator."""
    return torch.ops.dash_flash_attn.forward(q, k, v, case.scale, case.causal)


def backward(
    case: Case,
    tensors: tuple[Tensor, ...],
    schedule: str,
    *,
    sm_margin: int = 0,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv from the operator; tensors are (dout, q, k, v, out, lse)."""
    return torch.ops.dash_flash_attn.backward(*tensors, case.scale, case.causal, schedule, sm_margin, dlse)


def plain(case: Case) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(dout, q, k, v, out, lse) and their gradients."""
    q, k, v, dout = case.inputs()
    tensors = dout, q, k, v, *forward(case, q, k, v)
    return tensors, backward(case, tensors, "auto")


T = TypeVar("T")


def captured(step: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of step(), and its results. It runs once before, on a stream of its own, as torch asks."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def assert_same(xs: Iterable[Tensor], ys: Iterable[Tensor]) -> None:
    """Bit by bit."""
    for x, y in zip(xs, ys, strict=True):
        assert same_bits(x, y)


__all__ = [
    "HEADS", "LENGTHS", "SCHEDULES", "Case", "assert_same", "backward", "captured", "forward", "grid",
    "plain",
]  # fmt: skip
