"""DTensors: attention that is split over devices by batch entries or heads, in processes on the CPU."""

import itertools
import os
import socket

import pytest
import torch
import torch.distributed as dist
from oracle import same_bits

from dash_flash_attn import flash_attn_func
from dash_flash_attn.sharding import heads_can_be_split

needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo"
)


def in_two_processes(function) -> None:
    """Calls function(rank) in both; an error in one of them is an error."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(process, (function, port), nprocs=2)


def process(rank: int, function, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        function(rank)
    finally:
        dist.destroy_process_group()


def results(attention, q, k, v, dout, dlse):
    """out, lse and the gradients of both."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = attention(*leaves)
    return out, lse, *torch.autograd.grad((out, lse), leaves, (dout, dlse))


def check_splits(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh("cpu", (2,))
    batch, rows, heads, everything = Shard(0), Shard(1), Shard(2), Replicate()

    def attention(q, k, v):
        return flash_attn_func(q, k, v, 0.3, True, schedule="shift", return_attn_probs=True)

    # Not with symbolic shapes: torch's own operators fail there, on DTensors with parts of unlike size.
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=False)
    for heads_q, heads_k, split_q, split_k, expected in (
        (4, 2, batch, batch, batch),
        (4, 2, heads, heads, heads),
        (3, 3, heads, heads, heads),  # parts of unlike size
        (4, 2, everything, everything, everything),
        (4, 2, heads, everything, heads),
        (6, 3, heads, heads, None),  # a device would have 3 query heads, and the first 2 KV heads
        (4, 2, rows, rows, None),
    ):
        torch.manual_seed(0)
        q, dout = torch.randn(2, 2, 70, heads_q, 16)
        k, v = torch.randn(2, 2, 90, heads_k, 16)
        dlse = torch.randn(2, heads_q, 70)
        plain = results(attention, q, k, v, dout, dlse)
        split_lse = {batch: batch, heads: Shard(1), rows: Shard(2), everything: everything}[split_q]
        tensors = [
            distribute_tensor(x, mesh, [split])
            for x, split in ((q, split_q), (k, split_k), (v, split_k), (dout, split_q), (dlse, split_lse))
        ]
        with CommDebugMode() as communication:
            found = results(attention, *tensors)
        if expected is not None:
            assert communication.get_total_counts() == 0
            assert found[0].placements == found[2].placements == (expected,), (heads_q, split_q)
        for other in (found, results(compiled, *tensors)):
            # Whole before the comparison: a failure in one process only would leave the other one waiting.
            whole = [x.full_tensor() for x in other]
            assert all(map(same_bits, whole, plain)), (heads_q, heads_k, split_q, split_k)
    with torch.inference_mode():
        assert same_bits(attention(*tensors[:3])[0].full_tensor(), plain[0])


@needs_gloo
def test_splits() -> None:
    """Each result is that of the whole call. A named schedule: "auto" depends on the number of heads."""
    in_two_processes(check_splits)


def check_a_collective_under_way(rank: int) -> None:
    """v alone comes from a collective that nobody has waited for."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_gather_tensor

    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 70, 4, 16)
    gathered = all_gather_tensor(v[rank : rank + 1].contiguous(), 0, dist.group.WORLD)
    assert type(gathered) is AsyncCollectiveTensor
    q.requires_grad_()
    out = flash_attn_func(q, k, gathered, causal=True)
    expected = flash_attn_func(q, k, v, causal=True)
    assert same_bits(out, expected)
    (found,), (plain,) = (torch.autograd.grad(x.square().sum(), q) for x in (out, expected))
    assert same_bits(found, plain)


@needs_gloo
def test_a_collective_under_way() -> None:
    in_two_processes(check_a_collective_under_way)


@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (4,), (2, 2), (2, 4), (8, 2), (6, 2)], ids=str)
def test_heads_are_split_only_where_groups_stay_together(mesh_shape: tuple[int, ...]) -> None:
    """torch cuts into parts of one size, rounded up, over one dimension of the mesh after the other."""

    def parts(heads: int, some: tuple[int, ...]) -> list[list[int]]:
        cut = [list(range(heads))]
        for n in some:
            size = [-(-len(part) // n) for part in cut]
            cut = [part[i * s : (i + 1) * s] for part, s in zip(cut, size, strict=True) for i in range(n)]
        return cut

    subsets = [s for n in range(1, len(mesh_shape) + 1) for s in itertools.combinations(mesh_shape, n)]
    for heads_k, group in itertools.product(range(1, 25), (1, 2, 3)):
        together = all(
            [[head // group for head in part[::group]] for part in parts(heads_k * group, some)]
            == parts(heads_k, some)
            and all(len(part) % group == 0 for part in parts(heads_k * group, some))
            for some in subsets
            if torch.Size(some).numel() <= heads_k
        )
        if heads_can_be_split(heads_k * group, heads_k, mesh_shape):
            assert together, (heads_k, group)
        if group == 1:
            assert heads_can_be_split(heads_k, heads_k, mesh_shape)
