"""torch.autocast: inputs are cast like those of scaled_dot_product_attention, and nothing inside is."""

import pytest
import torch
from oracle import same_bits

from dash_flash_attn import flash_attn_func

FORWARD = torch.ops.dash_flash_attn.forward.default
BACKWARD = torch.ops.dash_flash_attn.backward.default


def function(q, k, v):
    return flash_attn_func(q, k, v, 0.2, True, return_attn_probs=True)


def operator(q, k, v):
    return FORWARD(q, k, v, 0.2, True)


def qkv(*dtypes: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(2, 70, heads, 32).to(dtype).requires_grad_()
        for heads, dtype in zip((4, 2, 2), dtypes, strict=True)
    ]


MIXED = [
    (torch.float32, torch.float32, torch.float32),
    (torch.float32, torch.bfloat16, torch.float16),
    (torch.bfloat16, torch.bfloat16, torch.float32),
]


@pytest.mark.parametrize("attention", [function, operator])
@pytest.mark.parametrize("dtypes", MIXED, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_inputs_are_cast(dtype: torch.dtype, dtypes, attention) -> None:
    """The bits of a call with inputs that were cast before, wherever the backward runs."""
    tensors = qkv(*dtypes)
    expected = attention(*(x.to(dtype) for x in tensors))
    gradients = [torch.randn_like(x) for x in expected]
    expected = *expected, *torch.autograd.grad(expected, tensors, gradients)
    with torch.autocast("cpu", dtype=dtype):
        results = attention(*tensors)
        inside = torch.autograd.grad(results, tensors, gradients, retain_graph=True)
    outside = torch.autograd.grad(results, tensors, gradients)
    assert results[0].dtype == dtype and results[1].dtype == torch.float32
    assert [x.dtype for x in inside] == list(dtypes)
    for found in (inside, outside):
        assert all(map(same_bits, (*results, *found), expected))


def test_what_scaled_dot_product_attention_does() -> None:
    tensors = qkv(*MIXED[0])
    heads_first = [x.transpose(1, 2) for x in tensors]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = torch.nn.functional.scaled_dot_product_attention(
            *heads_first, is_causal=True, scale=0.2, enable_gqa=True
        )
        ours, _ = function(*tensors)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs.transpose(1, 2), rtol=2e-2, atol=2e-2)


def test_float64_is_not_cast() -> None:
    tensors = qkv(*[torch.float64] * 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = function(*tensors)
        gradients = torch.autograd.grad(out.sum(), tensors)
    out2, lse2 = function(*tensors)
    assert same_bits(out, out2) and same_bits(lse, lse2)
    assert all(map(same_bits, gradients, torch.autograd.grad(out2.sum(), tensors)))


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_autocast_of_another_device_changes_nothing(kind: str) -> None:
    tensors = qkv(*MIXED[0])
    expected = function(*tensors)
    torch.set_autocast_enabled(kind, True)  # the context would switch itself off without such a device
    try:
        assert all(map(same_bits, function(*tensors), expected))
        with pytest.raises(TypeError, match="^k: expected q's dtype"):
            function(*qkv(*MIXED[1]))
    finally:
        torch.set_autocast_enabled(kind, False)


def test_the_products_of_the_reference_are_not_cast() -> None:
    """The operators without autograd, on float32: autocast would make them bfloat16 products."""
    q, k, v = (x.detach() for x in qkv(*MIXED[0]))
    out, lse = FORWARD(q, k, v, 0.2, True)
    arguments = torch.randn_like(out), q, k, v, out, lse, 0.2, True, "auto", 0
    expected = BACKWARD(*arguments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(map(same_bits, BACKWARD(*arguments), expected))


def test_compiled() -> None:
    tensors = qkv(*MIXED[1])
    with torch.autocast("cpu"):
        expected = function(*tensors)
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        results = compiled(*tensors)
    gradients = [torch.randn_like(x) for x in expected]
    assert all(map(same_bits, results, expected))
    found = (torch.autograd.grad(x, tensors, gradients) for x in (results, expected))
    assert all(map(same_bits, *found))
