"""The lower-level functions: results in tensors of the caller, and a ring that is made of them."""

from collections.abc import Sequence

import pytest
import ring
import torch
from cases import Case, assert_same, captured, forward, plain
from oracle import gradients, same_bits
from torch import Tensor

from dash_flash_attn import _flash_attn_backward, _flash_attn_forward, ops

BF16, FP16 = torch.bfloat16, torch.float16
CASES = [
    Case(300, 300, 4, 4, 64, BF16, True),
    Case(1000, 700, 8, 2, 128, FP16, True),  # 300 queries see no key
    Case(129, 2049, 8, 1, 64, BF16, False),
    Case(2048, 2048, 16, 16, 128, BF16, False, batch=1),  # both sides of the L2 cache
]
of_cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def write(case: Case, tensors: tuple[Tensor, ...], places, **options) -> None:
    dq, dk, dv = places
    _flash_attn_backward(
        *tensors, dq=dq, dk=dk, dv=dv, softmax_scale=case.scale, is_causal=case.causal, **options
    )  # fmt: skip


def rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows out of a longer buffer: (buffer, place)."""
    whole = x.new_full((x.shape[0], 2 * x.shape[1] + 5, *x.shape[2:]), torch.nan)
    return whole, whole[:, 5 : 5 + x.shape[1]]


def heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """Heads between others."""
    whole = x.new_full((*x.shape[:2], x.shape[2] + 2, x.shape[3]), torch.nan)
    return whole, whole[:, :, 1:-1]


def heads_first(x: Tensor) -> tuple[Tensor, Tensor]:
    """(batch, heads, seqlen, head_dim), with more heads and rows around."""
    whole = x.new_full((x.shape[0], x.shape[2] + 2, x.shape[1] + 9, x.shape[3]), torch.nan)
    return whole, whole[:, 1:-1, 1:-8].transpose(1, 2)


def columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """Part of wider rows, in steps of 16 bytes."""
    whole = x.new_full((*x.shape[:3], x.shape[3] + 24), torch.nan)
    return whole, whole[..., 8:-16]


def odd_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Part of rows whose length is no multiple of 16 bytes."""
    whole = x.new_full((*x.shape[:3], x.shape[3] + 3), torch.nan)
    return whole, whole[..., 1:-2]


def every_other_number(x: Tensor) -> tuple[Tensor, Tensor]:
    """With a gap before each number."""
    whole = x.new_full((*x.shape, 2), torch.nan)
    return whole, whole[..., 1]


def assert_untouched_around(places: Sequence[Tensor], wholes: Sequence[Tensor]) -> None:
    """Each whole tensor was full of NaN but for its place, which is lost here."""
    for place, whole in zip(places, wholes, strict=True):
        place.fill_(torch.nan)
        assert whole.isnan().all()


IN_PLACE = (rows, heads, heads_first, columns)
layouts = pytest.mark.parametrize(
    "layout", (*IN_PLACE, odd_rows, every_other_number), ids=lambda layout: layout.__name__
)


@pytest.mark.usefixtures("gpu")
@layouts
@of_cases
def test_layout_of_results(case: Case, layout) -> None:
    """The bits of contiguous results, and the numbers around them stay."""
    tensors, expected = plain(case)
    wholes, places = zip(*map(layout, tensors[1:4]), strict=True)
    write(case, tensors, places)
    assert_same(places, expected)
    out_whole, out_place = layout(tensors[4])
    out, lse, _, _ = _flash_attn_forward(
        *tensors[1:4], out_=out_place, softmax_scale=case.scale, causal=case.causal
    )
    assert out is out_place
    assert_same((out, lse), tensors[4:])
    assert_untouched_around((*places, out_place), (*wholes, out_whole))


@pytest.mark.parametrize("layout", IN_PLACE, ids=lambda layout: layout.__name__)
def test_kernels_write_in_place(layout) -> None:
    """No memory for a copy, and no copy."""
    tensors, _ = plain(CASES[1])
    _, places = zip(*map(layout, tensors[1:4]), strict=True)
    into = ops.BACKWARD_KERNELS["cuda"](*tensors, CASES[1].scale, True, "auto", 0, into=places)
    assert all(x is y for x, y in zip(into, places, strict=True))
    with torch.profiler.profile() as profile:
        # Past the dispatcher, which a profiler would have the functions take.
        ops.BACKWARD_KERNELS["cuda"](*tensors, CASES[1].scale, True, "auto", 0, into=places)
        torch.cuda.synchronize()
    assert not [event.name for event in profile.events() if "copy" in event.name.lower()]


@of_cases
def test_under_a_profiler(case: Case) -> None:
    """Through the dispatcher, with a copy."""
    tensors, expected = plain(case)
    wholes, places = zip(*map(rows, tensors[1:4]), strict=True)
    with torch.profiler.profile():
        write(case, tensors, places)
    assert_same(places, expected)
    assert_untouched_around(places, wholes)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("wanted", ["q", "k", "v", "kv"])
def test_results_that_are_not_wanted(wanted: str) -> None:
    tensors, expected = plain(CASES[1])
    places = [
        torch.empty_like(x) if name in wanted else None for name, x in zip("qkv", tensors[1:4], strict=True)
    ]
    write(CASES[1], tensors, places)
    for place, x in zip(places, expected, strict=True):
        assert place is None or same_bits(place, x)


@pytest.mark.usefixtures("gpu")
def test_layout_of_what_is_read() -> None:
    """lse as a slice and in rows, as rings leave it."""
    tensors, expected = plain(CASES[1])
    *others, lse = tensors
    for strided in (
        lse.transpose(1, 2).contiguous().transpose(1, 2),
        torch.cat((lse, torch.full_like(lse, torch.nan)), dim=2)[:, :, : lse.shape[2]],
    ):
        assert not strided.is_contiguous()
        places = [torch.empty_like(x) for x in tensors[1:4]]
        write(CASES[1], (*others, strided), places)
        assert_same(places, expected)


@pytest.mark.parametrize("scale", [-0.2, 0.2])
def test_negative_scale_in_place(scale: float) -> None:
    case = CASES[0]
    q, k, v, dout = case.inputs()
    tensors = dout, q, k, v, *torch.ops.dash_flash_attn.forward(q, k, v, scale, case.causal)
    expected = torch.ops.dash_flash_attn.backward(*tensors, scale, case.causal, "auto", 0)
    wholes, places = zip(*map(rows, tensors[1:4]), strict=True)
    _flash_attn_backward(
        *tensors, dq=places[0], dk=places[1], dv=places[2], softmax_scale=scale, is_causal=case.causal
    )
    assert_same(places, expected)
    assert_untouched_around(places, wholes)


def test_float32_sums_are_refused() -> None:
    """By the place's name; nothing is written."""
    tensors, _ = plain(CASES[0])
    dq = torch.full_like(tensors[1], torch.nan)
    dk = torch.empty_like(tensors[2], dtype=torch.float32)
    with pytest.raises(NotImplementedError, match="^dk: on CUDA only torch.bfloat16, got torch.float32"):
        write(CASES[0], tensors, (dq, dk, None))
    assert dq.isnan().all()


def test_cuda_graph() -> None:
    """So nothing waits for the GPU."""
    case = CASES[1]
    tensors, expected = plain(case)
    _, (*places, out) = zip(*map(rows, tensors[1:5]), strict=True)

    def step() -> Tensor:
        _, lse, _, _ = _flash_attn_forward(
            *tensors[1:4], out_=out, softmax_scale=case.scale, causal=case.causal
        )
        write(case, (*tensors[:4], out, lse), places)
        return lse

    graph, lse = captured(step)
    for x in (*places, out, lse):
        x.fill_(torch.nan)
    graph.replay()
    assert_same((*places, out, lse), (*expected, *tensors[4:]))


RINGS = pytest.mark.parametrize("causal", [False, True], ids=["full", "zigzag"])


@pytest.mark.usefixtures("gpu")
@RINGS
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_ring(head_dim: int, ranks: int, causal: bool) -> None:
    """Against float64, and the same bits again."""
    case = Case(1040, 1040, 8, 2, head_dim, BF16, causal)
    q, k, v, dout = case.inputs()
    arguments = dout, q, k, v, ranks, case.scale, causal, case.dtype
    results = ring.attention(*arguments)
    exact = gradients(dout, q, k, v, case.scale, causal)
    for name, x, y in zip(("out", "dq", "dk", "dv"), results, exact, strict=True):
        error = ((x.double() - y).norm() / y.norm()).item()
        assert error < 1e-2, f"{name} is off by {error:.1%}"
    assert_same(ring.attention(*arguments), results)


@RINGS
def test_compiled_ring(causal: bool) -> None:
    """Buffers that several calls of a graph write to: each sum gets what was there in time."""
    case = Case(512, 512, 8, 2, 128, BF16, causal)
    q, k, v, dout = case.inputs()
    *parts, shards_of_dout = (ring.parts(x, 2, causal) for x in (q, k, v, dout))
    outs, lses = ring.forward(*parts, case.scale, causal)

    def sums(*tensors):
        results = ring.backward(*tensors, outs, lses, case.scale, causal, case.dtype)
        return [ring.whole(x, causal) for x in results]

    torch._dynamo.reset()
    arguments = shards_of_dout, *parts
    assert_same(torch.compile(sums, fullgraph=True)(*arguments), sums(*arguments))


def test_compiled_forward_into_a_slice() -> None:
    case = CASES[0]
    q, k, v, _ = case.inputs()

    def into_a_slice(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        whole = torch.full((case.batch, 400, case.heads_q, case.head_dim), 7.0, device="cuda", dtype=q.dtype)
        _, lse, _, _ = _flash_attn_forward(
            q, k, v, out_=whole[:, 50:350], softmax_scale=case.scale, causal=case.causal
        )
        return whole, lse

    whole, lse = torch.compile(into_a_slice, fullgraph=True)(q, k, v)
    assert_same((whole[:, 50:350], lse), forward(case, q, k, v))
    assert (whole[:, :50] == 7).all() and (whole[:, 350:] == 7).all()
