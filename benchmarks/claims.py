"""What the records say of the paper's claims (DASH, arXiv 2601.21824, on an H800), and of our own targets."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from . import lengths, tables
from .tables import NONE, Ratios, Rows, Table, Target, by_cell, cell_of, cell_words, length, of, ratios

Records = dict[str, dict[str, Any]]
Answer = tuple[str, str]
"""Whether a claim holds here, and the numbers."""
Question = Callable[[Rows], Answer | None]
"""What good rows answer; None where they lack what is asked for."""

UNKNOWN: Answer = (NONE, "not measured yet")


def claims(found: Records) -> Table:
    """All claims, from records by kind (`records.committed`)."""
    body = []
    for claim, paper, kind, answer in CLAIMS:
        rows = tables.good(found[kind]["rows"]) if kind in found else []
        body.append([claim, paper, *((answer(rows) if rows else None) or UNKNOWN)])
    return Table("The paper's claims", ["claim", "paper", "holds here", "measured"], body, words=(0, 1, 2, 3))


def _yes(part: bool) -> str:
    return "yes" if part else "no"


def _in(count: int, total: int) -> str:
    return "yes" if count == total else "no" if count == 0 else f"in {count} of {total} cells"


def _worst_cost(found: Ratios) -> str:
    return f"{100 * (1 - found.by_cell[found.worst]):.1f} % ({cell_words(found.worst)})"


def cost_of_fa3(rows: Rows) -> Answer | None:
    """What determinism costs FlashAttention-3."""
    found = ratios(rows, of("fa3+"), of("fa3-"))
    if not found:
        return None
    worst = 1 - found.by_cell[found.worst]
    return _yes(worst >= 0.379), f"{_worst_cost(found)} at most"


def cost_here(rows: Rows) -> Answer | None:
    """What determinism costs our kernel."""
    found = ratios(rows, of("auto"), of("unordered"))
    if not found:
        return None
    free = sum(ratio >= 0.99 for ratio in found.by_cell.values())
    count = f"free, within 1 %, in {free} of {len(found.by_cell)} cells"
    return _in(free, len(found.by_cell)), f"{_worst_cost(found)} at most; {count}"


def gain_over_fa3(rows: Rows) -> Answer | None:
    """The best gain over deterministic FlashAttention-3."""
    found = ratios(rows, of("auto"), of("fa3+"))
    if not found:
        return None
    best = found.by_cell[found.best]
    return _yes(
        best >= 1.28
    ), f"{best:.2f}x at best ({cell_words(found.best)}), {found.geometric_mean:.2f}x on average"


def gain_over_naive(causal: bool) -> Question:
    """The best gain of a schedule over our own naive one, under one mask."""

    def answer(rows: Rows) -> Answer | None:
        found = ratios(rows, tables.best_schedule, of("naive"), causal)
        if not found:
            return None
        best = found.by_cell[found.best]
        mean = f"{found.geometric_mean:.2f}x on average"
        return _yes(best >= 1.28), f"{best:.2f}x at best ({cell_words(found.best)}), {mean}"

    return answer


def wins(schedule: str, causal: bool, head_dims: tuple[int, ...], among: tuple[str, ...]) -> Question:
    """In how many cells a schedule is the fastest of some."""

    def answer(rows: Rows) -> Answer | None:
        losses = {}
        for cell, systems in by_cell(rows).items():
            if cell[1] == causal and cell[0] in head_dims and all(name in systems for name in among):
                best = max(systems[name]["tflops"] for name in among)
                losses[cell] = 1 - systems[schedule]["tflops"] / best
        if not losses:
            return None
        won = sum(loss == 0 for loss in losses.values())
        worst = max(losses, key=losses.__getitem__)
        behind = f"; {100 * losses[worst]:.1f} % behind the fastest at worst ({cell_words(worst)})"
        return _in(won, len(losses)), f"fastest in {won} of {len(losses)}" + (behind if losses[worst] else "")

    return answer


def shift_at_16k(rows: Rows) -> Answer | None:
    """Whether shift loses speed from 8k to 16k without a mask, at head dimension 128."""
    speeds = {
        cell[2]: systems["shift"]["tflops"]
        for cell, systems in by_cell(rows).items()
        if cell[:2] == (128, False) and "shift" in systems
    }
    if not {8192, 16384} <= speeds.keys():
        return None
    lost = 1 - speeds[16384] / speeds[8192]
    return _yes(lost > 0.01), f"d 128: {speeds[8192]:.0f} TFLOP/s at 8k, {speeds[16384]:.0f} at 16k"


def causal_always_better(rows: Rows) -> Answer | None:
    """Whether descending and symmetric shift both beat naive and, where it is, the deterministic FA3."""
    cells = {
        cell: s for cell, s in by_cell(rows).items()
        if cell[1] and {"naive", "descending", "symmetric_shift"} <= s.keys()
    }  # fmt: skip
    if not cells:
        return None

    def count(name: str, over: str) -> int:
        return sum(s[name]["tflops"] > s[over]["tflops"] for s in cells.values() if over in s)

    def always(s: dict[str, Any]) -> bool:
        beaten = [s[over]["tflops"] for over in ("naive", "fa3+") if over in s]
        return min(s[name]["tflops"] for name in ("descending", "symmetric_shift")) > max(beaten)

    words = f"over naive: descending in {count('descending', 'naive')}, symmetric shift in "
    words += f"{count('symmetric_shift', 'naive')} of {len(cells)} cells"
    against = sum("fa3+" in s for s in cells.values())
    if against:
        wins_over_fa3 = f"{count('descending', 'fa3+')} and {count('symmetric_shift', 'fa3+')} of {against}"
        words += f"; over deterministic FA3: in {wins_over_fa3}"
    return _in(sum(map(always, cells.values())), len(cells)), words


def block_gain(causal: bool, claimed: float) -> Question:
    """Whether whole blocks gain, over the deterministic FA3 or, without it, over our naive order."""

    def answer(rows: Rows) -> Answer | None:
        masks = {(row["model"], row["seqlen"]): row["causal"] for row in rows}
        for name in ("fa3+", "naive"):
            gains = {
                c: 100 * (x - 1) for c, x in tables.block_gains(rows, name).items() if masks[c] == causal
            }
            if gains:
                low, high = (f(gains, key=gains.__getitem__) for f in (min, max))
                mean = statistics.mean(gains.values())
                return _yes(mean >= claimed), (
                    f"{mean:+.1f} % over {name}; {gains[low]:+.1f} ({low[0]}, {length(low[1])}) to "
                    f"{gains[high]:+.1f} % ({high[0]}, {length(high[1])})"
                )
        return None

    return answer


def repeats(rows: Rows) -> Answer | None:
    """Whether every schedule gives the same bits in every run."""
    ours = [row for row in rows if row["system"] in tables.OURS and row["system"] != "unordered"]
    if not ours:
        return None
    same = sum(row["bitwise_equal"] for row in ours)
    return _in(same, len(ours)), f"{same} of {len(ours)} rows with the same bits"


CAUSAL = ("naive", "descending", "symmetric_shift")

CLAIMS: tuple[tuple[str, str, str, Question], ...] = (
    ("Determinism costs FlashAttention-3 throughput", "up to 37.9 %", "backward", cost_of_fa3),
    ("The same, short or single sequences and LLaMA3-8B's shape", NONE, "small_jobs", cost_of_fa3),
    ("With a schedule that fits, it costs little", NONE, "backward", cost_here),
    ("The same, short or single sequences and LLaMA3-8B's shape", NONE, "small_jobs", cost_here),
    ("Speed over deterministic FlashAttention-3", "up to 1.28x", "backward", gain_over_fa3),
    ("The same over our own naive order, full mask", NONE, "backward", gain_over_naive(False)),
    ("The same over our own naive order, causal mask", NONE, "backward", gain_over_naive(True)),
    (
        "Full mask: shift is the fastest everywhere", "yes", "backward",
        wins("shift", False, (64, 128), ("naive", "descending", "shift")),
    ),
    ("Full mask: shift dips at 16k", "yes", "backward", shift_at_16k),
    (
        "Causal: descending and symmetric shift always beat the baseline", "yes", "backward",
        causal_always_better,
    ),
    (
        "Causal, d 64: symmetric shift is the fastest", "yes", "backward",
        wins("symmetric_shift", True, (64,), CAUSAL),
    ),
    (
        "Causal, d 128: descending is the fastest", "yes", "backward",
        wins("descending", True, (128,), CAUSAL),
    ),
    ("Whole blocks gain, causal mask", "about 5 % (2 to 10 %)", "blocks", block_gain(True, 5)),
    ("Whole blocks gain, full mask", "about 4 %", "blocks", block_gain(False, 4)),
    ("Ten runs give the same bits", "yes", "reproducibility", repeats),
)  # fmt: skip


def targets(found: Records) -> Table:
    """What "auto" is to reach at every length, from the record of `lengths`.

    A target holds if all cells of the full form were measured and meet it.
    """
    rows = found["lengths"]["rows"] if "lengths" in found else []
    body = [line for target in tables.TARGETS for line in _target_lines(target, rows)]
    return Table("Targets", ["auto over", "target", "holds", "measured"], body, words=(0, 1, 2, 3))


def _target_lines(target: Target, rows: Rows) -> list[list[str]]:
    every = [target.over, f"{target.every:.2f} in every cell"]
    mean = [target.over, f"{target.mean:.2f} in the geometric mean"] if target.mean else None
    measured, failed = target.ratios(rows), set(tables.failed_auto(rows))
    if not measured and not failed:
        return [[*line, *UNKNOWN] for line in (every, mean) if line]
    cells = {*lengths.FULL, *map(cell_of, rows)}
    missing = cells - measured.by_cell.keys() - failed
    words = [f"auto failed in {len(failed)} of {len(cells)} cells"] if failed else []
    words += [f"{len(missing)} of {len(cells)} cells not measured"] if missing else []
    met = sum(ratio >= target.every for ratio in measured.by_cell.values())
    worst = [f"{measured.by_cell[measured.worst]:.3f} at worst ({cell_words(measured.worst)})"] * bool(
        measured
    )
    lines = [[*every, _in(met, len(cells)), "; ".join([*worst, *words])]]
    if mean:
        reached = bool(measured) and measured.geometric_mean >= target.mean
        complete = not missing and not failed
        holds = ("yes" if complete else "so far") if reached else "no"
        value = [f"{measured.geometric_mean:.3f}"] * bool(measured)
        lines.append([*mean, holds, "; ".join([*value, *words])])
    return lines
