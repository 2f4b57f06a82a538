#!/usr/bin/env python3
"""Times the backward pass on the shapes of the DASH paper: 16,384 tokens, hidden size 2048, bfloat16.

For each head dimension, mask, sequence length and schedule: ms, TFLOP/s (10 b h s^2 d, half of it under a
causal mask), the ratio to an 8192^3 matmul timed just before, and the memory beside inputs and outputs in
multiples of a float32 dQ. Medians with a cold L2 cache. `unordered` sums dQ in the order of arrival.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import ROOT, environment, extra_bytes, load_module, matmul_tflops, write_json

from dash_flash_attn.lab.calibrate import HEAD_DIMS, HIDDEN, SEQLENS, TOKENS, median_ms
from dash_flash_attn.schedule import SCHEDULES

UNORDERED = "unordered"

Backward = Callable[[], tuple[torch.Tensor, ...]]


class Shape(NamedTuple):
    """One problem of the paper; query heads and KV heads."""

    head_dim: int
    causal: bool
    seqlen: int
    heads: int
    kv_heads: int

    @property
    def batch(self) -> int:
        """As many sequences as there are tokens for."""
        return TOKENS // self.seqlen

    @property
    def flop(self) -> float:
        """Five products of the attention matrix's size."""
        return 10 * self.batch * self.heads * self.seqlen**2 * self.head_dim / (2 if self.causal else 1)

    @property
    def dq_bytes(self) -> int:
        """The size of a float32 dQ."""
        return 4 * TOKENS * self.heads * self.head_dim

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """q, k, v and dout, standard normal."""
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return tuple(
            torch.randn(self.batch, self.seqlen, h, self.head_dim, device="cuda", dtype=torch.bfloat16)
            for h in heads
        )


def ours(shape: Shape, tensors: tuple[torch.Tensor, ...], schedule: str) -> Backward:
    """Runs the forward; the backward with a schedule, or in the order of arrival."""
    q, k, v, dout = tensors
    scale = shape.head_dim**-0.5
    out, lse = torch.ops.dash_flash_attn.forward(q, k, v, scale, shape.causal)
    options = ("auto", False, 0) if schedule == UNORDERED else (schedule, True, 0)
    return lambda: torch.ops.dash_flash_attn.backward(dout, q, k, v, out, lse, scale, shape.causal, *options)


def theirs(shape: Shape, tensors: tuple[torch.Tensor, ...], peer: Any, deterministic: bool) -> Backward:
    """Runs a peer's forward; its backward."""
    q, k, v, dout = tensors
    out, lse = peer.fwd(q, k, v, shape.causal)
    return lambda: peer.bwd(dout, q, k, v, out, lse, shape.causal, deterministic)


def measure(shape: Shape, system: str, prepare: Callable[[], Backward], matmul: float) -> dict[str, Any]:
    """One cell of the table; a system that fails leaves its message there."""
    row: dict[str, Any] = {**shape._asdict(), "batch": shape.batch, "system": system, "matmul_tflops": matmul}
    try:
        run = prepare()
        run()  # whatever is compiled or loaded at a first call is not memory of a backward
        extra = extra_bytes(run)
        ms = median_ms(run)
    except Exception as error:
        return {**row, "error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    tflops = shape.flop / ms / 1e9
    return {
        **row,
        "ms": ms,
        "tflops": tflops,
        "ratio_to_matmul": tflops / matmul,
        "extra_bytes": extra,
        "extra_in_fp32_dq": extra / shape.dq_bytes,
    }


def show(row: dict[str, Any]) -> str:
    """A row as a line."""
    mask = "causal" if row["causal"] else "full"
    head = f"{row['head_dim']:>4} {mask:<7}{row['seqlen']:>6}  {row['system']:<16}"
    if "error" in row:
        return f"{head} failed: {row['error']}"
    numbers = f"{row['ms']:>9.3f}{row['tflops']:>9.1f}{row['ratio_to_matmul']:>9.3f}"
    return f"{head}{numbers}{row['extra_in_fp32_dq']:>9.4f}"


def table(rows: list[dict[str, Any]], head_dim: int, causal: bool) -> str:
    """TFLOP/s and, in brackets, the ratio to the matmul: systems down, sequence lengths across."""
    chosen = [row for row in rows if (row["head_dim"], row["causal"]) == (head_dim, causal)]
    seqlens = sorted({row["seqlen"] for row in chosen})
    cells = {(row["system"], row["seqlen"]): row for row in chosen}

    def cell(system: str, seqlen: int) -> str:
        row = cells.get((system, seqlen), {"error": "not run"})
        return "failed" if "error" in row else f"{row['tflops']:.0f} ({row['ratio_to_matmul']:.2f})"

    title = f"head dimension {head_dim}, {'causal' if causal else 'full'} mask: TFLOP/s (ratio to matmul)"
    lines = [title, " " * 16 + "".join(f"{seqlen:>12}" for seqlen in seqlens)]
    for system in dict.fromkeys(row["system"] for row in chosen):
        lines.append(f"{system:<16}" + "".join(f"{cell(system, seqlen):>12}" for seqlen in seqlens))
    return "\n".join(lines)


def numbers(text: str) -> list[int]:
    """A comma-separated list."""
    return [int(part) for part in text.split(",")]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dims", type=numbers, default=list(HEAD_DIMS), help="head dimensions (128,64)")
    parser.add_argument("--seqlens", type=numbers, default=list(SEQLENS), help="lengths (512,...,16384)")
    parser.add_argument(
        "--schedules", type=lambda s: s.split(","), default=[*SCHEDULES, UNORDERED],
        help=f"of {','.join((*SCHEDULES, 'auto', UNORDERED))}",
    )  # fmt: skip
    parser.add_argument("--masks", choices=("full", "causal", "both"), default="both")
    parser.add_argument("--heads", type=int, help="query heads (2048 / head dimension)")
    parser.add_argument("--kv-heads", type=int, help="KV heads (as many as query heads)")
    parser.add_argument("--quick", action="store_true", help="lengths 1024 and 16384 only")
    parser.add_argument(
        "--peers",
        type=lambda s: s.split(","),
        default=[],
        help="fa3,fa4: measured too, + deterministic, - not",
    )
    parser.add_argument("--peers-path", type=Path, help="a module with load(name) -> object with fwd, bwd")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/backward.json")
    args = parser.parse_args()
    if args.peers and not args.peers_path:
        parser.error("--peers needs --peers-path")
    if args.quick:
        args.seqlens = [1024, 16384]
    return args


def main() -> None:
    """Measures everything asked for, prints it, and writes it."""
    args = arguments()
    if not torch.cuda.is_available():
        raise SystemExit("bench_backward.py: torch sees no GPU")
    load = load_module(args.peers_path).load if args.peers else None
    peers = {name: load(name) for name in args.peers}
    masks = {"full": [False], "causal": [True], "both": [False, True]}[args.masks]
    rows: list[dict[str, Any]] = []
    print(f"   d mask   seqlen  {'system':<16}{'ms':>9}{'TFLOP/s':>9}{'/matmul':>9}{'/fp32 dQ':>9}")
    for head_dim in args.dims:
        heads = args.heads or HIDDEN // head_dim
        for causal in masks:
            for seqlen in args.seqlens:
                shape = Shape(head_dim, causal, seqlen, heads, args.kv_heads or heads)
                tensors = shape.inputs()
                matmul = matmul_tflops()
                systems = {name: partial(ours, shape, tensors, name) for name in args.schedules}
                for name, peer in peers.items():
                    systems[name + "+"] = partial(theirs, shape, tensors, peer, True)
                    systems[name + "-"] = partial(theirs, shape, tensors, peer, False)
                for system, prepare in systems.items():
                    rows.append(measure(shape, system, prepare, matmul))
                    print(show(rows[-1]), flush=True)
                # Written as they come: a run that is cut off leaves what it has measured.
                write_json(args.out, {"environment": environment(), "tokens": TOKENS, "rows": rows})
    for head_dim in args.dims:
        for causal in masks:
            print("\n" + table(rows, head_dim, causal))
    failed = sum("error" in row for row in rows)
    print(f"\n{len(rows)} measurements, {failed} failed; written to {args.out}")


if __name__ == "__main__":
    main()
