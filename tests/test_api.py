"""The public functions: their signature, what they refuse, and how tensors may be packed."""

import inspect
import math
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import same_bits

import dash_flash_attn
from dash_flash_attn import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from dash_flash_attn.checks import check_window
from dash_flash_attn.ops import auto_schedule
from dash_flash_attn.schedule import SCHEDULES


def qkv(seqlen=40, heads_q=4, heads_k=2, head_dim=32, **options):
    """q, k and v."""
    torch.manual_seed(0)
    return tuple(torch.randn(2, seqlen, h, head_dim, **options) for h in (heads_q, heads_k, heads_k))


def test_arguments_are_those_of_flash_attention_3() -> None:
    names = [
        *("q", "k", "v", "softmax_scale", "causal", "qv", "q_descale", "k_descale", "v_descale"),
        *("window_size", "attention_chunk", "softcap", "num_splits", "pack_gqa", "deterministic"),
        *("sm_margin", "return_attn_probs"),
    ]
    parameters = list(inspect.signature(flash_attn_func).parameters.values())
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == names
    assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == {
        "schedule",
        "deterministic_schedule",
        "dropout_p",
        "alibi_slopes",
    }
    names = [
        *("qkv", "softmax_scale", "causal", "q_descale", "k_descale", "v_descale", "window_size"),
        *("attention_chunk", "softcap", "deterministic", "num_heads_q", "sm_margin", "return_attn_probs"),
    ]
    parameters = inspect.signature(flash_attn_qkvpacked_func).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == names


@pytest.mark.parametrize(
    ("error", "option"),
    [
        (NotImplementedError, {"qv": torch.zeros(1)}),
        (NotImplementedError, {"q_descale": torch.ones(1)}),
        (NotImplementedError, {"k_descale": torch.ones(1)}),
        (NotImplementedError, {"v_descale": torch.ones(1)}),
        (NotImplementedError, {"alibi_slopes": torch.zeros(4)}),
        (NotImplementedError, {"window_size": (38, 0)}),
        (NotImplementedError, {"window_size": (-1, 38)}),
        (NotImplementedError, {"window_size": (None, 1)}),
        (NotImplementedError, {"window_size": (0, 0)}),
        (ValueError, {"window_size": ()}),
        (ValueError, {"window_size": (-1, -1, 0)}),
        (ValueError, {"window_size": (-2, 0)}),
        (NotImplementedError, {"attention_chunk": 64}),
        (NotImplementedError, {"softcap": 30.0}),
        (NotImplementedError, {"softcap": math.nan}),
        (NotImplementedError, {"dropout_p": 0.1}),
        (ValueError, {"num_splits": -1}),
        (ValueError, {"sm_margin": -1}),
        (ValueError, {"softmax_scale": 0.0}),
        (ValueError, {"softmax_scale": math.nan}),
        (ValueError, {"softmax_scale": math.inf}),
        (ValueError, {"softmax_scale": -math.inf}),
        (ValueError, {"softmax_scale": 1e-46}),  # 0 as a float32
        (ValueError, {"softmax_scale": -1e-46}),
        (ValueError, {"softmax_scale": 3e38}),  # infinite after the factor log2(e)
        (ValueError, {"softmax_scale": -3e38}),
        (ValueError, {"schedule": "fastest"}),
        (ValueError, {"deterministic_schedule": "fastest", "schedule": None}),
        (TypeError, {"schedule": 2}),
    ],
    ids=str,
)
def test_refused_options_are_named(error: type[Exception], option: dict) -> None:
    name = next(iter(option)).removeprefix("deterministic_")
    q, k, v = qkv()
    with pytest.raises(error, match=name):
        flash_attn_func(q, k, v, **option)
    with pytest.raises(error, match=name):
        flash_attn_kvpacked_func(q, torch.stack((k, v), dim=2), **option)


@pytest.mark.parametrize(
    "option",
    [
        {"qv": None, "window_size": (-1, -1), "attention_chunk": 0, "softcap": 0.0, "num_splits": 1},
        {"window_size": (None, None), "pack_gqa": False, "dropout_p": 0.0, "num_splits": 0},
        {"sm_margin": 8},
        {"alibi_slopes": None, "softcap": -1.0, "pack_gqa": True, "num_splits": 4},
        {"softcap": 0, "dropout_p": 0, "attention_chunk": 0.0, "num_splits": None},
        {"sm_margin": np.int64(8), "softmax_scale": np.float32(32**-0.5).astype(np.float64)},
    ],
    ids=str,
)
def test_accepted_options_change_nothing(option: dict) -> None:
    tensors = qkv()
    scale = option.get("softmax_scale", 32**-0.5)
    assert same_bits(flash_attn_func(*tensors, **option), flash_attn_func(*tensors, float(scale)))


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (ValueError, (0.0,)),
        (ValueError, (0.0, None, True)),
        (ValueError, (0.0, 0.125, True)),
        (TypeError, (0.1, None, True)),
        (TypeError, (0.1, 0.125, True)),
        (TypeError, (0.1, 1, True)),
    ],
)
def test_a_call_in_flash_attention_2_style_is_told_the_order(error, arguments) -> None:
    """(dropout_p, softmax_scale, causal) came fourth there."""
    with pytest.raises(error, match=r"FlashAttention-3's, \(q, k, v, softmax_scale, causal, ...\)"):
        flash_attn_func(*qkv(), *arguments)


@pytest.mark.parametrize(
    ("window_size", "causal"),
    [
        ((-1, 0), False), ((None, 0), False), ((49, 0), False), ((100, 0), False), ([-1, 0], False),
        ((-1, 0), True), ((-1, -1), True), ((-1, 5), True), ((49, 49), True), ((49, None), True),
        ((np.int64(49), 0), False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("seqlen_q", [1, 40, 60])
def test_windows_that_are_the_causal_mask(seqlen_q: int, window_size, causal: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 16, requires_grad=True) for n in (seqlen_q, 50, 50))
    out = flash_attn_func(q, k, v, causal=causal, window_size=window_size)
    expected = flash_attn_func(q, k, v, causal=True)
    dout = torch.randn_like(q)
    assert same_bits(out, expected)
    gradients = (torch.autograd.grad(x, (q, k, v), dout) for x in (out, expected))
    assert all(map(same_bits, *gradients))


@pytest.mark.parametrize("window_size", [(-1, -1), (None, None), (49, -1), (-1, 39), (49, 39), (1000, None)])
def test_windows_that_are_none(window_size) -> None:
    q, k, v = (torch.randn(1, n, 2, 16) for n in (40, 50, 50))
    assert same_bits(flash_attn_func(q, k, v, window_size=window_size), flash_attn_func(q, k, v))


@pytest.mark.parametrize("sides", list(product(range(6), range(6))), ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q", [1, 3, 5])
def test_a_window_is_refused_if_and_only_if_it_cuts_off_keys(seqlen_q: int, causal: bool, sides) -> None:
    """Written out, pair by pair."""
    seqlen_k, (left, right) = 4, sides
    visible = [
        [
            -left <= c - r - seqlen_k + seqlen_q <= (min(right, 0) if causal else right)
            for c in range(seqlen_k)
        ]
        for r in range(seqlen_q)
    ]
    masks = {
        mask: [[not mask or c - r <= seqlen_k - seqlen_q for c in range(seqlen_k)] for r in range(seqlen_q)]
        for mask in (False, True)
    }
    if visible in masks.values():
        found = check_window(sides, causal, seqlen_q, seqlen_k)
        assert masks[found] == visible and found >= causal
    else:
        with pytest.raises(NotImplementedError, match="^window_size: "):
            check_window(sides, causal, seqlen_q, seqlen_k)


def test_a_negative_scale_is_the_scale_of_negated_queries() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    dout = torch.randn_like(q)
    negative = flash_attn_func(q, k, v, -0.3, True)
    positive = flash_attn_func(-q, k, v, 0.3, True)
    assert torch.equal(negative, positive)
    gradients = (torch.autograd.grad(x, (q, k, v), dout) for x in (negative, positive))
    assert all(map(torch.equal, *gradients))


def test_deterministic_or_not_the_bits_are_the_same() -> None:
    results = []
    for deterministic in (False, True, np.bool_(True)):
        leaves = [x.requires_grad_() for x in qkv(seqlen=300)]
        out = flash_attn_func(*leaves, causal=True, deterministic=deterministic)
        results.append([out, *torch.autograd.grad(out.sum(), leaves)])
    for other in results[1:]:
        assert all(map(same_bits, results[0], other))


def test_unordered_is_a_control() -> None:
    tensors = qkv()
    assert same_bits(flash_attn_func(*tensors, schedule="Unordered"), flash_attn_func(*tensors))
    with pytest.raises(ValueError, match="^schedule: .*deterministic=True"):
        flash_attn_func(*tensors, deterministic=True, schedule="unordered")
    with pytest.raises(ValueError, match="^schedule: .*deterministic=True"):
        flash_attn_func(*tensors, deterministic=True, deterministic_schedule="unordered")


@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_unordered_in_deterministic_mode(passes: str, deterministic_mode) -> None:
    """Like torch's own operators. Either pass finds out, since the mode may change between them."""
    leaves = [x.requires_grad_() for x in qkv()]

    def unordered():
        return flash_attn_func(*leaves, schedule="unordered")

    out = unordered()
    run = unordered if passes == "forward" else lambda: out.sum().backward(retain_graph=True)
    deterministic_mode(True, warn_only=True)
    with pytest.warns(UserWarning, match="^schedule: .*'unordered' is not deterministic"):
        run()
    deterministic_mode(True)
    with pytest.raises(RuntimeError, match="^schedule: .*torch.use_deterministic_algorithms"):
        run()
    flash_attn_func(*leaves, schedule="shift").sum().backward()


@pytest.fixture
def deterministic_mode():
    """torch.use_deterministic_algorithms, as it was after the test."""
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("error", "name", "change"),
    [
        (ValueError, "q", lambda q, k, v: (q[0], k, v)),
        (ValueError, "k", lambda q, k, v: (q, k[:1], v)),
        (ValueError, "v", lambda q, k, v: (q, k, v[:, :-1])),
        (ValueError, "v", lambda q, k, v: (q, k, v[:, :, :1])),
        (ValueError, "k", lambda q, k, v: (q, k[..., :16], v[..., :16])),
        (ValueError, "k", lambda q, k, v: (q[:, :, :3], k, v)),
        (ValueError, "k", lambda q, k, v: (q, k[:, :, :0], v[:, :, :0])),
        (ValueError, "q", lambda q, k, v: (q[..., :0], k[..., :0], v[..., :0])),
        (ValueError, "k", lambda q, k, v: (q, k.to("meta"), v)),
        (TypeError, "k", lambda q, k, v: (q, k.half(), v)),
        (TypeError, "v", lambda q, k, v: (q, k, v.double())),
        (TypeError, "q", lambda q, k, v: (q.int(), k.int(), v.int())),
    ],
)
def test_tensors_that_do_not_fit_are_named(error: type[Exception], name: str, change) -> None:
    with pytest.raises(error, match=f"^{name}: "):
        flash_attn_func(*change(*qkv()))


def test_schedule_names() -> None:
    tensors = qkv()
    grads = {}
    for name in (*SCHEDULES, "symmetric-shift", "auto", None):
        leaves = [x.clone().requires_grad_() for x in tensors]
        flash_attn_func(*leaves, causal=True, schedule=name, deterministic=True).sum().backward()
        other = [x.clone().requires_grad_() for x in tensors]
        flash_attn_func(*other, causal=True, deterministic_schedule=name, deterministic=True).sum().backward()
        grads[name] = leaves[0].grad
        assert all(same_bits(x.grad, y.grad) for x, y in zip(leaves, other, strict=True))
    assert same_bits(grads["symmetric-shift"], grads["symmetric_shift"])
    assert same_bits(grads["auto"], grads[None])


def test_both_names_of_the_schedule() -> None:
    tensors = qkv()
    flash_attn_func(*tensors, schedule="symmetric-shift", deterministic_schedule="symmetric_shift")
    with pytest.raises(ValueError, match="deterministic_schedule.*'shift' and 'naive'"):
        flash_attn_func(*tensors, schedule="naive", deterministic_schedule="shift")


def test_auto_is_a_schedule() -> None:
    for causal in (False, True):
        for seqlen_q, seqlen_k in ((1, 1), (128, 16384), (16384, 128), (16384, 16384)):
            for head_dim, (heads_q, heads_k) in product((64, 128), ((1, 1), (32, 8))):
                assert auto_schedule(seqlen_q, seqlen_k, heads_q, heads_k, head_dim, causal) in SCHEDULES


def test_auto_is_what_was_measured_to_pay() -> None:
    """docs/schedules.md, "auto"."""

    def auto(seqlen: int, heads_q: int, heads_k: int, head_dim: int, causal: bool) -> str:
        return auto_schedule(seqlen, seqlen, heads_q, heads_k, head_dim, causal)

    for n in (512, 2048, 16384, 32768):
        for head_dim, heads in ((64, 32), (128, 16), (128, 25)):
            assert auto(n, heads, heads, head_dim, False) == "shift"
        assert auto(n, 32, 32, 64, True) == auto(n, 32, 8, 64, True) == "shift"
    # The heads of a pair go opposite ways up to 8 KV tiles; the first chains of 96 fill no chip.
    by_length = {n: auto(n, 16, 16, 128, True) for n in (1024, 2048, 12288, 16384, 32768)}
    assert list(by_length.values()) == ["shift", "symmetric_shift", "shift", "symmetric_shift", "shift"]
    by_length = {n: auto(n, 32, 8, 128, True) for n in (512, 12288, 16384, 32768)}
    assert list(by_length.values()) == ["symmetric_shift", "shift", "symmetric_shift", "descending"]
    assert auto(32768, 8, 2, 128, True) == "shift"  # too little to wait for
    # 16 parts of a group would end at once.
    by_length = {n: auto(n, 32, 1, 128, True) for n in (2048, 4096, 8192)}
    assert list(by_length.values()) == ["shift", "symmetric_shift", "symmetric_shift"]
    # Heads that are no pairs.
    by_length = {n: auto(n, 25, 25, 64, True) for n in (1024, 2048, 16384, 32768)}
    assert list(by_length.values()) == ["shift", "symmetric_shift", "symmetric_shift", "shift"]
    assert auto_schedule(1024, 2048, 16, 16, 128, True) == "symmetric_shift"  # not a square


def test_return_attn_probs() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    out, lse = flash_attn_func(q, k, v, return_attn_probs=True)
    assert same_bits(out, flash_attn_func(q, k, v))
    assert lse.shape == (2, 4, 40) and lse.dtype == torch.float32 and lse.requires_grad


def test_default_scale() -> None:
    tensors = qkv(head_dim=64)
    assert same_bits(flash_attn_func(*tensors), flash_attn_func(*tensors, 0.125))


def test_kvpacked() -> None:
    q, k, v = qkv()
    dout = torch.randn_like(q)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = flash_attn_func(*leaves, 0.3, True, deterministic=True)
    out.backward(dout)
    q2, kv = q.clone().requires_grad_(), torch.stack((k, v), dim=2).requires_grad_()
    out2, lse = flash_attn_kvpacked_func(
        q2, kv, 0.3, True, schedule="auto", deterministic=True, return_attn_probs=True
    )
    out2.backward(dout)
    assert same_bits(out, out2) and lse.shape == (2, 4, 40)
    for x, y in zip((q2.grad, *kv.grad.unbind(2)), (x.grad for x in leaves), strict=True):
        assert same_bits(x, y)
    with pytest.raises(ValueError, match="^kv: "):
        flash_attn_kvpacked_func(q, torch.stack((k, k, v), dim=2))


@pytest.mark.parametrize("heads_k", [4, 2])
def test_qkvpacked(heads_k: int) -> None:
    q, k, v = qkv(heads_k=heads_k)
    dout = torch.randn_like(q)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = flash_attn_func(*leaves, 0.3, True, deterministic=True, schedule="naive")
    out.backward(dout)
    grads = [x.grad for x in leaves]
    if heads_k == 4:
        packed = torch.stack((q, k, v), dim=2).requires_grad_()
        flash_attn_qkvpacked_func(packed, 0.3, True, deterministic=True, schedule="naive").backward(dout)
        for x, y in zip(packed.grad.unbind(2), grads, strict=True):
            assert same_bits(x, y)
    joined = torch.cat((q, k, v), dim=2).requires_grad_()
    flash_attn_qkvpacked_func(
        joined, 0.3, True, deterministic=True, num_heads_q=4, schedule="naive"
    ).backward(dout)
    assert same_bits(joined.grad, torch.cat(grads, dim=2))


@pytest.mark.parametrize(
    ("shape", "heads_q", "name"),
    [
        ((2, 8, 2, 4, 16), None, "qkv"),
        ((2, 8, 16), None, "qkv"),
        ((2, 8, 12, 16), None, "num_heads_q"),
        ((2, 8, 12, 16), 11, "num_heads_q"),
        ((2, 8, 12, 16), 12, "num_heads_q"),
        ((2, 8, 12, 16), 7, "num_heads_q"),
        ((2, 8, 12, 16), 0, "num_heads_q"),
        ((2, 8, 3, 4, 16), 2, "num_heads_q"),
    ],
)
def test_qkvpacked_shapes_that_do_not_fit(shape: tuple, heads_q: int | None, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        flash_attn_qkvpacked_func(torch.zeros(shape), num_heads_q=heads_q)


@pytest.mark.parametrize(
    ("error", "change"),
    [
        (TypeError, {"dtype": torch.float32}),
        (TypeError, {"dtype": torch.float64}),
        (NotImplementedError, {"head_dim": 80}),
        (NotImplementedError, {"heads_q": 65536}),
        (ValueError, {"heads_k": 3}),
    ],
)
def test_a_dry_run_refuses_what_cuda_refuses(error: type[Exception], change: dict) -> None:
    """Tensors without data, with which users try a model before they have a GPU."""
    options = {"head_dim": 64, "dtype": torch.bfloat16, "device": "meta", **change}
    with pytest.raises(error, match="^(q: on meta, as on CUDA,|k: its 3 heads)"):
        flash_attn_func(*qkv(**options))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_dry_run(dtype: torch.dtype, head_dim: int) -> None:
    leaves = [x.requires_grad_() for x in qkv(head_dim=head_dim, dtype=dtype, device="meta")]
    out, lse = flash_attn_func(*leaves, return_attn_probs=True)
    assert out.shape == leaves[0].shape and out.dtype == dtype and out.is_meta
    assert lse.shape == (2, 4, 40) and lse.dtype == torch.float32
    gradients = torch.autograd.grad((out.sum(), lse.sum()), leaves)
    assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, dtype) for x in leaves]


@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(0, 3, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0)])
def test_empty_tensors(batch: int, seqlen_q: int, seqlen_k: int) -> None:
    q = torch.randn(batch, seqlen_q, 4, 32, requires_grad=True)
    k, v = (torch.randn(batch, seqlen_k, 2, 32, requires_grad=True) for _ in "kv")
    out, lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert out.shape == q.shape and lse.shape == (batch, 4, seqlen_q)
    assert (out == 0).all() and (lse == -torch.inf).all()
    out.sum().backward()
    for x in (q, k, v):
        assert x.grad.shape == x.shape and (x.grad == 0).all()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"q": None}, TypeError, "q: expected a tensor, got None"),
        ({"v": [1.0]}, TypeError, "v: expected a tensor, got"),
        ({"k": torch.zeros(2, 40, 2, 32).to_sparse()}, TypeError, "k: expected a dense tensor"),
        ({"causal": "no"}, TypeError, "causal: expected True or False, got 'no'"),
        ({"causal": 0.125}, TypeError, "causal: expected True or False, got 0.125"),
        ({"deterministic": "no"}, TypeError, "deterministic: expected True or False, got 'no'"),
        ({"softmax_scale": "x"}, TypeError, "softmax_scale: expected a number, got 'x'"),
        ({"q": torch.tensor(1.0)}, ValueError, r"q: expected \(batch, seqlen, heads, head_dim\), got \(\)"),
        ({"causal": None}, TypeError, "causal: expected True or False, got None"),
        ({"causal": 1}, TypeError, "causal: expected True or False, got 1"),
        ({"causal": torch.tensor(True)}, TypeError, "causal: expected True or False, got a tensor"),
        (
            {"deterministic": torch.tensor(True)},
            TypeError,
            "deterministic: expected True or False, got a tensor",
        ),
        ({"deterministic": 0}, TypeError, "deterministic: expected True or False, got 0"),
        ({"softmax_scale": torch.tensor(0.1)}, TypeError, "softmax_scale: expected a number, got a tensor"),
        (
            {"softmax_scale": torch.ones((), requires_grad=True)},
            TypeError,
            "softmax_scale: .*gradient.* multiply q by it",
        ),
        ({"softmax_scale": True}, TypeError, "softmax_scale: expected a number, got True"),
        ({"softmax_scale": 1j}, TypeError, "softmax_scale: expected a number, got 1j"),
        (
            {"softcap": torch.zeros((), requires_grad=True)},
            TypeError,
            "softcap: expected a number, got a tensor",
        ),
        ({"softcap": False}, TypeError, "softcap: expected a number, got False"),
        ({"dropout_p": torch.zeros(())}, TypeError, "dropout_p: expected a number, got a tensor"),
        ({"dropout_p": None}, TypeError, "dropout_p: expected a number, got None"),
        ({"attention_chunk": False}, TypeError, "attention_chunk: expected a number, got False"),
        ({"num_splits": True}, TypeError, "num_splits: expected a number of splits, got True"),
        ({"num_splits": 1.0}, TypeError, "num_splits: expected a number of splits, got 1.0"),
        ({"pack_gqa": 2}, TypeError, "pack_gqa: expected True or False, got 2"),
        ({"sm_margin": True}, TypeError, "sm_margin: expected a number of SMs, got True"),
        ({"window_size": 128}, TypeError, "window_size: expected a pair .* got 128"),
        ({"window_size": None}, TypeError, "window_size: expected a pair .* got None"),
        ({"window_size": "ab"}, TypeError, "window_size: expected a pair .* got 'ab'"),
        ({"window_size": (0.5, 0)}, TypeError, "window_size: expected numbers of keys"),
        ({"window_size": (True, 0)}, TypeError, "window_size: expected numbers of keys"),
        ({"window_size": (torch.tensor(1), 0)}, TypeError, "window_size: expected numbers of keys"),
        ({"sm_margin": None}, TypeError, "sm_margin: expected a number of SMs, got None"),
        ({"schedule": "best"}, ValueError, "schedule: 'best' is none of auto, naive"),
        ({"schedule": 3}, TypeError, "schedule: expected a name"),
    ],
)
def test_arguments_of_a_wrong_type_are_named(arguments, error, message) -> None:
    tensors = dict(zip("qkv", qkv(), strict=True))
    with pytest.raises(error, match=f"^{message}"):
        flash_attn_func(**{**tensors, **arguments})


def test_packed_arguments_of_a_wrong_type_are_named() -> None:
    with pytest.raises(TypeError, match="^kv: expected a tensor, got None"):
        flash_attn_kvpacked_func(qkv()[0], None)
    with pytest.raises(TypeError, match=r"^qkv: expected a tensor, got \[1\]"):
        flash_attn_qkvpacked_func([1])
    for number, shown in (("4", "'4'"), (True, "True")):
        with pytest.raises(TypeError, match=f"^num_heads_q: expected a number of heads, got {shown}"):
            flash_attn_qkvpacked_func(torch.zeros(1, 4, 6, 64), num_heads_q=number)


def test_auto_in_any_case() -> None:
    assert same_bits(flash_attn_func(*qkv(), schedule="AUTO"), flash_attn_func(*qkv()))


def test_the_source_folder_alone_says_what_to_do(tmp_path) -> None:
    """Beside an installed package it would be imported in its place, without its native module."""
    package = tmp_path / "dash_flash_attn"
    package.mkdir()
    for source in Path(dash_flash_attn.__file__).parent.glob("*.py"):
        (package / source.name).write_text(source.read_text())
    result = subprocess.run(
        # Without site-packages, where an editable install would lend its native module.
        [sys.executable, "-S", "-c", "import dash_flash_attn"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert "ImportError: dash_flash_attn: " in result.stderr and "pip install -e ." in result.stderr
