"""All measurements of the paper's evaluation in one process, one after the other.

Takes the options that all of them have; each writes its own record. One that fails does not stop the next.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Sequence
from pathlib import Path

from . import harness

PARTS = ("backward", "small_jobs", "lengths", "call_cost", "blocks", "reproducibility", "accuracy", "memory")


def main(argv: Sequence[str]) -> int:
    """Runs all parts. 1 if a part failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks evaluate", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the quick form of each")
    parser.add_argument("--peers", default="", help="see `backward --help`")
    parser.add_argument("--peers-path", help="see `backward --help`")
    parser.add_argument("--folder", type=Path, default=harness.RESULTS, help="of the records")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=PARTS, help=",".join(PARTS))
    options = parser.parse_args(argv)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"--parts: {min(unknown)!r} is none of {', '.join(PARTS)}")
    harness.require_kernels()
    common = ["--quick"] if options.quick else []
    common += ["--peers", options.peers] if options.peers else []
    common += ["--peers-path", options.peers_path] if options.peers_path else []
    ended = {}
    for part in options.parts:
        print(f"\n== {part}", flush=True)
        start = time.monotonic()
        try:
            out = options.folder / (f"{part}_quick.json" if options.quick else f"{part}.json")
            status = importlib.import_module(f".{part}", __package__).main([*common, "--out", str(out)])
            words = "some rows failed" if status else "ok"
        except Exception as error:
            status, words = 1, f"FAILED: {harness.one_line(error)}"
        ended[part] = (status, words, time.monotonic() - start)
    print()
    for part, (_, words, seconds) in ended.items():
        print(f"{part:<18}{seconds:>6.0f} s  {words}")
    return int(any(status for status, *_ in ended.values()))
