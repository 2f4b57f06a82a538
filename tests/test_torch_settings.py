"""The process's settings of torch: what a block sees, what is left behind, and that memory is not filled."""

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils import deterministic

from dash_flash_attn import ops, torch_settings
from dash_flash_attn.layout import addressable
from dash_flash_attn.torch_settings import (
    deterministic_algorithms,
    unfilled_memory,
    uninitialized,
    uninitialized_like,
)

CPU = torch.device("cpu")


def settings() -> tuple[bool, bool, bool]:
    """(deterministic, warn_only, fill_uninitialized_memory)."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        deterministic.fill_uninitialized_memory,
    )


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
    deterministic.fill_uninitialized_memory = True


def filled(call: Callable[[], object]) -> int:
    """How many tensors with numbers in them torch fills in a call."""
    with torch.profiler.profile(record_shapes=True) as profile:
        call()
    return sum(event.name == "aten::fill_" and 0 not in event.input_shapes[0] for event in profile.events())


@pytest.mark.parametrize("before", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("enabled", [False, True])
def test_a_block_is_strict_and_leaves_what_was_set(before: tuple[bool, bool], enabled: bool) -> None:
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    with deterministic_algorithms(enabled), unfilled_memory():
        assert settings() == (enabled, False, not enabled)
    assert settings() == (*before, True)
    with pytest.raises(ZeroDivisionError), deterministic_algorithms(enabled), unfilled_memory():
        raise ZeroDivisionError
    assert settings() == (*before, True)


@pytest.mark.parametrize("mode", [None, False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_what_flash_attention_2_is_called_under(
    mode: bool | None, ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's kernel adds with atomics unless the mode is on and warn_only off.

    `mode` is warn_only, None where the mode is off.
    """
    seen = []

    def backward(dout, q, k, v, *_, **__):
        seen.append(settings())
        return q, k, v

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    if mode is not None:
        torch.use_deterministic_algorithms(True, warn_only=mode)
    before = settings()
    x, lse = torch.ones(1, 8, 2, 64, dtype=torch.bfloat16), torch.zeros(1, 2, 8)
    ops._backward_flash2(x, x, x, x, x, lse, 0.1, True, ordered, None)
    assert seen == [(ordered, False, not ordered)]
    assert settings() == before


def test_a_setting_of_no_effect_stays() -> None:
    """Only what would be filled is switched: another thread never sees a change without need."""
    with unfilled_memory():
        assert settings() == (False, False, True)
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = False
    with unfilled_memory():
        assert settings() == (True, False, False)
    assert settings() == (True, False, False)


def test_memory_is_not_filled() -> None:
    torch.use_deterministic_algorithms(True)
    assert filled(lambda: torch.empty(7)) == 1, "the control: there is nothing to avoid"
    assert filled(lambda: uninitialized((2, 7), torch.float32, CPU)) == 0
    # A copy for the kernels, of a tensor that they cannot read in place.
    transposed = torch.zeros(1, 8, 8, 64, dtype=torch.bfloat16).transpose(2, 3)
    assert filled(lambda: addressable(transposed)) == 0
    with unfilled_memory():
        assert filled(lambda: torch.empty(7)) == 0
    assert filled(lambda: torch.empty(7)) == 1


@pytest.mark.parametrize("filling", [False, True])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4), (0, 3), torch.Size((4, 4))])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_memory_is_a_tensor_like_any_other(filling: bool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.use_deterministic_algorithms(filling)
    x = uninitialized(shape, dtype, CPU)
    assert (x.shape, x.dtype, x.device, x.requires_grad) == (torch.Size(shape), dtype, CPU, False)
    assert x.is_contiguous() and x.storage_offset() == 0
    y = uninitialized_like(x.T if x.dim() == 2 else x)
    assert (y.shape, y.dtype, y.device) == (x.T.shape if x.dim() == 2 else x.shape, dtype, CPU)
    assert y.is_contiguous()
    assert x.untyped_storage().nbytes() == x.numel() * dtype.itemsize
    assert torch.equal(x.fill_(3), torch.full(shape, 3, dtype=dtype))


def test_blocks_of_threads_follow_each_other() -> None:
    """Or one would take a setting of another one's block for what was set before."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    wrong = []

    def switch(enabled: bool) -> None:
        for _ in range(200):
            with deterministic_algorithms(enabled):
                if settings()[:2] != (enabled, False):
                    wrong.append(settings())

    threads = [threading.Thread(target=switch, args=(i % 2 == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and settings() == (True, True, True)


def test_no_cost_of_a_block_without_filling() -> None:
    assert unfilled_memory() is torch_settings._UNCHANGED
