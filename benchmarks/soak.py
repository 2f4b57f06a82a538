"""Random backward calls until a time is up: do they repeat their bits, and are they right?

Each case draws lengths, heads, dtype, mask, schedule, SMs left to others, and whether a second stream loads
the GPU. Its gradients are computed three times under these conditions and once with the whole GPU to itself:
all bits must be equal. They are compared with float64 too: the error may be twice that of torch's
FlashAttention-2 on the same inputs. Every failure prints the command that repeats it.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dash_flash_attn import forward as forward_module
from dash_flash_attn import ops, reference
from dash_flash_attn.schedule import SCHEDULES, waits_in_line

from . import harness
from .accuracy import oracle
from .bits import DTYPES
from .systems import GRADIENTS

REPEATS = 3
CHECKED = ("out", *GRADIENTS)

LARGEST_CYCLE = 64
"""SMs that a cyclic schedule may need (docs/architecture.md)."""

MOST_SCORES = 1 << 28
"""Scores of a case, all heads together: float64 takes some 50 ms for them on an H200."""

_NAME = re.compile(
    r"b(?P<batch>\d+)-q(?P<seqlen_q>\d+)-k(?P<seqlen_k>\d+)-h(?P<heads_q>\d+)-kv(?P<heads_k>\d+)"
    r"-d(?P<head_dim>\d+)-(?P<dtype>bf16|fp16)-(?P<mask>full|causal)-(?P<schedule>[a-z_]+)"
    r"-m(?P<sm_margin>\d+)-(?P<load>load|quiet)-s(?P<seed>\d+)"
)


class SoakCase(NamedTuple):
    """One random call. Lengths in tokens; `load`: beside matmuls on another stream."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    dtype: str
    causal: bool
    schedule: str
    sm_margin: int
    load: bool
    seed: int

    def __str__(self) -> str:
        return (
            f"b{self.batch}-q{self.seqlen_q}-k{self.seqlen_k}-h{self.heads_q}-kv{self.heads_k}"
            f"-d{self.head_dim}-{self.dtype}-{'causal' if self.causal else 'full'}-{self.schedule}"
            f"-m{self.sm_margin}-{'load' if self.load else 'quiet'}-s{self.seed}"
        )

    @staticmethod
    def parse(name: str) -> SoakCase:
        """The case of a name. Raises ValueError."""
        match = _NAME.fullmatch(name)
        if not match or match["schedule"] not in SCHEDULES:
            raise ValueError(f"{name!r} is no case")
        numbers = {field: int(value) for field, value in match.groupdict().items() if value.isdigit()}
        return SoakCase(
            **numbers, dtype=match["dtype"], causal=match["mask"] == "causal", schedule=match["schedule"],
            load=match["load"] == "load",
        )  # fmt: skip

    @property
    def command(self) -> str:
        """What repeats the case."""
        return f"python -m benchmarks soak --case {self}"

    def inputs(self, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and dout, standard normal, from the case's seed."""
        generator = torch.Generator(device).manual_seed(self.seed)

        def normal(seqlen: int, heads: int) -> Tensor:
            shape = (self.batch, seqlen, heads, self.head_dim)
            return torch.randn(shape, generator=generator, device=device, dtype=DTYPES[self.dtype])

        q, k, v = normal(self.seqlen_q, self.heads_q), *(normal(self.seqlen_k, self.heads_k) for _ in "kv")
        return q, k, v, normal(self.seqlen_q, self.heads_q)


def draw(rng: random.Random, sms: int, most_scores: int = MOST_SCORES) -> SoakCase:
    """A random case for a GPU with so many SMs."""
    seqlen_q = _length(rng)
    # Equal lengths, which take another forward, more often than chance would have it.
    seqlen_k = seqlen_q if rng.random() < 0.5 else _length(rng)
    heads_k = rng.choice((1, 1, 2, 3, 4, 8))
    heads_q = heads_k * rng.choice((1, 1, 2, 3, 4, 7, 8))
    batch = rng.choice((1, 1, 2, 3, 5))
    while batch * heads_q * seqlen_q * seqlen_k > most_scores:
        if batch > 1:
            batch = 1
        elif heads_k > 1:
            heads_q, heads_k = heads_q // heads_k, 1
        elif heads_q > 1:
            heads_q = 1
        else:
            seqlen_q, seqlen_k = (max(1, n // 2) for n in (seqlen_q, seqlen_k))
    schedule = rng.choice(SCHEDULES)
    most = sms - 1 if waits_in_line(schedule) else max(0, sms - LARGEST_CYCLE)
    return SoakCase(
        batch, seqlen_q, seqlen_k, heads_q, heads_k, rng.choice((64, 128)), rng.choice(tuple(DTYPES)),
        rng.random() < 0.6, schedule, rng.choice((0, min(1, most), rng.randint(0, most))),
        rng.random() < 0.5, rng.randrange(1 << 32),
    )  # fmt: skip


def _length(rng: random.Random) -> int:
    """1 to 16,384 tokens, each power of two as often as the next; often at the edge of a tile."""
    length = int(2 ** rng.uniform(0, 14))
    if rng.random() < 0.5:
        length = max(1, length // 64 * 64 + rng.choice((-1, 0, 0, 1)))
    return length


def check(case: SoakCase, device: str = "cuda") -> list[str]:
    """What is wrong with a case's gradients; empty where nothing is."""
    q, k, v, dout = case.inputs(device)
    scale = case.head_dim**-0.5
    busy = _Load(case.load and device == "cuda")

    def compute(sm_margin: int) -> tuple[Tensor, ...]:
        out, lse = torch.ops.dash_flash_attn.forward(q, k, v, scale, case.causal)
        gradients = torch.ops.dash_flash_attn.backward(
            dout, q, k, v, out, lse, scale, case.causal, case.schedule, sm_margin
        )
        return out, *gradients

    runs = []
    for _ in range(REPEATS):
        busy.give()
        runs.append(compute(case.sm_margin))
    busy.wait()
    alone = compute(0)
    problems = []
    for number, run in enumerate(runs):
        for name, x, y in zip(CHECKED, run, alone, strict=True):
            if not oracle().same_bits(x, y):
                problems.append(f"{name} of run {number} differs in {int((x != y).sum())} numbers")
    exact = oracle().gradients(dout, q, k, v, scale, case.causal)
    peer = yardstick(case, q, k, v, dout)
    for name, x, y, z in zip(CHECKED, alone, peer, exact, strict=True):
        error, allowed = _distance(x, z), tolerance(_distance(y, z), z, case.dtype)
        if not error <= allowed:  # a NaN is not
            problems.append(f"{name} has an error of {error:.3e}, {allowed:.3e} is allowed")
    return problems


def tolerance(peer_error: float, exact: Tensor, dtype: str) -> float:
    """How far from the exact gradient ours may be, in the Euclidean norm.

    Twice the peer's error; in gradients of a few numbers, where chance rules, a quarter of a rounding more.
    Where the true value is 0, as dQ and dK are with one key, both errors are rounding noise of float32.
    """
    rounding = torch.finfo(DTYPES[dtype]).eps
    return 2 * peer_error + rounding / 4 * exact.norm().item() + 1e-5 * exact.numel() ** 0.5


def _distance(x: Tensor, exact: Tensor) -> float:
    return (x.double() - exact).norm().item()


def yardstick(case: SoakCase, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """Out, dq, dk and dv of torch's FlashAttention-2; on the CPU, of the reference."""
    scale = case.head_dim**-0.5
    if q.device.type == "cpu":
        out, lse = reference.forward(q, k, v, scale, case.causal)
        gradients = reference.backward(dout, q, k, v, out, lse, scale, case.causal, case.schedule)
        return out, *gradients
    out, lse = forward_module._flash(q, k, v, scale, case.causal)
    return out, *ops._backward_flash2(dout, q, k, v, out, lse, scale, case.causal, True)


class _Load:
    """Matmuls on a stream of their own, or nothing."""

    def __init__(self, wanted: bool) -> None:
        self.stream = torch.cuda.Stream() if wanted else None
        if wanted:
            self.a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
            self.b = torch.empty_like(self.a)
            torch.cuda.synchronize()  # they are made on another stream than they are read on

    def give(self) -> None:
        """Puts some work there."""
        if self.stream:
            with torch.cuda.stream(self.stream):
                for _ in range(3):
                    torch.mm(self.a, self.a, out=self.b)

    def wait(self) -> None:
        """Until it is done."""
        if self.stream:
            self.stream.synchronize()


def cases(seed: int, sms: int, most_scores: int) -> Iterator[SoakCase]:
    """All the cases of a seed, without end."""
    rng = random.Random(seed)
    while True:
        yield draw(rng, sms, most_scores)


def soak(chosen: Iterator[SoakCase], seconds: float, device: str) -> dict[str, Any]:
    """Checks cases until they or the time are up; the record. Ends early when the GPU is lost."""
    start = time.monotonic()
    shown = start
    done = 0
    failed = []
    for case in chosen:
        lost = None
        try:
            problems = check(case, device)
        except Exception as error:
            problems = [harness.one_line(error)]
            try:
                harness.check_gpu()
            except harness.GpuLost as gone:
                lost = str(gone)
        done += 1
        if problems:
            failed.append({"case": str(case), "problems": problems, "command": case.command})
            print(f"FAILED: {'; '.join(problems)}\n  {case.command}", flush=True)
        if lost:
            print(f"The GPU can run nothing more: {lost}")
            break
        now = time.monotonic()
        if now - shown > 10:
            shown = now
            print(f"  {now - start:.0f} of {seconds:.0f} s: {done} cases, {len(failed)} failed", flush=True)
        if now - start >= seconds:
            break
    return {
        "kind": "soak",
        "environment": harness.environment(),
        "seconds": round(time.monotonic() - start, 1),
        "cases": done,
        "failed": failed,
    }


def main(argv: Sequence[str]) -> int:
    """Runs the soak, or one case of it. 1 if a case failed, or none ran."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="time limit (60)")
    parser.add_argument("--seed", type=int, help="of the cases (the time of day)")
    parser.add_argument("--case", action="append", help="check this case, as a failure prints it")
    parser.add_argument("--most-scores", type=int, default=MOST_SCORES, help="the largest case's scores")
    parser.add_argument("--out", type=Path, help="where to write a record")
    parser.add_argument("--device", default="cuda", help="cpu: the reference, to try this program")
    options = parser.parse_args(argv)
    sms = LARGEST_CYCLE
    if options.device == "cuda":
        harness.require_kernels()
        sms = torch.cuda.get_device_properties().multi_processor_count
    if options.case:
        try:
            chosen = iter([SoakCase.parse(name) for name in options.case])
        except ValueError as error:
            parser.error(f"--case: {error}")
        source: dict[str, Any] = {}
    else:
        seed = time.time_ns() % (1 << 32) if options.seed is None else options.seed
        chosen = cases(seed, sms, options.most_scores)
        source = {"seed": seed}
        print(f"seed {seed}", flush=True)
    # Named cases run all of them.
    record = soak(chosen, math.inf if options.case else options.seconds, options.device) | source
    if options.out:
        harness.write_json(options.out, record)
    print(f"{record['cases']} cases in {record['seconds']} s, {len(record['failed'])} failed")
    return bool(record["failed"] or not record["cases"])
