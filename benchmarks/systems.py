"""Our backward and other projects', behind one interface.

A name with + is a deterministic backward, one with - is not. Ours go by their schedule; `unordered` is the
control, with dQ summed in the order of arrival.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dash_flash_attn import flash_attn_func
from dash_flash_attn.checks import UNORDERED
from dash_flash_attn.lab.calibrate import auto
from dash_flash_attn.schedule import SCHEDULES
from dash_flash_attn.torch_settings import deterministic_algorithms

from . import harness
from .harness import Row
from .shapes import Shape, describe

AUTO = "auto"
OURS = (*SCHEDULES, AUTO, UNORDERED)

GRADIENTS = ("dq", "dk", "dv")
"""What a backward returns."""

IN_TORCH = ("cudnn", "fa2")
FROM_MODULE = ("fa3", "fa4")


class Attention(Protocol):
    """An attention's two passes. Tensors are (batch, seqlen, heads, head_dim)."""

    def fwd(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Any]:
        """Out, and whatever `bwd` wants as `lse`."""

    def bwd(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Any, causal: bool,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Dq, dk and dv."""


class Ours:
    """This package's operators with one schedule."""

    def __init__(self, schedule: str) -> None:
        self.schedule = schedule

    def fwd(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """See `Attention`."""
        return torch.ops.dash_flash_attn.forward(q, k, v, q.shape[-1] ** -0.5, causal)

    def bwd(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """See `Attention`. The schedule says whether it is deterministic."""
        return torch.ops.dash_flash_attn.backward(
            dout, q, k, v, out, lse, q.shape[-1] ** -0.5, causal, self.schedule, 0
        )


class CuDnn:
    """torch's cuDNN attention. What its backward needs beside the tensors is in `lse`."""

    def fwd(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Any]:
        """See `Attention`. NotImplementedError under a causal mask for queries and keys of unlike number."""
        if causal and q.shape[1] != k.shape[1]:
            # It would be timed on another problem: its mask begins in the upper left corner.
            raise NotImplementedError("torch's cuDNN attention aligns a causal mask with the first query")
        out, *rest = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *_heads_first(q, k, v), None, True, is_causal=causal
        )
        return out.transpose(1, 2), rest

    def bwd(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Any, causal: bool,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """See `Attention`. NotImplementedError if deterministic."""
        if deterministic:
            raise NotImplementedError("torch's cuDNN attention has no deterministic backward")
        log_sum_exp, starts_q, starts_k, max_q, max_k, seed, offset, _ = lse
        gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *_heads_first(dout, q, k, v, out), log_sum_exp, seed, offset, None, starts_q, starts_k,
            max_q, max_k, 0.0, causal,
        )  # fmt: skip
        return tuple(x.transpose(1, 2) for x in gradients)


class Flash2:
    """torch's FlashAttention-2, what torch.use_deterministic_algorithms(True) leaves a user of torch."""

    def fwd(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Any]:
        """See `Attention`."""
        out, *rest = torch.ops.aten._scaled_dot_product_flash_attention(
            *_heads_first(q, k, v), 0.0, causal
        )  # fmt: skip
        return out.transpose(1, 2), rest

    def bwd(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Any, causal: bool,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """See `Attention`."""
        log_sum_exp, starts_q, starts_k, max_q, max_k, seed, offset, _ = lse
        with deterministic_algorithms(deterministic):
            gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                *_heads_first(dout, q, k, v, out), log_sum_exp, starts_q, starts_k, max_q, max_k, 0.0,
                causal, seed, offset,
            )  # fmt: skip
        return tuple(x.transpose(1, 2) for x in gradients)


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


class _Differentiable(torch.autograd.Function):
    """A peer in autograd, with as little around it as autograd allows."""

    @staticmethod
    def forward(ctx, q, k, v, causal, system):
        out, ctx.lse = system.implementation.fwd(q, k, v, causal)
        ctx.save_for_backward(q, k, v, out)
        ctx.causal, ctx.system = causal, system
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out = ctx.saved_tensors
        gradients = ctx.system.implementation.bwd(
            dout.contiguous(), q, k, v, out, ctx.lse, ctx.causal, ctx.system.deterministic
        )
        return *gradients, None, None


@dataclass(frozen=True)
class System:
    """Something to measure.

    Args:
        name: as the tables show it.
        implementation: the passes; where they could not be loaded, why not.
        deterministic: whether the backward is asked to be.
    """

    name: str
    implementation: Attention | str
    deterministic: bool

    @property
    def ours(self) -> bool:
        """Whether it is this package's."""
        return self.name in OURS

    def backward(self, tensors: Sequence[Tensor], causal: bool) -> Callable[[], tuple[Tensor, ...]]:
        """Runs the forward on (q, k, v, dout); the backward as a call. Raises what the forward raises."""
        if isinstance(self.implementation, str):
            raise RuntimeError(self.implementation)
        passes = self.implementation
        q, k, v, dout = tensors
        out, lse = passes.fwd(q, k, v, causal)
        return lambda: passes.bwd(dout, q, k, v, out, lse, causal, self.deterministic)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """Differentiable attention, (batch, seqlen, heads, head_dim) like q."""
        if isinstance(self.implementation, str):
            raise RuntimeError(self.implementation)
        if self.ours:
            return flash_attn_func(
                q, k, v, causal=causal, deterministic=self.deterministic, schedule=self.name
            )
        return _Differentiable.apply(q, k, v, causal, self)


def our_system(name: str) -> System:
    """The system of one of OURS."""
    return System(name, Ours(name), deterministic=name != UNORDERED)


def peer_systems(names: Sequence[str], path: Path | None) -> list[System]:
    """A peer's deterministic and other backward. One that cannot be loaded fails in each of its cells.

    Args:
        names: of IN_TORCH and FROM_MODULE, or whatever else the module knows.
        path: a module with load(name) -> an Attention.
    """
    systems = []
    for name in names:
        try:
            if name in IN_TORCH:
                implementation: Attention | str = CuDnn() if name == "cudnn" else Flash2()
            elif path is None:
                raise ValueError("--peers-path says no module that has it")
            else:
                implementation = harness.load_module(path).load(name)
        except Exception as error:
            implementation = f"not loaded: {harness.one_line(error)}"
            print(f"{name}: {implementation}")
        if name != "cudnn":  # it has no deterministic backward
            systems.append(System(name + "+", implementation, True))
        systems.append(System(name + "-", implementation, False))
    return systems


def add_arguments(parser: argparse.ArgumentParser, schedules: Sequence[str]) -> None:
    """--schedules, --peers and --peers-path."""
    parser.add_argument(
        "--schedules", type=_names, default=list(schedules),
        help=f"ours: of {','.join(OURS)} ({','.join(schedules)})",
    )  # fmt: skip
    parser.add_argument(
        "--peers", type=_names, default=[],
        help=f"others: {','.join(IN_TORCH)} are torch's, {','.join(FROM_MODULE)} need --peers-path",
    )  # fmt: skip
    parser.add_argument("--peers-path", type=Path, help="a module with load(name) -> object with fwd, bwd")


def chosen(options: argparse.Namespace) -> list[System]:
    """The systems that a command line names. Ends the program for a name that ours have not."""
    unknown = [name for name in options.schedules if name not in OURS]
    if unknown:
        raise SystemExit(f"benchmarks: --schedules: {unknown[0]!r} is none of {', '.join(OURS)}")
    return [*map(our_system, options.schedules), *peer_systems(options.peers, options.peers_path)]


def behind_auto(names: Sequence[str], shape: Shape) -> str | None:
    """The schedule that "auto" is at a shape, if it is among the names: the two need not both be timed."""
    schedule = auto(shape)
    return schedule if AUTO in names and schedule in names else None


def with_auto(rows: dict[str, Row], alias: str | None) -> list[Row]:
    """The rows of a cell's systems, with that of `behind_auto`'s schedule as "auto"'s, if there is one."""
    if alias:
        rows[AUTO] = {**rows[alias], "system": AUTO, "measured_as": alias}
    return list(rows.values())


def row_of_each(
    shape: Shape, systems: Sequence[System], measure: Callable[[System], Row], **columns: Any
) -> list[Row]:
    """A row for each system at one shape: the shape, `columns`, and what `measure` finds out.

    A system that fails has the error in its row. Where the schedule that "auto" takes is among the systems,
    "auto" is not measured but gets its row, marked `measured_as`.
    """
    alias = behind_auto([s.name for s in systems], shape)
    rows: dict[str, Row] = {}
    for system in systems:
        row = {**describe(shape), "system": system.name, **columns}
        try:
            if system.name != AUTO or not alias:
                row |= measure(system)
        except Exception as error:
            row["error"] = harness.one_line(error)
            harness.check_gpu()
        rows[system.name] = row
    return with_auto(rows, alias)


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]
