"""Clocks for calls on the GPU, and the order in which calls are timed that are to be compared."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

ROUNDS = 5
LEAD_IN_MS = 100
"""For so long a call is made before it is timed: what the chip did before shows for some time.

After 20 ms it was 6 % behind a large matmul and -3 % behind calls that mostly wait (docs/performance.md).
"""
TIMED_MS = 25
"""How long a series of calls is that is timed."""

Run = Callable[[], Any]
Clock = Callable[[Run], float]
"""Takes a call, and returns what it lasts on the GPU, in milliseconds."""


def short_median(run: Run, lead_in: float = LEAD_IN_MS, timed: float = TIMED_MS) -> float:
    """The median time of a short series of calls, each with a cold L2 cache. Milliseconds.

    triton's do_bench; where there is no triton `few_calls`, after one call.

    Args:
        run: the call.
        lead_in: milliseconds of calls that are not timed.
        timed: milliseconds of calls that are; one call at least.
    """
    try:
        from triton.testing import do_bench
    except ImportError:
        return few_calls(run, calls=9)
    return do_bench(run, warmup=lead_in, rep=timed, return_mode="median")


def few_calls(run: Run, calls: int = 2) -> float:
    """The median time of a few calls, each with a cold L2 cache, after one that is not timed. Milliseconds.

    For calls of tens of milliseconds, of which do_bench would make six before the first that counts.
    """
    import torch

    l2_cache = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")  # several times an L2 cache
    run()
    pairs = []
    for _ in range(calls):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        l2_cache.zero_()
        start.record()
        run()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def turns(names: Sequence[str], rounds: int = ROUNDS, seed: str = "") -> Iterator[str]:
    """The names of calls, round after round, each round in another order, the same ones for the same seed.

    The chip's clock falls while it works, so that times of different minutes, or of different places in a
    row, say nothing about each other, and a call is the faster the less the chip was doing just before. So
    every call is timed in every round, and has another place there, behind another one: an even number of
    calls, in as many rounds, follow each other once each (E. J. Williams, 1949). Each cell of a sweep had
    better give a seed of its own, or one call is behind a slow one in all of them.
    """
    rng = random.Random(seed)
    deck: list[str | None] = [*rng.sample(names, len(names))]
    if len(deck) % 2:
        deck.append(None)  # a place that is left out
    zigzag = [place // 2 if place % 2 == 0 else -1 - place // 2 for place in range(len(deck))]
    shifts = rng.sample(range(len(deck)), len(deck))
    for number in range(rounds):
        for place in zigzag:
            name = deck[(place + shifts[number % len(deck)]) % len(deck)]
            if name is not None:
                yield name
