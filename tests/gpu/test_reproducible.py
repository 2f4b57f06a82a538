"""The same bits: run after run, under load, with fewer SMs, alone or inside a batch."""

import pytest
import torch
from cases import SCHEDULES, Case, backward, forward
from oracle import same_bits

BF16, FP16 = torch.bfloat16, torch.float16
# Square, unequal and grouped; (4096, 128 heads) has more chains than an H200 has SMs.
CASES = [
    Case(2048, 2048, 16, 16, 128, BF16, True, batch=1),
    Case(2048, 2048, 16, 16, 128, BF16, False, batch=1),
    Case(4096, 4096, 32, 8, 64, BF16, True, batch=2),
    Case(1000, 3001, 8, 1, 64, FP16, False, batch=2),
    Case(1500, 1300, 8, 2, 128, FP16, True, batch=3),
    # Parts of a group, and the last KV tile's chains have a single step.
    Case(2049, 2049, 8, 2, 128, BF16, True, batch=2),
    Case(2049, 2049, 8, 1, 64, BF16, True, batch=1),
]


def prepared(case: Case, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """(dout, q, k, v, out, lse)"""
    q, k, v, dout = case.inputs(seed)
    return dout, q, k, v, *forward(case, q, k, v)


def assert_same(xs, ys, what: object = "") -> None:
    for name, x, y in zip(("dq", "dk", "dv"), xs, ys, strict=True):
        assert same_bits(x, y), f"{name} differs in {(x != y).sum().item()} numbers {what}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_hundred_runs(schedule: str, case: Case) -> None:
    tensors = prepared(case)
    first = backward(case, tensors, schedule)
    for run in range(100):
        assert_same(backward(case, tensors, schedule), first, f"in run {run}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_forward_hundred_runs(case: Case) -> None:
    q, k, v, _ = case.inputs()
    out, lse = forward(case, q, k, v)
    for run in range(100):
        out2, lse2 = forward(case, q, k, v)
        assert same_bits(out, out2) and same_bits(lse, lse2), f"run {run}"


@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: case.name)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_beside_a_stream_that_loads_the_gpu(schedule: str, case: Case) -> None:
    tensors = prepared(case)
    first = backward(case, tensors, schedule)
    torch.cuda.synchronize()
    load = torch.cuda.Stream()
    a = torch.randn(4096, 4096, device="cuda", dtype=BF16)
    b = torch.empty_like(a)
    results = []
    for _ in range(20):
        with torch.cuda.stream(load):
            for _ in range(3):
                torch.mm(a, a, out=b)
        results.append(backward(case, tensors, schedule))
    torch.cuda.synchronize()
    for run, result in enumerate(results):
        assert_same(result, first, f"in run {run}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sm_margin_does_not_matter(schedule: str, case: Case) -> None:
    tensors = prepared(case)
    first = backward(case, tensors, schedule)
    for sm_margin in (1, 7, 32, 64):
        assert_same(backward(case, tensors, schedule, sm_margin=sm_margin), first, f"sm_margin {sm_margin}")


def test_cyclic_schedule_is_refused_where_sms_are_too_few() -> None:
    case = Case(8192, 8192, 2, 2, 64, BF16, False, batch=1)
    tensors = prepared(case)
    sms = torch.cuda.get_device_properties().multi_processor_count
    first = backward(case, tensors, "naive")
    assert_same(backward(case, tensors, "naive", sm_margin=sms - 1), first, "on one SM")
    with pytest.raises(RuntimeError, match=r"schedule.*sm_margin"):
        backward(case, tensors, "shift", sm_margin=sms - 1)


def test_chains_that_climb_from_the_diagonal_need_no_others_beside_them() -> None:
    case = Case(4096, 4096, 2, 2, 64, BF16, True, batch=1)
    tensors = prepared(case)
    sms = torch.cuda.get_device_properties().multi_processor_count
    assert_same(backward(case, tensors, "shift", sm_margin=sms - 1), backward(case, tensors, "shift"))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_side_of_the_l2_cache_that_has_too_few_sms_for_a_cycle(head_dim: int) -> None:
    # Cycles of 64 chains on either side of the cache, whose SMs are half of the chip's 132: a margin of a few
    # SMs leaves both with enough, or one of them, or there is one side only.
    case = Case(8192, 8192, 8, 8, head_dim, BF16, False, batch=1)
    tensors = prepared(case)
    first = backward(case, tensors, "shift")
    for sm_margin in range(8):
        assert_same(backward(case, tensors, "shift", sm_margin=sm_margin), first, f"sm_margin {sm_margin}")


# Lengths and heads where the batch decides how busy the GPU is, among them MQA, whose group is cut. The last
# three are for both sides of the L2 cache, and an entry alone is for one.
BATCHED = [
    Case(1024, 1024, 4, 4, 128, BF16, True, batch=5),
    Case(200, 3000, 8, 2, 64, BF16, True, batch=7),
    Case(1, 2000, 8, 2, 128, BF16, False, batch=4),
    Case(777, 777, 8, 1, 128, FP16, False, batch=6),
    Case(64, 64, 16, 16, 64, BF16, True, batch=64),
    Case(8192, 8192, 2, 2, 128, BF16, False, batch=4),
    Case(2048, 2048, 4, 4, 64, FP16, True, batch=8),
    Case(4096, 4096, 16, 4, 128, BF16, True, batch=3),
]


@pytest.mark.parametrize("case", BATCHED, ids=lambda case: case.name)
def test_batch_entry_alone(case: Case) -> None:
    tensors = prepared(case)
    _, q, k, v, out, lse = tensors
    for entry in (0, case.batch - 1):
        part = slice(entry, entry + 1)
        out_alone, lse_alone = forward(case, q[part], k[part], v[part])
        assert same_bits(out_alone, out[part]), f"out of entry {entry}"
        assert same_bits(lse_alone, lse[part]), f"lse of entry {entry}"
        for schedule in SCHEDULES:
            whole = backward(case, tensors, schedule)
            alone = backward(case, tuple(x[part] for x in tensors), schedule)
            assert_same(alone, [x[part] for x in whole], f"for {schedule}, entry {entry}")


def test_the_order_of_arrival_is_another_order() -> None:
    """The control: without the order the bits change, so the tests above can see a difference."""
    case = CASES[1]
    tensors = prepared(case)
    ordered = backward(case, tensors, "auto")[0]
    unordered = [backward(case, tensors, "unordered")[0] for _ in range(20)]
    assert not all(same_bits(x, ordered) for x in unordered)


def test_each_schedule_has_an_order_of_its_own() -> None:
    case = CASES[0]
    tensors = prepared(case)
    dq = {
        schedule: backward(case, tensors, schedule)[0] for schedule in ("naive", "shift", "symmetric_shift")
    }
    assert not same_bits(dq["naive"], dq["shift"])
    assert not same_bits(dq["naive"], dq["symmetric_shift"])
