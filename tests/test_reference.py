"""The CPU implementation against dense float64 attention, and its order of summation."""

import itertools

import numpy as np
import pytest
import torch
from oracle import attention, gradients, same_bits, visible

from dash_flash_attn import _native, flash_attn_func, reference
from dash_flash_attn.schedule import SCHEDULES, Schedule

LENGTHS = (1, 63, 64, 65, 127, 129, 200)
# Multiples of the rounding of the type that every sum and product here goes through.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}


def inputs(seqlen_q, seqlen_k, heads_q=2, heads_k=2, head_dim=64, dtype=torch.float32, batch=2, seed=0):
    """q, k, v and dout."""
    g = torch.Generator().manual_seed(seed)
    shapes = ((seqlen_q, heads_q), (seqlen_k, heads_k), (seqlen_k, heads_k), (seqlen_q, heads_q))
    return [
        torch.randn(batch, seqlen, heads, head_dim, generator=g, dtype=torch.float64).to(dtype)
        for seqlen, heads in shapes
    ]


def run(q, k, v, dout, causal, schedule, scale=None):
    """out, dq, dk and dv by the public function."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = flash_attn_func(q, k, v, scale, causal, deterministic=True, schedule=schedule)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)


def assert_close(results, exact, tensors, dtype):
    """Errors in units of the exact value, or of what it is a difference of where that is 0."""
    q, k, _, dout = tensors
    natural = (dout.norm(), dout.norm() * k.norm() / k[0, 0].numel() ** 0.5, dout.norm(), dout.norm())
    for name, x, y, size in zip(("out", "dq", "dk", "dv"), results, exact, natural, strict=True):
        assert x.dtype == dtype and x.shape == y.shape
        error = (x.double() - y).norm()
        assert error <= TOLERANCE[dtype] * (y.norm() + 0.1 * size), f"{name}: {error:.2e} of {y.norm():.2e}"


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("seqlen_q", LENGTHS)
def test_lengths(seqlen_q: int, causal: bool) -> None:
    for (seqlen_k, schedule), head_dim in zip(
        itertools.product(LENGTHS, SCHEDULES), itertools.cycle((64, 128, 32)), strict=False
    ):
        tensors = inputs(seqlen_q, seqlen_k, head_dim=head_dim)
        q, k, v, dout = tensors
        exact = gradients(dout, q, k, v, head_dim**-0.5, causal)
        assert_close(run(*tensors, causal, schedule), exact, tensors, torch.float32)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads_k", [8, 2, 1])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_grouped_heads_and_dtypes(causal: bool, heads_k: int, dtype: torch.dtype) -> None:
    tensors = inputs(150, 330, 8, heads_k, head_dim=128, dtype=dtype)
    q, k, v, dout = tensors
    exact = gradients(dout, q, k, v, 0.2, causal)
    for schedule in SCHEDULES:
        assert_close(run(*tensors, causal, schedule, scale=0.2), exact, tensors, dtype)


def test_the_oracle_agrees_with_autograd() -> None:
    q, k, v, dout = inputs(70, 100, 4, 2, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, _ = attention(*leaves, 0.3, True)
    by_autograd = torch.autograd.grad(out, leaves, dout)
    for x, y in zip((out, *by_autograd), gradients(dout, q, k, v, 0.3, True), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_gradcheck(causal: bool, schedule: str) -> None:
    # 131 keys are two KV tiles, and few numbers.
    q, k, v, _ = inputs(5, 131, 2, 1, head_dim=2, dtype=torch.float64, batch=1)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(
        lambda *x: flash_attn_func(*x, causal=causal, schedule=schedule, deterministic=True), leaves
    )


# More queries than keys: under a causal mask some see no key. 131 keys are two KV tiles.
GRADIENT_CASES = [(5, 131, 2, 2, False), (5, 131, 4, 2, True), (7, 4, 4, 1, True), (70, 3, 2, 1, True)]


def log_sum_exp_of_visible(lse: torch.Tensor) -> torch.Tensor:
    """A query that sees no key has none: -inf."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


@pytest.mark.parametrize("case", GRADIENT_CASES, ids=str)
@pytest.mark.parametrize("schedule", ["naive", "auto"])
def test_gradient_of_the_log_sum_exp(schedule: str, case) -> None:
    """By itself, and with that of out: numerically, and against dense attention by autograd."""
    seqlen_q, seqlen_k, heads_q, heads_k, causal = case
    q, k, v, dout = inputs(seqlen_q, seqlen_k, heads_q, heads_k, head_dim=2, dtype=torch.float64, batch=1)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def both(q, k, v):
        out, lse = flash_attn_func(q, k, v, 0.7, causal, schedule=schedule, return_attn_probs=True)
        return out, log_sum_exp_of_visible(lse)

    assert torch.autograd.gradcheck(both, leaves)
    out, lse = both(*leaves)
    exact_out, exact_lse = attention(*leaves, 0.7, causal)
    exact_lse = log_sum_exp_of_visible(exact_lse)
    dlse = torch.randn_like(lse)
    for ours, exact, by in (
        ((lse,), (exact_lse,), (dlse,)),
        ((out, lse), (exact_out, exact_lse), (dout, dlse)),
        ((out, lse.exp()), (exact_out, exact_lse.exp()), (dout, dlse)),
    ):
        found = torch.autograd.grad(ours, leaves, by, retain_graph=True)
        expected = torch.autograd.grad(exact, leaves, by, retain_graph=True, allow_unused=True)
        for x, y in zip(found, expected, strict=True):
            # v does not matter to lse.
            torch.testing.assert_close(x, torch.zeros_like(x) if y is None else y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("nonsense", [torch.nan, torch.inf, -torch.inf])
def test_a_query_that_sees_no_key_has_no_gradient_of_its_log_sum_exp(nonsense: float) -> None:
    """Its lse is -inf: the gradient of its square, as in a z-loss, is infinite."""
    q, k, v, dout = inputs(300, 150, 2, 1)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = flash_attn_func(*leaves, causal=True, return_attn_probs=True)
    dlse = torch.randn_like(lse)
    blind = lse == -torch.inf
    assert blind.sum() == 2 * 2 * 150
    grads = [
        torch.autograd.grad((out, lse), leaves, (dout, dlse.masked_fill(blind, x)), retain_graph=True)
        for x in (0.0, nonsense)
    ]
    assert all(map(same_bits, *grads))
    assert (grads[0][0][:, :150] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradient_of_the_log_sum_exp_in_other_types(dtype: torch.dtype) -> None:
    q, k, v, dout = inputs(150, 330, 8, 2, head_dim=64, dtype=dtype)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = flash_attn_func(*leaves, 0.2, True, return_attn_probs=True)
    dlse = torch.randn_like(lse)
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    exact = attention(*exact_leaves, 0.2, True)
    found = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    expected = torch.autograd.grad(exact, exact_leaves, (dout.double(), dlse.double()))
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == dtype and (x.double() - y).norm() <= TOLERANCE[dtype] * y.norm()


def test_a_gradient_of_zero_changes_no_bit() -> None:
    q, k, v, dout = inputs(200, 330, 4, 2, dtype=torch.bfloat16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = flash_attn_func(*leaves, causal=True, return_attn_probs=True)
    without = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    assert all(map(same_bits, torch.autograd.grad((out, lse), leaves, (dout, 0 * lse)), without))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_negative_scale(causal: bool, dtype: torch.dtype) -> None:
    tensors = inputs(150, 130, 4, 2, dtype=dtype)
    q, k, v, dout = tensors
    exact = gradients(dout, q, k, v, -0.2, causal)
    assert_close(run(*tensors, causal, "auto", scale=-0.2), exact, tensors, dtype)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_log_sum_exp(causal: bool) -> None:
    q, k, v, _ = inputs(90, 200)
    _, lse = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    exact = attention(q, k, v, 64**-0.5, causal)[1]
    assert lse.shape == (2, 2, 90) and lse.is_contiguous() and lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seqlen_k", [1, 100, 128, 150])
def test_queries_that_see_no_key(seqlen_k: int, schedule: str) -> None:
    q, k, v, dout = inputs(300, seqlen_k, 2, 1)
    blind = ~visible(300, seqlen_k, True).any(-1)
    assert blind.sum() == 300 - seqlen_k
    out, dq, dk, dv = run(q, k, v, dout, True, schedule)
    _, lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (out[:, blind] == 0).all() and (dq[:, blind] == 0).all()
    assert (lse[:, :, blind] == -torch.inf).all() and lse[:, :, ~blind].isfinite().all()
    assert all(x.isfinite().all() for x in (out, dq, dk, dv))
    # Nothing depends on what is in those rows.
    q2, dout2 = q.clone(), dout.clone()
    q2[:, blind], dout2[:, blind] = 5.0, -9.0
    for x, y in zip((out, dq, dk, dv), run(q2, k, v, dout2, True, schedule), strict=True):
        assert same_bits(x, y)


def test_dq_is_summed_by_rank_and_dk_by_visit() -> None:
    """The same sums, written out from the schedule's own tables."""
    q, k, v, dout = inputs(600, 900, 1, 1, head_dim=128, dtype=torch.bfloat16, batch=1)
    scale = 128**-0.5
    out, lse = reference.forward(q, k, v, scale, True)
    rows, keys = 64, 128  # a tile, at head dimension 128
    q2, k2, v2, do2, o2 = (x[0, :, 0].float() for x in (q, k, v, dout, out))
    delta = (do2 * o2).sum(-1, keepdim=True)

    def tile_pair(kv, j):
        r, c = slice(j * rows, (j + 1) * rows), slice(kv * keys, (kv + 1) * keys)
        scores = (q2[r] @ k2[c].T * scale).masked_fill(~visible(600, 900, True)[r, c], -torch.inf)
        p = torch.exp(scores - lse[0, 0, r, None])
        ds = (p * (do2[r] @ v2[c].T - delta[r])).bfloat16().float()
        return r, c, p.bfloat16().float(), ds

    for name in SCHEDULES:
        schedule = Schedule(name, 600, 900, 128, causal=True)
        dq, dk, dv = (torch.zeros_like(x) for x in (q2, k2, v2))
        for j in range(schedule.grid.q_tiles()):
            for kv in schedule.order(j):
                r, c, _, ds = tile_pair(kv, j)
                dq[r] += ds @ k2[c]
        for kv in range(schedule.grid.kv_tiles()):
            for j in schedule.visits(kv):
                r, c, p, ds = tile_pair(kv, j)
                dk[c] += ds.T @ q2[r]
                dv[c] += p.T @ do2[r]
        got = reference.backward(dout, q, k, v, out, lse, scale, True, name)
        for x, y in zip(got, (dq * scale, dk * scale, dv), strict=True):
            assert same_bits(x[0, :, 0], y.bfloat16()), name


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_chain_walks_the_heads_of_its_group_as_the_schedule_says(name: str, causal: bool) -> None:
    """The sequence in which the backward sums dK and dV of a KV tile, written out."""
    rows, keys = _native.tile_shape(128)
    schedule = Schedule(name, 640, 640, 128, causal=causal)
    tasks = list(reference.tasks_in_order(schedule.policy, schedule.grid, 3))
    for kv in range(5):
        visits = schedule.visits(kv)
        # Under a causal mask the lower half of the KV tiles (0, 1, 2) goes round a rectangle first.
        rectangle = [j for j in visits if j >= 3 * keys // rows]
        if name in ("naive", "descending"):
            chain = [(h, j) for j in visits for h in range(3)]
        elif name == "symmetric_shift" and causal and kv < 3:
            rest = [j for j in visits if j not in rectangle]
            chain = [(h, j) for part in (rectangle, rest) for h in range(3) for j in part]
        elif name == "shift" and causal:  # up, back down, and up
            chain = [(h, j) for h in range(3) for j in visits[:: -1 if h == 1 else 1]]
        else:
            chain = [(h, j) for h in range(3) for j in visits]
        assert [(h, j) for k, h, j in tasks if k == kv] == chain


def test_parts_of_a_group_are_summed_in_order() -> None:
    """MQA cuts its group: the same as the sum of calls with a part's query heads, one after the other."""
    # With two query tiles each: 32 are the least of a part. The first one has what is left over.
    ends = [13, 29, 45, 61]
    q, k, v, dout = inputs(130, 200, ends[-1], 1, batch=1)
    _, _, dk, dv = run(q, k, v, dout, False, "shift")
    sums = [torch.zeros_like(k), torch.zeros_like(v)]
    for begin, end in itertools.pairwise([0, *ends]):
        part = slice(begin, end)
        _, _, dk_p, dv_p = run(q[:, :, part], k, v, dout[:, :, part], False, "shift")
        sums = [total + x for total, x in zip(sums, (dk_p, dv_p), strict=True)]
    # dk is scaled after the sum, by a power of two here: exact.
    assert same_bits(dk, sums[0]) and same_bits(dv, sums[1])


def test_a_schedule_decides_the_bits() -> None:
    tensors = inputs(640, 640, 4, 4)
    for causal in (False, True):
        results = {name: run(*tensors, causal, name) for name in SCHEDULES}
        assert all(same_bits(results["naive"][0], other[0]) for other in results.values())
        assert not same_bits(results["naive"][1], results["shift"][1])
        assert not same_bits(results["naive"][2], results["descending"][2])
        for name, first in results.items():
            for x, y in zip(run(*tensors, causal, name), first, strict=True):
                assert same_bits(x, y), name


@pytest.fixture
def two_threads():
    """torch's kernels with two threads for one test."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_batch_entry_does_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    tensors = inputs(200, 300, 4, 2, dtype=dtype, batch=5)
    whole = run(*tensors, True, "symmetric_shift")
    for entry in (0, 4):
        alone = run(*(x[entry : entry + 1] for x in tensors), True, "symmetric_shift")
        for x, y in zip(alone, whole, strict=True):
            assert same_bits(x, y[entry : entry + 1])


def test_a_schedule_that_stalls_is_an_error() -> None:
    class Stalled:
        """Two chains that wait for each other at query tiles 0 and 1."""

        def walk(self, kv_tile: int, group: int, way: int) -> np.ndarray:
            return np.array([(0, step if kv_tile == 0 else 1 - step) for step in range(2)])

        def rank(self, kv_tile: int, q_tile: int, way: int) -> int:
            return q_tile if kv_tile == 1 else 1 - q_tile

    grid = Schedule("naive", 256, 256, 64).grid
    with pytest.raises(RuntimeError, match="stalls with 4 tasks left"):
        list(reference.tasks_in_order(Stalled(), grid, 1))
