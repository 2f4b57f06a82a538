"""DTensors: how the operators are split over a mesh of devices, by batch entries or by heads."""

import functools
import itertools
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch

_WHERE = "torch.distributed.tensor"
_ON_HEADS = {4: 2, 3: 1}  # the dimension of heads: of (batch, seqlen, heads, head_dim), and of lse


def register() -> None:
    """Tells torch, in a process that has DTensors, how it can split the operators.

    Whoever has none does not import what they need, which takes half a second.
    """
    if _WHERE in sys.modules:
        _register()


@functools.cache
def _register() -> None:
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(torch.ops.dash_flash_attn.forward.default)(_forward)
    register_sharding(torch.ops.dash_flash_attn.backward.default)(_backward)


def heads_can_be_split(heads_q: int, heads_k: int, mesh_shape: Sequence[int]) -> bool:
    """Whether each device gets the query heads that belong to its KV heads, whichever way heads are split.

    Heads may be split over any of the mesh's dimensions. Parts of unlike size are cut at the same heads in q
    and k only if those have as many. torch does not split over more devices than there are KV heads.
    """
    if heads_q == heads_k:
        return True
    parts = {
        math.prod(some)
        for count in range(1, len(mesh_shape) + 1)
        for some in itertools.combinations(mesh_shape, count)
    }
    return all(heads_k % n == 0 for n in parts if n <= heads_k)


def _forward(q: Any, k: Any, v: Any, *options: object) -> list[tuple[list, list]]:
    return _splits(q, k, (4, 3), (4, 4, 4), len(options))


def _backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, softmax_scale: float, causal: bool, schedule: str,
    sm_margin: int, *dlse: Any,
) -> list[tuple[list, list]]:  # fmt: skip
    splits = _splits(q, k, (4, 4, 4), (4, 4, 4, 4, 4, 3), 4)
    for outputs, inputs in splits:
        for x in dlse:
            inputs.append(None if x is None else inputs[5])
    return splits


def _splits(
    q: Any, k: Any, outputs: Sequence[int], inputs: Sequence[int], options: int
) -> list[tuple[list, list]]:
    """Placements of results and arguments, of which only the numbers of dimensions are asked for."""
    from torch.distributed.tensor import Replicate, Shard

    others = [None] * options
    ways = [
        ([Replicate() for _ in outputs], [*(Replicate() for _ in inputs), *others]),
        ([Shard(0) for _ in outputs], [*(Shard(0) for _ in inputs), *others]),
    ]
    if heads_can_be_split(q.shape[2], k.shape[2], q.mesh.shape):
        by_heads = [[Shard(_ON_HEADS[dim]) for dim in dims] for dims in (outputs, inputs)]
        ways.append((by_heads[0], [*by_heads[1], *others]))
    return ways
