"""Hashes of dQ, dK and dV for fixed inputs, to see when a version gives other bits than the one before.

All that the backward reads is made from integers on the CPU: neither torch's generators nor the bits of the
forward, which is torch's own, have a part in it. So `out` and `lse` belong to no forward; the backward is the
same function of them.
"""

from __future__ import annotations

import argparse
import hashlib
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dash_flash_attn.ops import auto_schedule
from dash_flash_attn.schedule import SCHEDULES

from . import harness
from .systems import GRADIENTS

ACCEPTED = harness.RESULTS / "bits.json"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class BitCase(NamedTuple):
    """One fixed problem; lengths in tokens, query heads and KV heads."""

    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    dtype: str
    causal: bool
    batch: int = 1

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return (
            f"b{self.batch}-q{self.seqlen_q}-k{self.seqlen_k}-h{self.heads_q}-kv{self.heads_k}"
            f"-d{self.head_dim}-{self.dtype}-{mask}"
        )


CASES = (
    BitCase(1024, 1024, 4, 4, 128, "bf16", False),
    BitCase(1024, 1024, 4, 4, 128, "bf16", True),
    BitCase(1024, 1024, 4, 4, 64, "bf16", False),
    BitCase(1024, 1024, 4, 4, 64, "bf16", True),
    BitCase(2048, 2048, 8, 2, 128, "bf16", True, batch=2),
    BitCase(2048, 2048, 8, 1, 64, "fp16", True),
    BitCase(777, 1301, 6, 2, 128, "fp16", False),
    BitCase(1301, 777, 4, 4, 64, "bf16", True),
    BitCase(100, 9000, 2, 1, 128, "bf16", True),
)


def inputs(case: BitCase, device: str = "cuda") -> tuple[Tensor, ...]:
    """(dout, q, k, v, out, lse) for the operator.

    Sums of four 16-bit integers, so nearly normal, from a stream of raw bits that NumPy keeps the same
    between versions; scaled by powers of two and rounded once, to the tensors' dtype.
    """
    stream = np.random.PCG64(zlib.crc32(str(case).encode()))

    def normal(seqlen: int, heads: int) -> Tensor:
        shape = (case.batch, seqlen, heads, case.head_dim)
        words = stream.random_raw(int(np.prod(shape)))
        total = sum((words >> np.uint64(16 * part)) & np.uint64(0xFFFF) for part in range(4))
        # Four uniform numbers have a third of a variance of 1 here: within [-2, 2].
        centred = (total.astype(np.int64) - 2 * 0xFFFF).astype(np.float32) / np.float32(2**16)
        return torch.from_numpy(centred.reshape(shape)).to(DTYPES[case.dtype])

    q, dout = (normal(case.seqlen_q, case.heads_q) for _ in range(2))
    k, v = (normal(case.seqlen_k, case.heads_k) for _ in range(2))
    out = normal(case.seqlen_q, case.heads_q) / 16
    # About the logarithm of the number of keys: every probability is below 1, and their sum near it.
    lse = torch.full((case.batch, case.heads_q, case.seqlen_q), 0.6875 * case.seqlen_k.bit_length())
    return tuple(x.to(device) for x in (dout, q, k, v, out, lse))


def digest(tensors: Iterable[Tensor]) -> str:
    """SHA-256 of the tensors' bytes, in their order and row by row; the first 32 digits."""
    state = hashlib.sha256()
    for x in tensors:
        state.update(f"{x.dtype} {tuple(x.shape)} ".encode())
        state.update(x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()[:32]


def hashes(case: BitCase, device: str = "cuda") -> dict[str, Any]:
    """The hashes of one case: of its inputs, and of each gradient with each schedule; what "auto" is."""
    tensors = inputs(case, device)
    scale = case.head_dim**-0.5
    found: dict[str, Any] = {
        "inputs": digest(tensors),
        "auto": auto_schedule(
            case.seqlen_q, case.seqlen_k, case.heads_q, case.heads_k, case.head_dim, case.causal
        ),
    }
    for schedule in SCHEDULES:
        gradients = torch.ops.dash_flash_attn.backward(*tensors, scale, case.causal, schedule, 0)
        found[schedule] = {name: digest([x]) for name, x in zip(GRADIENTS, gradients, strict=True)}
    return found


def compare(accepted: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What differs between two records' cases, one line each; empty where no bit does.

    Cases that only `found` has are new, and no difference; cases that it lacks, or that failed, are one.
    """
    differences = []
    for name, old in accepted["cases"].items():
        new = found["cases"].get(name)
        if new is None:
            differences.append(f"{name}: not computed")
        elif "error" in new:
            differences.append(f"{name}: {new['error']}")
        elif new["inputs"] != old["inputs"]:
            differences.append(f"{name}: other inputs, so nothing can be said of the gradients")
        else:
            if new["auto"] != old["auto"]:
                differences.append(f"{name}: auto is {new['auto']}, was {old['auto']}")
            for schedule in (key for key, value in old.items() if isinstance(value, dict)):
                changed = [
                    gradient
                    for gradient, bits in old[schedule].items()
                    if new.get(schedule, {}).get(gradient) != bits
                ]
                if changed:
                    differences.append(f"{name}, {schedule}: {', '.join(changed)}")
    added = found["cases"].keys() - accepted["cases"].keys()
    return differences + failures({"cases": {name: found["cases"][name] for name in sorted(added)}})


def failures(found: dict[str, Any]) -> list[str]:
    """The cases of a record that could not be computed, one line each."""
    return [f"{name}: {case['error']}" for name, case in found["cases"].items() if "error" in case]


def record(cases: Sequence[BitCase], device: str = "cuda") -> dict[str, Any]:
    """The hashes of all cases; a case that fails has its error there."""
    found: dict[str, Any] = {}
    for case in harness.progress(cases):
        try:
            found[str(case)] = hashes(case, device)
        except Exception as error:
            found[str(case)] = {"error": harness.one_line(error)}
    return {"kind": "bits", "environment": harness.environment(), "cases": found}


def main(argv: Sequence[str]) -> int:
    """Computes all hashes, and compares them with the accepted ones. 1 if a bit differs or a case failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks bits", description=__doc__)
    parser.add_argument("--out", type=Path, help="where to write the record")
    parser.add_argument("--accepted", type=Path, default=ACCEPTED, help="compare with (results/bits.json)")
    parser.add_argument("--device", default="cuda", help="cpu: the reference, whose bits are its own")
    options = parser.parse_args(argv)
    if options.device == "cuda":
        harness.require_kernels()
    found = record(CASES, options.device)
    if options.out:
        harness.write_json(options.out, found)
    if not options.accepted.exists():
        print(f"{len(found['cases'])} cases; no accepted bits in {options.accepted} to compare with")
        differences = failures(found)
    else:
        differences = compare(harness.read_json(options.accepted), found)
    for line in differences:
        print(f"DIFFERS: {line}")
    if not differences:
        print("All bits are the accepted ones." if options.accepted.exists() else "No case failed.")
    return bool(differences)
