"""The lower-level functions: their arguments, where they write, and a ring that is made of them."""

import inspect

import numpy as np
import oracle
import pytest
import ring
import torch
from oracle import same_bits
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from wrapper import Wrapper

from dash_flash_attn import _flash_attn_backward, _flash_attn_forward, flash_attn_func, into, ops

FORWARD_INTO = torch.ops.dash_flash_attn.forward_into.default
BACKWARD_INTO = torch.ops.dash_flash_attn.backward_into.default
SCALE = 0.3


def inputs(dtype=torch.float32, seqlen_q=70, seqlen_k=140, **options) -> list[torch.Tensor]:
    """q, k, v with two query heads a KV head, and dout."""
    torch.manual_seed(0)
    sizes = ((seqlen_q, 4), (seqlen_k, 2), (seqlen_k, 2), (seqlen_q, 4))
    return [torch.randn(2, *size, 32, **options).to(dtype) for size in sizes]


def backward_inputs(dtype=torch.float32, causal=True, **options) -> tuple[torch.Tensor, ...]:
    """dout, q, k, v, out and lse."""
    q, k, v, dout = inputs(dtype, **options)
    return dout, q, k, v, *torch.ops.dash_flash_attn.forward(q, k, v, SCALE, causal)


def gradients(tensors, schedule="auto") -> tuple[torch.Tensor, ...]:
    """dq, dk and dv from the functional operator."""
    return torch.ops.dash_flash_attn.backward(*tensors, SCALE, True, schedule, 0)


def write(tensors, dq, dk, dv, **options) -> torch.Tensor:
    return _flash_attn_backward(
        *tensors, dq=dq, dk=dk, dv=dv, softmax_scale=SCALE, is_causal=True, **options
    )  # fmt: skip


def test_arguments_are_those_of_flash_attention_3() -> None:
    names = [
        *("q", "k", "v", "k_new", "v_new", "qv", "out_", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new"),
        *(
            "seqused_q",
            "seqused_k",
            "max_seqlen_q",
            "max_seqlen_k",
            "page_table",
            "kv_batch_idx",
            "leftpad_k",
        ),
        *("rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale"),
        *("softmax_scale", "causal", "window_size_left", "window_size_right", "attention_chunk", "softcap"),
        *("rotary_interleaved", "scheduler_metadata", "num_splits", "pack_gqa", "sm_margin"),
    ]
    assert list(inspect.signature(_flash_attn_forward).parameters) == names
    names = [
        *(
            "dout",
            "q",
            "k",
            "v",
            "out",
            "softmax_lse",
            "cu_seqlens_q",
            "cu_seqlens_k",
            "sequed_q",
            "sequed_k",
        ),
        *("max_seqlen_q", "max_seqlen_k", "dq", "dk", "dv", "softmax_scale", "is_causal", "window_size_left"),
        *("window_size_right", "softcap", "deterministic", "sm_margin"),
    ]
    parameters = inspect.signature(_flash_attn_backward).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == names
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == ["schedule"]


@pytest.mark.parametrize("causal", [False, True])
def test_forward(causal: bool) -> None:
    q, k, v, _ = inputs()
    expected = flash_attn_func(q, k, v, SCALE, causal, return_attn_probs=True)
    for x in (q, k, v):
        x.requires_grad_()
    out, lse, *accumulators = _flash_attn_forward(q, k, v, softmax_scale=SCALE, causal=causal)
    assert same_bits(out, expected[0]) and same_bits(lse, expected[1])
    assert not out.requires_grad and not lse.requires_grad
    assert [(x.shape, x.dtype) for x in accumulators] == [((0,), torch.float32)] * 2
    for place in (
        torch.full_like(q, torch.nan, requires_grad=False),
        torch.full((2, 4, 90, 32), torch.nan).transpose(1, 2)[:, 10:80],
        torch.full((2, 70, 32, 4), torch.nan).transpose(2, 3),
    ):
        out, lse, _, _ = _flash_attn_forward(q, k, v, softmax_scale=SCALE, causal=causal, out_=place)
        assert out is place and not out.requires_grad
        assert same_bits(out, expected[0]) and same_bits(lse, expected[1])


def test_the_default_scale() -> None:
    q, k, v, dout = inputs()
    out, lse, _, _ = _flash_attn_forward(q, k, v)
    assert same_bits(out, flash_attn_func(q, k, v))
    found, expected = torch.empty_like(q), torch.empty_like(q)
    _flash_attn_backward(dout, q, k, v, out, lse, dq=found)
    _flash_attn_backward(dout, q, k, v, out, lse, dq=expected, softmax_scale=32**-0.5)
    assert same_bits(found, expected)


def test_positional_calls_of_context_parallel_libraries() -> None:
    q, k, v, dout = inputs()
    mask = {"window_size_left": -1, "window_size_right": 0}
    out, lse, _, _ = _flash_attn_forward(
        q, k, v, *[None] * 9, 70, 140, *[None] * 9, causal=True, softmax_scale=SCALE, **mask
    )
    assert same_bits(out, flash_attn_func(q, k, v, SCALE, True))
    results = [torch.empty_like(x) for x in (q, k, v)]
    _flash_attn_backward(
        dout, q, k, v, out, lse, None, None, None, None, 70, 140, *results, is_causal=True,
        softmax_scale=SCALE, deterministic=True, **mask,
    )  # fmt: skip
    assert all(map(same_bits, results, gradients((dout, q, k, v, out, lse))))


ODD = torch.zeros(1)
REFUSED = [
    *((NotImplementedError, {name: ODD}) for name in (
        "cu_seqlens_q", "cu_seqlens_k", "k_new", "v_new", "qv", "cu_seqlens_k_new", "seqused_q", "seqused_k",
        "page_table", "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale",
        "k_descale", "v_descale", "scheduler_metadata", "sequed_q", "sequed_k",
    )),
    (NotImplementedError, {"window_size_left": 3}),
    (NotImplementedError, {"window_size_right": 3}),
    (ValueError, {"window_size_left": -2}),
    (TypeError, {"window_size_right": 0.5}),
    (NotImplementedError, {"attention_chunk": 64}),
    (NotImplementedError, {"softcap": 30.0}),
    (ValueError, {"num_splits": -1}),
    (TypeError, {"pack_gqa": 1}),
    (TypeError, {"rotary_interleaved": None}),
    (ValueError, {"sm_margin": -1}),
    (TypeError, {"max_seqlen_q": ODD}),
    (ValueError, {"max_seqlen_k": -1}),
    (ValueError, {"softmax_scale": 0.0}),
    (TypeError, {"softmax_scale": ODD}),
    (TypeError, {"causal": None}),
    (TypeError, {"is_causal": 0.1}),
    (TypeError, {"deterministic": None}),
    (ValueError, {"schedule": "fastest"}),
    (ValueError, {"schedule": "unordered", "deterministic": True}),
    (TypeError, {"q": None}),
    (TypeError, {"dout": None}),
    (TypeError, {"out": 1.0}),
    (TypeError, {"softmax_lse": None}),
    (TypeError, {"out_": 1.0}),
    (TypeError, {"dk": 1.0}),
]  # fmt: skip


def takes(function, option: dict) -> bool:
    return set(option) <= set(inspect.signature(function).parameters)


@pytest.mark.parametrize(
    ("function", "error", "option"),
    [
        (function, *refused)
        for refused in REFUSED
        for function in (_flash_attn_forward, _flash_attn_backward)
        if takes(function, refused[1])
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_refused_options_are_named(function, error: type[Exception], option: dict, monkeypatch) -> None:
    """Before anything runs."""
    tensors = backward_inputs()
    names = ("dout", "q", "k", "v", "out", "softmax_lse")
    given = dict(zip(names, tensors, strict=True)) | {"dq": torch.empty_like(tensors[1])} | option
    given = {name: x for name, x in given.items() if takes(function, {name: x})}
    monkeypatch.setattr(ops, "FORWARD_KERNELS", None)
    monkeypatch.setattr(ops, "BACKWARD_KERNELS", None)
    with pytest.raises(error, match=f"^([a-z_]+, )*{next(iter(option))}\\b.*: "):
        function(**given)


def test_accepted_options_change_nothing() -> None:
    q, k, v, _ = inputs()
    accepted = {
        "softcap": -1.0,
        "num_splits": 4,
        "pack_gqa": True,
        "sm_margin": 8,
        "rotary_interleaved": False,
    }
    accepted |= {"window_size_left": None, "window_size_right": 69, "max_seqlen_q": np.int64(7)}
    out, *_ = _flash_attn_forward(q, k, v, softmax_scale=SCALE, **accepted)
    assert same_bits(out, flash_attn_func(q, k, v, SCALE))
    tensors = backward_inputs()
    found = [torch.empty_like(x) for x in tensors[1:4]]
    write(tensors, *found, softcap=-1.0, sm_margin=8, window_size_right=5, deterministic=True)
    assert all(map(same_bits, found, gradients(tensors)))


@pytest.mark.parametrize("schedule", [None, "naive", "Symmetric-Shift"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_backward(dtype: torch.dtype, schedule: str | None) -> None:
    """The bits of the functional operator, and nothing else is touched, whatever the layout."""
    tensors = backward_inputs(dtype)
    name = schedule.lower().replace("-", "_") if schedule else "auto"
    expected = gradients(tensors, name)

    def plain(x):
        whole = torch.full_like(x, torch.nan)
        return whole, whole

    def rows(x):
        whole = x.new_full((2, 2 * x.shape[1] + 3, *x.shape[2:]), torch.nan)
        return whole, whole[:, 3 : 3 + x.shape[1]]

    def every_other_number(x):
        whole = x.new_full((*x.shape, 2), torch.nan)
        return whole, whole[..., 1]

    def packed(x):
        whole = x.new_full((*x.shape[:2], x.shape[2] + 3, 33), torch.nan)
        return whole, whole[:, :, 1:-2, 1:]

    for layout in (plain, rows, every_other_number, packed):
        wholes, places = zip(*map(layout, tensors[1:4]), strict=True)
        assert write(tensors, *places, schedule=schedule).shape == (0,)
        for whole, place, x in zip(wholes, places, expected, strict=True):
            assert same_bits(place, x)
            place.fill_(torch.nan)
            assert whole.isnan().all()


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "kv"])
def test_results_that_are_not_wanted(wanted: str) -> None:
    tensors = backward_inputs()
    places = [
        torch.empty_like(x) if name in wanted else None for name, x in zip("qkv", tensors[1:4], strict=True)
    ]
    write(tensors, *places)
    for place, x in zip(places, gradients(tensors), strict=True):
        assert place is None or same_bits(place, x)


def test_no_place_for_any_result_is_refused() -> None:
    with pytest.raises(ValueError, match="^dq, dk, dv: all are None"):
        write(backward_inputs(), None, None, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_before_they_are_rounded(dtype: torch.dtype) -> None:
    """float32 places may stand beside others."""
    tensors = backward_inputs(dtype)
    expected = gradients(tensors)
    for wide in ((True, True, True), (True, False, False), (False, True, True)):
        places = [
            torch.empty_like(x, dtype=torch.float32 if w else dtype)
            for x, w in zip(tensors[1:4], wide, strict=True)
        ]
        write(tensors, *places)
        for place, x, w in zip(places, expected, wide, strict=True):
            assert same_bits(place.to(dtype), x)
            assert not w or not torch.equal(place, x.float())


def test_layout_of_what_is_read() -> None:
    tensors = backward_inputs(torch.bfloat16)
    expected = gradients(tensors)
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    assert not any(x.is_contiguous() for x in views)
    places = [torch.empty_like(x) for x in tensors[1:4]]
    write(views, *places)
    assert all(map(same_bits, places, expected))


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_places_that_do_not_fit_are_refused(name: str) -> None:
    tensors = backward_inputs(torch.bfloat16)
    like = tensors[1 + ("dq", "dk", "dv").index(name)]
    for error, place in (
        (ValueError, torch.empty_like(like[:, 1:])),
        (TypeError, torch.empty_like(like, dtype=torch.float16)),
        (TypeError, torch.empty_like(like, dtype=torch.float64)),
        (ValueError, torch.empty_like(like, device="meta")),
        (ValueError, torch.empty_like(like[:, :1]).expand_as(like)),
        (TypeError, like.to_sparse()),
    ):
        with pytest.raises(error, match=f"^{name}: "):
            write(tensors, **{"dq": None, "dk": None, "dv": None} | {name: place})
    q, k, v, _ = inputs(torch.bfloat16)
    with pytest.raises(TypeError, match="^out_: expected torch.bfloat16, got torch.float32"):
        _flash_attn_forward(q, k, v, out_=q.float())
    with pytest.raises(ValueError, match="^softmax_lse: "):
        write((*tensors[:5], tensors[5][:, :, 1:]), **{"dq": None, "dk": None, "dv": None} | {name: like})


def test_float32_sums_are_refused_where_kernels_run() -> None:
    """On meta as on CUDA."""
    dout, q, k, v = (torch.empty(1, 70, 2, 64, dtype=torch.bfloat16, device="meta") for _ in "oqkv")
    lse = torch.empty(1, 2, 70, device="meta")
    with pytest.raises(NotImplementedError, match="^dk: on CUDA only torch.bfloat16, got torch.float32"):
        write((dout, q, k, v, dout, lse), torch.empty_like(q), torch.empty_like(k, dtype=torch.float32), None)
    write((dout, q, k, v, dout, lse), torch.empty_like(q), torch.empty_like(k), None)


def test_autograd_notices_what_is_written() -> None:
    """A tensor that was saved for a backward, through the dispatcher and past it."""
    tensors = backward_inputs()
    q, k, v = tensors[1:4]
    for strange in (False, True):
        for kind in ("out_", "dq"):
            place = torch.ones_like(q)
            loss = (place * torch.ones_like(place, requires_grad=True)).sum()
            first = Wrapper(q) if strange else q
            if kind == "out_":
                _flash_attn_forward(first, k, v, out_=place)
            else:
                write((tensors[0], first, *tensors[2:]), place, None, None)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_no_node_is_made(requires_grad: bool) -> None:
    tensors = [x.detach().requires_grad_(requires_grad) for x in backward_inputs()]
    for first in (tensors[1], Wrapper(tensors[1])):
        places = [torch.empty_like(x, requires_grad=False) for x in tensors[1:4]]
        write((tensors[0], first, *tensors[2:]), *places)
        out, lse, _, _ = _flash_attn_forward(first, *tensors[2:4], out_=torch.empty_like(places[0]))
        assert not any(x.requires_grad for x in (*places, out, lse))


@pytest.mark.parametrize("place", range(6), ids=["dout", "q", "k", "v", "out", "softmax_lse"])
def test_tensors_that_are_not_their_memory(place: int, monkeypatch) -> None:
    tensors = backward_inputs()
    expected = gradients(tensors)
    monkeypatch.setattr(into, "_backward_into", None)  # the way past the dispatcher
    for strange in (Wrapper, torch._neg_view):
        given = [
            strange(-x if strange is torch._neg_view else x) if i == place else x
            for i, x in enumerate(tensors)
        ]
        results = [torch.empty_like(x) for x in tensors[1:4]]
        write(given, *results)
        assert all(map(same_bits, results, expected))


def test_inference_mode() -> None:
    with torch.inference_mode():
        tensors = backward_inputs()
        places = [torch.empty_like(x) for x in tensors[1:4]]
        write(tensors, *places)
        out, *_ = _flash_attn_forward(*tensors[1:4], softmax_scale=SCALE, causal=True, out_=places[0].clone())
    assert all(map(same_bits, (*places, out), (*gradients(backward_inputs()), backward_inputs()[4])))


def test_autocast_casts_nothing() -> None:
    q, k, v, _ = inputs()
    expected = backward_inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for first in (q, Wrapper(q)):
            for out in (None, torch.empty_like(q)):
                results = _flash_attn_forward(first, k, v, softmax_scale=SCALE, causal=True, out_=out)[:2]
                results = [x.inner if isinstance(x, Wrapper) else x for x in results]
                assert all(map(same_bits, results, expected[4:]))
        places = [torch.empty_like(x) for x in (q, k, v)]
        write(expected, *places)
    assert all(map(same_bits, places, gradients(expected)))


def test_forward_mode_is_refused() -> None:
    tensors = list(backward_inputs())
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(tensors[1], tensors[1])
        for out in (None, torch.empty_like(tensors[1])):
            with pytest.raises(NotImplementedError, match="^q: .* no forward-mode"):
                _flash_attn_forward(dual, *tensors[2:4], out_=out)
        with pytest.raises(NotImplementedError, match="^q: .* no forward-mode"):
            write((tensors[0], dual, *tensors[2:]), torch.empty_like(tensors[1]), None, None)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 5), (5, 0)])
def test_empty(seqlen_q: int, seqlen_k: int) -> None:
    tensors = backward_inputs(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    places = [torch.full_like(x, torch.nan) for x in tensors[1:4]]
    write(tensors, *places)
    out, lse, _, _ = _flash_attn_forward(*tensors[1:4], out_=torch.full_like(tensors[1], torch.nan))
    assert not any(x.any() for x in (*places, out)) and (lse == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    tensors = backward_inputs(dtype)
    q, k, v = tensors[1:4]
    factor = torch.tensor(2.0, dtype=torch.float64)
    torch.library.opcheck(FORWARD_INTO, (q, k, v, torch.empty_like(q), SCALE, True, 0))
    torch.library.opcheck(
        FORWARD_INTO, (q, k, v, torch.zeros(2, 90, 4, 32, dtype=dtype)[:, 10:80], SCALE, True, 0, factor)
    )
    plain = [torch.zeros_like(x) for x in (q, k, v)]
    slices = [torch.zeros_like(torch.cat((x, x), dim=1))[:, 5 : 5 + x.shape[1]] for x in (q, k, v)]
    wide = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
    for places in (plain, slices, wide, (plain[0], None, None), (None, *slices[1:])):
        torch.library.opcheck(BACKWARD_INTO, (*tensors, *places, SCALE, True, "shift", 0))
    torch.library.opcheck(BACKWARD_INTO, (*tensors, *plain, SCALE, True, "shift", 0, factor))


def test_fake_tensors() -> None:
    """Nothing looks at the numbers of a tensor."""
    with FakeTensorMode():
        tensors = backward_inputs()
        out, lse, _, _ = _flash_attn_forward(*tensors[1:4], causal=True, out_=torch.empty_like(tensors[1]))
        assert out.shape == tensors[4].shape and lse.shape == tensors[5].shape
        write(tensors, *(torch.empty_like(x) for x in tensors[1:4]))


RINGS = pytest.mark.parametrize("causal", [False, True], ids=["full", "zigzag"])


@RINGS
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("length", [96, 400])
def test_ring(length: int, ranks: int, causal: bool) -> None:
    q, k, v, dout = inputs(torch.float64, length, length)
    results = ring.attention(dout, q, k, v, ranks, SCALE, causal, torch.float64)
    for x, y in zip(results, oracle.gradients(dout, q, k, v, SCALE, causal), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@RINGS
@pytest.mark.parametrize("ranks", [2, 4])
def test_ring_of_16_bit_numbers(ranks: int, causal: bool) -> None:
    """With float32 sums in a ring the gradients' error is that of one call; out is a sum of rounded parts."""
    q, k, v, dout = inputs(torch.bfloat16, 400, 400)
    exact = oracle.gradients(dout, q, k, v, SCALE, causal)
    out, lse = torch.ops.dash_flash_attn.forward(q, k, v, SCALE, causal)
    single = out, *torch.ops.dash_flash_attn.backward(dout, q, k, v, out, lse, SCALE, causal, "auto", 0)
    errors = []
    for buffer_dtype in (torch.float32, torch.bfloat16):
        results = ring.attention(dout, q, k, v, ranks, SCALE, causal, buffer_dtype)
        errors.append(
            [((x.double() - y).norm() / y.norm()).item() for x, y in zip(results, exact, strict=True)]
        )
    whole = [((x.double() - y).norm() / y.norm()).item() for x, y in zip(single, exact, strict=True)]
    assert all(x < 1.5 * y < 0.01 for x, y in zip(errors[0], whole, strict=True)), (errors[0], whole)
    assert all(x < y for x, y in zip(errors[0][1:], errors[1][1:], strict=True)), errors


@RINGS
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_ring(dynamic: bool, causal: bool) -> None:
    """As one graph, with results in slices of buffers."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ring.attention, fullgraph=True, backend=counter, dynamic=dynamic)
    for length in (96, 200) if dynamic else (96,):
        q, k, v, dout = inputs(torch.bfloat16, length, length)
        for scale in (0.3, 0.2):
            arguments = dout, q, k, v, 2, scale, causal, torch.float32
            assert all(map(same_bits, compiled(*arguments), ring.attention(*arguments)))


def test_compiled_function_of_autograd() -> None:
    """How libraries make a gradient of these functions, with buffers and an out of their own."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            out, lse, _, _ = _flash_attn_forward(q, k, v, out_=torch.empty_like(q), causal=True)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx, dout):
            q, k, v, out, lse = ctx.saved_tensors
            dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
            _flash_attn_backward(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, is_causal=True)
            return dq, dk, dv

    *tensors, dout = inputs()
    leaves = [x.requires_grad_() for x in tensors]
    expected = torch.autograd.grad(flash_attn_func(*leaves, causal=True), leaves, dout)
    torch._dynamo.reset()
    for function in (Attention.apply, torch.compile(Attention.apply, fullgraph=True, backend="aot_eager")):
        assert all(map(same_bits, torch.autograd.grad(function(*leaves), leaves, dout), expected))
