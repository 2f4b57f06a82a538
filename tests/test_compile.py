"""torch.compile: one graph, and no more of them than torch needs; the bits of the plain call."""

import pytest
import torch
from oracle import same_bits
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental import symbolic_shapes

from dash_flash_attn import flash_attn_func

# Where torch does not tell whether it knows a number, each scale is a constant, as in its own attention.
TELLS = hasattr(symbolic_shapes, "has_static_value")


def leaves(seqlen: int = 70) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, seqlen, heads, 32, requires_grad=True) for heads in (4, 2, 2)]


def compiled(function, **options) -> tuple[object, CompileCounterWithBackend]:
    """The function as one graph, and the counter of its compilations."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter, **options), counter


def assert_same(function, other, *arguments) -> None:
    """The results of both, and their gradients by the tensors that require one."""
    out, expected = function(*arguments), other(*arguments)
    assert same_bits(out, expected)
    by = [x for x in arguments if isinstance(x, torch.Tensor) and x.requires_grad]
    dout = torch.randn_like(out)
    for x, y in zip(torch.autograd.grad(out, by, dout), torch.autograd.grad(expected, by, dout), strict=True):
        assert same_bits(x, y)


def causal(q, k, v, softmax_scale=None):
    return flash_attn_func(q, k, v, softmax_scale, causal=True)


def test_scales_as_arguments() -> None:
    """More of them than torch compiles a function for."""
    function, counter = compiled(causal)
    for scale in (0.1, 0.2, 0.3, -0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0)[: None if TELLS else 5]:
        assert_same(function, causal, *leaves(), scale)
    if TELLS:
        assert counter.frame_count == 2  # one constant, and one for all


def test_a_scale_a_layer() -> None:
    """Each layer is compiled by itself, and all have the same code."""

    class Layer(torch.nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.softmax_scale = 1 / (number + 1)

        def forward(self, q, k, v):
            return causal(q, k, v, self.softmax_scale)

    layers = torch.nn.ModuleList(map(Layer, range(12 if TELLS else 5)))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    for layer in layers:
        assert_same(torch.compile(layer, fullgraph=True, backend=counter), layer, *leaves())
    if TELLS:
        assert counter.frame_count == 2

    def model(q, k, v):
        for layer in layers:
            q = layer(q, k, v)
        return q

    function, counter = compiled(model)
    assert_same(function, model, *leaves())
    assert counter.frame_count == 1


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_scale_from_a_symbolic_shape(dynamic: bool | None) -> None:
    def attention(q, k, v):
        return causal(q, k, v, q.shape[1] ** -0.5)

    function, counter = compiled(attention, dynamic=dynamic)
    for seqlen in (70, 80, 100, 130):
        assert_same(function, attention, *leaves(seqlen))
    if TELLS:
        assert counter.frame_count <= 2


@pytest.mark.skipif(not TELLS, reason="this torch does not say whether it knows a number")
def test_a_scale_from_a_tensor() -> None:
    def attention(q, k, v, scale):
        return causal(q, k, v, scale.item())

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        function, counter = compiled(attention)
        for scale in (0.1, -0.2, 0.3):
            assert_same(function, attention, *leaves(), torch.tensor(scale))
        assert counter.frame_count == 1
        with pytest.raises(ValueError, match="^softmax_scale: "):
            function(*leaves(), torch.tensor(0.0))


def test_masks_from_symbolic_shapes() -> None:
    def attention(q, k, v):
        is_causal = q.shape[1] > 1
        out = flash_attn_func(q, k, v, causal=is_causal)
        return out + flash_attn_func(q, k, v, causal=is_causal, window_size=(k.shape[1] - 1, 0))

    function, _ = compiled(attention, dynamic=True)
    for seqlen in (1, 70, 130):
        assert_same(function, attention, *leaves(seqlen))


def test_log_sum_exp() -> None:
    """Either result, or both, with a gradient."""

    def attention(q, k, v):
        return flash_attn_func(q, k, v, causal=True, return_attn_probs=True)

    function, _ = compiled(attention)
    q, k, v = inputs = leaves()
    dout, dlse = torch.randn_like(q), torch.randn(2, 4, 70)
    for pick in ([0], [1], [0, 1]):
        gradients = []
        for run in (attention, function):
            results = [run(q, k, v)[i] for i in pick]
            gradients.append(torch.autograd.grad(results, inputs, [(dout, dlse)[i] for i in pick]))
        assert all(map(same_bits, *gradients))
