"""DTensors: how the operators are split over a mesh of devices, by batch entries or by heads."""

import functools
import itertools
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch

_WHERE = "torch.distributed.tensor"
_HEADS = {4: 2, 3: 1}  # which dimension they are, of (batch, seqlen, heads, head_dim) and of lse


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


def _forward(q: Any, k: Any, v: Any, *options: Any) -> list[tuple[list, list]]:
    return [(outputs, inputs + _alike(options)) for outputs, inputs in _splits(q, k, (4, 3), (4, 4, 4))]


def _backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, softmax_scale: float, causal: bool, schedule: str,
    sm_margin: int, dlse: Any = None, *scale_factor: Any,
) -> list[tuple[list, list]]:  # fmt: skip
    splits = _splits(q, k, (4, 4, 4), (4, 4, 4, 4, 4, 3))
    options = [softmax_scale, causal, schedule, sm_margin]
    return [
        (outputs, [*inputs, *_alike(options), None if dlse is None else inputs[-1], *_alike(scale_factor)])
        for outputs, inputs in splits
    ]


def _alike(options: Sequence[Any]) -> list:
    """Placements of what all devices have the same of: None for what is no tensor."""
    from torch.distributed.tensor import Replicate

    return [Replicate() if hasattr(x, "placements") else None for x in options]


def _splits(q: Any, k: Any, outputs: Sequence[int], inputs: Sequence[int]) -> list[tuple[list, list]]:
    """Placements of results and of tensors, of which the numbers of dimensions are given."""
    from torch.distributed.tensor import Replicate, Shard

    ways = [
        ([Replicate() for _ in outputs], [Replicate() for _ in inputs]),
        ([Shard(0) for _ in outputs], [Shard(0) for _ in inputs]),
    ]
    if heads_can_be_split(q.shape[2], k.shape[2], q.mesh.shape):
        ways.append(([Shard(_HEADS[d]) for d in outputs], [Shard(_HEADS[d]) for d in inputs]))
    return ways
