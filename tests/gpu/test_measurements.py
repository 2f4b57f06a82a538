"""benchmarks/ on the GPU: other projects' adapters, a small cell of each measurement, the soak's check."""

import random
from dataclasses import replace

import pytest
import torch
from oracle import gradients

from benchmarks import accuracy, backward, bits, blocks, call_cost, memory, reproducibility, soak, systems
from benchmarks.shapes import Shape

SMALL = Shape(64, True, 512, 2, 8, 2)
OURS = [systems.our_system(name) for name in systems.OURS]
PEERS = systems.peer_systems(systems.IN_TORCH, None)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads_k", [8, 2])
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_peers_in_torch_compute_attention(peer: systems.System, heads_k: int, causal: bool) -> None:
    q, k, v, dout = (
        torch.randn(2, 512, heads, 64, device="cuda", dtype=torch.bfloat16)
        for heads in (8, heads_k, heads_k, 8)
    )
    _, *exact = gradients(dout, q, k, v, 64**-0.5, causal)
    for x in (q, k, v):
        x.requires_grad_()
    by_autograd = torch.autograd.grad(peer.attention(q, k, v, causal), (q, k, v), dout)
    with torch.no_grad():
        directly = peer.backward((q, k, v, dout), causal)()
    for found in (directly, by_autograd):
        for x, y in zip(found, exact, strict=True):
            assert x.shape == y.shape and (x.double() - y).norm() <= 1e-2 * y.norm()
    assert not torch.are_deterministic_algorithms_enabled()


def test_one_small_cell_of_each_measurement() -> None:
    chosen = [*OURS, *PEERS]
    model = replace(blocks.MODELS[2], hidden=512, heads=4, kv_heads=2, mlp=256)
    rows = [
        *backward.measure_cell(SMALL, chosen, 2),
        *memory.measure_cell(SMALL, chosen),
        *accuracy.measure_cell(SMALL, chosen),
        *reproducibility.measure_runs(SMALL, chosen, 3),
        *call_cost.measure_cell(call_cost.QUICK[0], chosen, 3),
        *blocks.measure_cell(blocks.BlockCell(model, 256), chosen, 2, tokens=512),
    ]
    assert [row for row in rows if "error" in row] == []
    assert len(rows) == 6 * len(chosen)
    ours = {s.name for s in OURS if s.deterministic}
    for row in rows:
        if row["system"] in ours:
            assert row.get("bitwise_equal", True) and row.get("repeats", True), row


def test_fixed_inputs_give_the_same_hashes() -> None:
    case = bits.CASES[-1]
    assert bits.hashes(case) == bits.hashes(case)


def test_random_calls_pass_the_soak() -> None:
    rng = random.Random(0)
    sms = torch.cuda.get_device_properties().multi_processor_count
    for case in [soak.draw(rng, sms, 1 << 22) for _ in range(20)]:
        assert soak.check(case) == [], case.command
