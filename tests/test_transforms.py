"""torch.func's transforms, batches of gradients, and tensors that are something else than their memory."""

from functools import partial

import pytest
import torch
from oracle import attention as plain_attention
from oracle import same_bits
from torch.func import grad, hessian, jacrev, vjp, vmap
from wrapper import Wrapper

from dash_flash_attn import flash_attn_func, ops

FORWARD = torch.ops.dash_flash_attn.forward.default


def function(q, k, v):
    return flash_attn_func(q, k, v, 0.3, True, return_attn_probs=True)


def operator(q, k, v):
    return FORWARD(q, k, v, 0.3, True)


def qkv(*more: int, seqlen: int = 9, dtype=torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*more, 2, seqlen, heads, 8, dtype=dtype) for heads in (4, 2, 2)]


def loss(attention, q, k, v):
    """Of both results, nowhere linear."""
    out, lse = attention(q, k, v)
    return out.square().sum() + lse.sin().sum()


def by_autograd(q, k, v):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(loss(function, *leaves), leaves)


both = pytest.mark.parametrize("attention", [function, operator])


@both
def test_grad(attention) -> None:
    tensors = qkv()
    results = grad(partial(loss, attention), argnums=(0, 1, 2))(*tensors)
    assert all(map(same_bits, results, by_autograd(*tensors)))


@both
def test_vjp(attention) -> None:
    tensors = qkv()
    leaves = [x.clone().requires_grad_() for x in tensors]
    results, pull = vjp(attention, *tensors)
    expected = function(*leaves)
    assert all(map(same_bits, results, expected))
    gradients = [torch.randn_like(x) for x in results]
    assert all(map(same_bits, pull(tuple(gradients)), torch.autograd.grad(expected, leaves, gradients)))


@both
def test_jacrev(attention) -> None:
    """Against dense attention: a batch of gradients for inputs that are not batched."""
    q, k, v = qkv(seqlen=3)
    results = jacrev(attention, argnums=(0, 1, 2))(q, k, v)
    exact = torch.autograd.functional.jacobian(lambda *x: plain_attention(*x, 0.3, True), (q, k, v))
    for x, y in zip(results, exact, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@both
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (2, 0, None), (None, -1, 0)], ids=str)
def test_vmap(in_dims, attention) -> None:
    tensors = [
        x if dim is None else x.movedim(0, dim)
        for x, dim in zip(
            (x[0] if dim is None else x for x, dim in zip(qkv(5), in_dims, strict=True)), in_dims, strict=True
        )
    ]

    def entry(i: int):
        return [x if dim is None else x.select(dim, i) for x, dim in zip(tensors, in_dims, strict=True)]

    out, lse = vmap(attention, in_dims)(*tensors)
    per_sample = vmap(grad(partial(loss, attention), argnums=(0, 1, 2)), in_dims)(*tensors)
    assert out.shape == (5, 2, 9, 4, 8) and lse.shape == (5, 2, 4, 9)
    for i in range(5):
        assert all(map(same_bits, (out[i], lse[i]), function(*entry(i))))
        assert all(map(same_bits, [x[i] for x in per_sample], by_autograd(*entry(i))))


@both
def test_vmap_inside_of_gradients(attention) -> None:
    tensors = qkv(5)

    def total(*tensors):
        return vmap(partial(loss, attention))(*tensors).sum()

    leaves = [x.clone().requires_grad_() for x in tensors]
    by_plain_autograd = torch.autograd.grad(total(*leaves), leaves)
    for results in (grad(total, argnums=(0, 1, 2))(*tensors), by_plain_autograd):
        for i in range(5):
            assert all(map(same_bits, [x[i] for x in results], by_autograd(*(x[i] for x in tensors))))


def test_vmap_of_nothing() -> None:
    out, lse = vmap(function)(*qkv(0))
    assert out.shape == (0, 2, 9, 4, 8) and lse.shape == (0, 2, 4, 9)


@both
def test_outer_levels_see_inner_calls(attention) -> None:
    """A gradient by what an inner transform's function closes over."""
    q, k, v = qkv()

    def outer(scale):
        return vjp(lambda q: attention(q * scale, k, v)[0], q)[0].square().sum()

    def plain(scale):
        return function(q * scale, k, v)[0].square().sum()

    one = torch.tensor(1.5, dtype=torch.float64)
    leaf = one.clone().requires_grad_()
    (expected,) = torch.autograd.grad(plain(leaf), leaf)
    assert expected != 0
    torch.testing.assert_close(grad(outer)(one), expected)
    torch.testing.assert_close(torch.autograd.grad(outer(leaf), leaf)[0], expected)


@both
def test_second_derivatives_are_refused(attention) -> None:
    q, k, v = qkv(seqlen=2)

    def of_q(q):
        return loss(attention, q, k, v)

    leaf = q.clone().requires_grad_()
    for run in (
        lambda: grad(lambda q: grad(of_q)(q).sum())(q),
        lambda: jacrev(grad(of_q))(q),
        lambda: grad(of_q)(leaf).sum().backward(),
    ):
        with pytest.raises(NotImplementedError, match="the backward pass has no derivative"):
            run()
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        hessian(of_q)(q)  # forward over reverse


def test_batches_of_gradients() -> None:
    """The older kind of vmap, which autograd uses itself."""
    leaves = [x.requires_grad_() for x in qkv(seqlen=3)]
    out, lse = function(*leaves)
    dout, dlse = torch.randn(7, *out.shape, dtype=out.dtype), torch.randn(7, *lse.shape, dtype=lse.dtype)
    options = {"retain_graph": True}
    batched = torch.autograd.grad((out, lse), leaves, (dout, dlse), is_grads_batched=True, **options)
    for i in range(7):
        single = torch.autograd.grad((out, lse), leaves, (dout[i], dlse[i]), **options)
        assert all(map(same_bits, [x[i] for x in batched], single))
    only_out = torch.autograd.grad(out, leaves, dout, is_grads_batched=True, **options)
    single = torch.autograd.grad(out, leaves, dout[6], **options)
    assert all(map(same_bits, [x[6] for x in only_out], single))


def test_vectorized_jacobian() -> None:
    tensors = tuple(qkv(seqlen=2))
    results = torch.autograd.functional.jacobian(lambda *x: function(*x)[0], tensors, vectorize=True)
    exact = torch.autograd.functional.jacobian(lambda *x: plain_attention(*x, 0.3, True)[0], tensors)
    for x, y in zip(results, exact, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def zeros(x):
    """Like x, without memory: what autograd uses for gradients that it knows to be 0."""
    return torch._efficientzerotensor(x.shape, dtype=x.dtype)


def negated(x):
    """-x in the memory of x."""
    return torch._neg_view(x)


def as_is(x):
    return x


STRANGE = [(Wrapper, as_is), (negated, torch.neg), (zeros, torch.zeros_like)]


@pytest.mark.parametrize("place", range(7), ids=["dout", "q", "k", "v", "out", "lse", "dlse"])
@pytest.mark.parametrize(("strange", "meaning"), STRANGE, ids=lambda f: f.__name__)
def test_tensors_that_are_not_their_memory(strange, meaning, place: int, monkeypatch) -> None:
    """In any place, they go to the dispatcher, which makes plain ones of them for the kernels."""
    leaves = [x.requires_grad_() for x in qkv(dtype=torch.float32)]
    dout, dlse = torch.randn_like(leaves[0]), torch.randn(2, 4, 9)
    saved = []

    def unpack(i: int):
        return strange(saved[i]) if i == place - 1 else saved[i]

    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or len(saved) - 1, unpack):
        results = function(*leaves)
    tensors = [dout, *saved, dlse]
    assert len(tensors) == 7 and ops.unobserved(*tensors)
    expected = ops._backward_cpu(
        *(meaning(x.detach()) if i == place else x.detach() for i, x in enumerate(tensors[:6])),
        *(0.3, True, "auto", 0),
        meaning(dlse) if place == 6 else dlse,
    )
    given = [strange(x) if i == place else x for i, x in ((0, dout), (6, dlse))]
    monkeypatch.delitem(ops.BACKWARD_KERNELS, "cpu")  # the way past the dispatcher
    assert all(map(same_bits, torch.autograd.grad(results, leaves, given), expected))


@pytest.mark.parametrize("place", range(3), ids=["q", "k", "v"])
@pytest.mark.parametrize(("strange", "meaning"), STRANGE, ids=lambda f: f.__name__)
def test_one_strange_input(strange, meaning, place: int, monkeypatch) -> None:
    tensors = qkv(dtype=torch.float32)
    expected = function(*(meaning(x) if i == place else x for i, x in enumerate(tensors)))
    monkeypatch.delitem(ops.FORWARD_KERNELS, "cpu")
    results = function(*(strange(x) if i == place else x for i, x in enumerate(tensors)))
    assert all(map(same_bits, results, expected))
