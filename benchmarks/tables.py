"""Tables and summary numbers, all computed from the rows of records. Needs neither a GPU nor matplotlib."""

from __future__ import annotations

import html
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dash_flash_attn.schedule import SCHEDULES

from .shapes import HIDDEN, TOKENS, Shape
from .systems import AUTO, GRADIENTS, OURS, UNORDERED, behind_auto, with_auto

Row = dict[str, Any]
Rows = Sequence[Row]

NONE = "–"


@dataclass(frozen=True)
class Table:
    """A table as text; `**x**` is bold.

    Args:
        title: in one line.
        header: the columns' names.
        rows: as long as the header.
        words: the numbers of the columns that are words; the others are numbers.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[int] = (0,)

    def markdown(self, title: bool = True) -> str:
        """As Markdown, the title in bold above."""
        marks = [" --- " if i in self.words else " ---: " for i in range(len(self.header))]
        lines = ["|" + "|".join(f" {cell} " for cell in row) + "|" for row in (self.header, *self.rows)]
        lines.insert(1, "|" + "|".join(marks) + "|")
        return "\n".join([*((f"**{self.title}**", "") if title else ()), *lines])

    def html(self) -> str:
        """As HTML, in an element that scrolls by itself where it is too wide."""

        def line(cells: Sequence[str], kind: str) -> str:
            marked = (
                f"<{kind}{' class=words' if i in self.words else ''}>{_bold(cell)}</{kind}>"
                for i, cell in enumerate(cells)
            )
            return "<tr>" + "".join(marked) + "</tr>"

        body = "".join(line(row, "td") for row in self.rows)
        return (
            f"<h3>{_bold(self.title)}</h3><div class=scroll tabindex=0><table>"
            f"<thead>{line(self.header, 'th')}</thead><tbody>{body}</tbody></table></div>"
        )


def _bold(text: str) -> str:
    return re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", html.escape(text))


def good(rows: Rows) -> list[Row]:
    """The rows without an error."""
    return [row for row in rows if "error" not in row]


def cell_of(row: Row) -> Shape:
    """What a row of the backward is about, whatever the system."""
    return Shape.of_row(row)


def cell_words(cell: Shape) -> str:
    """A cell in words, as short as can be: heads only where they are not the paper's hidden size."""
    keys = "" if cell.seqlen_k is None else f" x {length(cell.seqlen_k)}"
    if cell.heads != cell.kv_heads:
        heads = f", {cell.heads}/{cell.kv_heads} heads"
    else:
        heads = "" if cell.heads * cell.head_dim == HIDDEN else f", {cell.heads} heads"
    one = ", one sequence" if cell.batch == 1 and 2 * cell.seqlen <= TOKENS else ""
    return f"{mask_words(cell)} {length(cell.seqlen)}{keys}{heads}{one}"


def mask_words(cell: Shape) -> str:
    """A cell's head dimension and mask."""
    return f"d {cell.head_dim} {'causal' if cell.causal else 'full'}"


def length(tokens: int) -> str:
    """Tokens as people say it: 512, 1k, 16k."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def by_cell(rows: Rows) -> dict[Shape, dict[str, Row]]:
    """Good rows by cell and system. "auto" is there where the schedule that it takes was measured."""
    cells: dict[Shape, dict[str, Row]] = {}
    for row in good(rows):
        cells.setdefault(cell_of(row), {})[row["system"]] = row
    for cell, systems in cells.items():
        if AUTO not in systems:
            with_auto(systems, behind_auto([*systems, AUTO], cell))
    return cells


# The backward.


def backward(rows: Rows) -> list[Table]:
    """TFLOP/s and, in brackets, the ratio to the matmul: a table for each mask, head dimension and heads."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        tokens = row["batch"] * row["seqlen"]
        key = (row["head_dim"], row["causal"], row["heads"], row["kv_heads"], tokens)
        groups.setdefault(key, []).append(row)
    return [_backward_group(key, group) for key, group in groups.items()]


def _speed(tflops: float, best: float | None) -> str:
    return f"**{tflops:.0f}**" if tflops == best else f"{tflops:.0f}"


def _backward_group(key: tuple[Any, ...], rows: list[Row]) -> Table:
    head_dim, causal, heads, kv_heads, tokens = key
    seqlens = sorted({row["seqlen"] for row in rows})
    cells = {(row.get("system"), row["seqlen"]): row for row in rows}
    best = {
        n: max((row["tflops"] for row in good(rows) if row["seqlen"] == n), default=None) for n in seqlens
    }

    def text(system: str, seqlen: int) -> str:
        # A row without a system is a cell that failed as a whole.
        row = cells.get((system, seqlen), cells.get((None, seqlen)))
        if row is None:
            return NONE
        if "error" in row:
            return "failed"
        return f"{_speed(row['tflops'], best[seqlen])} ({row['ratio_to_matmul']:.2f})"

    grouped = f"{heads} heads" if heads == kv_heads else f"{heads} query heads, {kv_heads} KV heads"
    return Table(
        f"Backward, d {head_dim}, {'causal' if causal else 'full'} mask, {grouped}, {tokens:,} tokens: "
        "TFLOP/s (ratio to matmul)",
        ["system", *map(length, seqlens)],
        [
            [system, *(text(system, n) for n in seqlens)]
            for system in dict.fromkeys(row["system"] for row in rows if "system" in row)
        ],
    )


@dataclass(frozen=True)
class Ratios:
    """Speeds of one thing over another, by cell; times a number, 1.1 is 10 % faster."""

    by_cell: dict[tuple[Any, ...], float]

    @property
    def geometric_mean(self) -> float:
        """Over all cells."""
        return statistics.geometric_mean(self.by_cell.values())

    @property
    def best(self) -> tuple[Any, ...]:
        """The cell with the highest ratio."""
        return max(self.by_cell, key=self.by_cell.__getitem__)

    @property
    def worst(self) -> tuple[Any, ...]:
        """The cell with the lowest ratio."""
        return min(self.by_cell, key=self.by_cell.__getitem__)

    def __bool__(self) -> bool:
        return bool(self.by_cell)


Speed = Callable[[dict[str, Row]], float | None]
"""TFLOP/s of something in a cell, None where it was not measured."""


def of(name: str) -> Speed:
    """One system's speed."""
    return lambda systems: systems[name]["tflops"] if name in systems else None


def best_of(wanted: Callable[[str], bool]) -> Speed:
    """The speed of the fastest system whose name is wanted."""
    return lambda systems: max((row["tflops"] for name, row in systems.items() if wanted(name)), default=None)


def is_peer(name: str) -> bool:
    """Whether a system's name is another project's."""
    return name not in OURS


def ratios(rows: Rows, above: Speed, below: Speed, causal: bool | None = None) -> Ratios:
    """One speed over another in every cell that has both; with `causal`, under one mask only."""
    found = {}
    for cell, systems in by_cell(rows).items():
        a, b = above(systems), below(systems)
        if a is not None and b is not None and causal in (None, cell[1]):
            found[cell] = a / b
    return Ratios(found)


best_schedule = best_of(SCHEDULES.__contains__)
best_deterministic_peer = best_of(lambda name: is_peer(name) and name.endswith("+"))
best_peer = best_of(is_peer)


def headline(rows: Rows) -> Table:
    """The numbers that the paper is about, and how ours compare with other projects'."""
    lines = []

    def cost(what: str, found: Ratios) -> None:
        if found:
            lines.append([what, _percent(1 - found.by_cell[found.worst]), cell_words(found.worst)])

    def gain(what: str, found: Ratios) -> None:
        if found:
            lines.append([what, f"{found.by_cell[found.best]:.2f}x", cell_words(found.best)])

    def against(what: str, found: Ratios) -> None:
        if found:
            at_least = sum(ratio >= 1 for ratio in found.by_cell.values())
            where = f"{at_least} of {len(found.by_cell)} cells at 1.00x or more; worst: "
            where += f"{found.by_cell[found.worst]:.2f}x, {cell_words(found.worst)}"
            lines.append([f"{what}, geometric mean", f"{found.geometric_mean:.2f}x", where])

    cost("Worst cost of determinism: auto against unordered", ratios(rows, of("auto"), of("unordered")))
    peers = dict.fromkeys(row["system"][:-1] for row in good(rows) if is_peer(row["system"]))
    for peer in peers:
        cost(
            f"Worst cost of determinism: {peer}+ against {peer}-",
            ratios(rows, of(peer + "+"), of(peer + "-")),
        )
    gain("Best gain over naive, full mask", ratios(rows, best_schedule, of("naive"), causal=False))
    gain("Best gain over naive, causal mask", ratios(rows, best_schedule, of("naive"), causal=True))
    for peer in peers:
        gain(f"Best gain over {peer}+", ratios(rows, of("auto"), of(peer + "+")))
    against("auto against unordered", ratios(rows, of("auto"), of("unordered")))
    for peer in peers:
        against(f"auto against {peer}+", ratios(rows, of("auto"), of(peer + "+")))
        against(f"auto against {peer}-", ratios(rows, of("auto"), of(peer + "-")))
    if len(peers) > 1:
        against(
            "auto against the fastest deterministic peer", ratios(rows, of("auto"), best_deterministic_peer)
        )
        against("auto against the fastest peer", ratios(rows, of("auto"), best_peer))
    return Table("Headline numbers", ["", "value", "where"], lines, words=(0, 2))


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"


# Lengths.


@dataclass(frozen=True)
class Target:
    """What "auto" is to reach.

    Args:
        over: what its speed is divided by, in words.
        below: the speed of that.
        every: the least ratio in each cell.
        mean: the least geometric mean over all cells, if one is asked for.
    """

    over: str
    below: Speed
    every: float
    mean: float | None = None

    def ratios(self, rows: Rows) -> Ratios:
        """The ratios in all cells that have both."""
        return ratios(rows, of(AUTO), self.below)

    def text(self, ratio: float | None) -> str:
        """A cell's ratio, bold where it is below the target."""
        if ratio is None:
            return NONE
        return f"**{ratio:.3f}**" if ratio < self.every else f"{ratio:.3f}"


FASTEST = Target("the fastest peer", best_peer, 0.97, 1.05)
DETERMINISTIC = Target("the fastest deterministic peer", best_deterministic_peer, 1.0)
TARGETS = (FASTEST, DETERMINISTIC, Target("unordered", of(UNORDERED), 0.99))


def failed_auto(rows: Rows) -> list[Shape]:
    """The cells in which "auto" failed: no ratio tells of them."""
    return [cell_of(row) for row in rows if "error" in row and row.get("system") == AUTO]


def is_plain(cell: Shape) -> bool:
    """Whether a cell is of the paper's kind: a square of its hidden size, with as many KV heads as heads."""
    square = cell.seqlen_k is None and cell.heads == cell.kv_heads
    return square and cell.heads * cell.head_dim == HIDDEN


def lengths(rows: Rows) -> list[Table]:
    """The record of `lengths`: a summary, what is below a target, and every cell."""
    return [
        length_summary(rows),
        below_targets(rows),
        plain_lengths(rows),
        other_shapes(rows),
        failed_systems(rows),
    ]


def length_summary(rows: Rows) -> Table:
    """Geometric means and least ratios of "auto" to the targets, for each kind of cell."""
    found = [target.ratios(rows).by_cell for target in TARGETS]
    kinds: dict[str, list[Shape]] = {}
    for cell in sorted(by_cell(rows), key=lambda cell: (not is_plain(cell), cell.seqlen_k is not None)):
        kinds.setdefault(_kind_words(cell), []).append(cell)
    if kinds:
        kinds["all"] = [cell for cells in kinds.values() for cell in cells]

    def numbers(ratios_of: dict[tuple[Any, ...], float], cells: list[Shape]) -> list[str]:
        mine = [ratios_of[cell] for cell in cells if cell in ratios_of]
        return [f"{statistics.geometric_mean(mine):.3f}", f"{min(mine):.3f}"] if mine else [NONE, NONE]

    return Table(
        "Speed of auto over others: geometric mean and lowest ratio",
        ["kind", "cells", *(text for target in TARGETS for text in (f"over {target.over}", "lowest"))],
        [
            [name, str(len(cells)), *(text for ratios_of in found for text in numbers(ratios_of, cells))]
            for name, cells in kinds.items()
        ],
    )


def _kind_words(cell: Shape) -> str:
    if cell.seqlen_k is not None:
        return "queries and keys of unlike number"
    mask = "causal" if cell.causal else "full"
    if cell.heads != cell.kv_heads:
        return f"groups of query heads, {mask}"
    return mask_words(cell) if is_plain(cell) else "squares of other heads"


def below_targets(rows: Rows) -> Table:
    """The cells in which "auto" misses a target, the worst of each target first."""
    lines = [[cell_words(cell), "any", "failed", NONE] for cell in failed_auto(rows)]
    for target in TARGETS:
        missed = {c: x for c, x in target.ratios(rows).by_cell.items() if x < target.every}
        for cell in sorted(missed, key=missed.__getitem__):
            lines.append([cell_words(cell), target.over, f"{missed[cell]:.3f}", f"{target.every:.2f}"])
    return Table("Cells below a target", ["cell", "auto over", "ratio", "target"], lines, words=(0, 1))


def plain_lengths(rows: Rows) -> Table:
    """The cells of the paper's kind: lengths down, masks and head dimensions across."""
    fastest, deterministic = (target.ratios(rows).by_cell for target in (FASTEST, DETERMINISTIC))
    plain = [cell for cell in by_cell(rows) if is_plain(cell)]
    columns = list(dict.fromkeys(map(mask_words, plain)))

    def text(cell: Shape) -> str:
        pair = FASTEST.text(fastest.get(cell)), DETERMINISTIC.text(deterministic.get(cell))
        return f"{pair[0]} ({pair[1]})"

    found = {(cell.seqlen, mask_words(cell)): text(cell) for cell in plain}
    return Table(
        f"auto over {FASTEST.over} (over {DETERMINISTIC.over}), by length; bold: below the target",
        ["tokens", *columns],
        [
            [f"{seqlen:,}", *(found.get((seqlen, column), NONE) for column in columns)]
            for seqlen in sorted({cell.seqlen for cell in plain})
        ]
        if fastest
        else [],
    )


def other_shapes(rows: Rows) -> Table:
    """All other cells: TFLOP/s of each system, and the ratios."""
    cells = {cell: systems for cell, systems in by_cell(rows).items() if not is_plain(cell)}
    names = list(dict.fromkeys(name for systems in cells.values() for name in systems))
    fastest, deterministic = (target.ratios(rows).by_cell for target in (FASTEST, DETERMINISTIC))

    body = []
    for cell, systems in cells.items():
        best = max(row["tflops"] for row in systems.values())
        speeds = [_speed(systems[name]["tflops"], best) if name in systems else NONE for name in names]
        over = FASTEST.text(fastest.get(cell)), DETERMINISTIC.text(deterministic.get(cell))
        body.append([cell_words(cell), *speeds, *over])
    return Table(
        "Other shapes: TFLOP/s, and auto's ratios",
        ["cell", *names, f"auto over {FASTEST.over}", f"over {DETERMINISTIC.over}"],
        body,
    )


def failed_systems(rows: Rows) -> Table:
    """What failed, with the reason: how many cells of each system."""
    cells: dict[tuple[str, str], int] = {}
    for row in rows:
        if "error" in row:
            key = (row.get("system", "all"), row["error"])
            cells[key] = cells.get(key, 0) + 1
    body = [[system, str(count), error] for (system, error), count in cells.items()]
    return Table("Failed", ["system", "cells", "reason"], body, words=(0, 2))


# Everything else.


def _grid(title: str, rows: Rows, text: Callable[[Row], str], first: str = "shape") -> Table:
    """Cells down, systems across."""
    systems = list(dict.fromkeys(row["system"] for row in rows if "system" in row))
    cells: dict[str, dict[str, Row]] = {}
    for row in rows:
        cells.setdefault(row["cell"], {})[row.get("system", "")] = row

    def cell(found: dict[str, Row], system: str) -> str:
        row = found.get(system, found.get(""))  # a row without a system is a cell that failed as a whole
        return NONE if row is None else "failed" if "error" in row else text(row)

    body = [[name, *(cell(found, system) for system in systems)] for name, found in cells.items()]
    return Table(title, [first, *systems], body)


def memory(rows: Rows) -> Table:
    """Extra bytes, and how many float32 dQ these are."""
    return _grid(
        "Peak extra memory of a backward: MiB (in float32 dQ)",
        rows,
        lambda row: f"{row['extra_bytes'] / 2**20:.1f} ({row['extra_in_fp32_dq']:.4f})",
    )


def call_cost(rows: Rows) -> Table:
    """CPU time."""
    return _grid(
        "CPU time of a forward and backward call, microseconds", rows, lambda row: f"{row['us']:.0f}"
    )


def accuracy(rows: Rows) -> Table:
    """Relative errors against float64."""
    body = [
        [row["cell"], row.get("system", NONE)]
        + (["failed"] * 3 if "error" in row else [f"{row[name]:.2e}" for name in GRADIENTS])
        for row in rows
    ]
    return Table(
        "Error against float64, |x - exact| / |exact|",
        ["shape", "system", *GRADIENTS],
        body,
        words=(0, 1),
    )


def reproducibility(rows: Rows) -> list[Table]:
    """Deviations between runs, and the two training runs; each where there are rows of it."""
    runs = [row for row in rows if row["cell"] != "training"]
    training = [row for row in rows if row["cell"] == "training"]
    tables = []
    if runs:
        count = max((row.get("runs", 0) for row in runs), default=0)
        body = [
            [row["cell"], row.get("system", NONE)]
            + (
                ["failed"] * 4
                if "error" in row
                else ["yes" if row["bitwise_equal"] else "**no**"]
                + [f"{row[name]:.2e}" if row[name] else "0" for name in GRADIENTS]
            )
            for row in runs
        ]
        header = ["shape", "system", "same bits", *GRADIENTS]
        tables.append(Table(f"Greatest deviation between {count} runs", header, body, words=(0, 1, 2)))
    if training:
        body = [
            [row["system"]]
            + (
                ["failed"] * 4
                if "error" in row
                else [
                    f"{row['weights_that_differ']:,} of {row['parameters']:,}",
                    f"{row['greatest_deviation']:.2e}" if row["greatest_deviation"] else "0",
                    f"{row['first_loss']:.3f} to {row['last_loss']:.3f}",
                    f"{row['tokens_per_second']:,.0f}",
                ]
            )
            for row in training
        ]
        steps = max((row.get("steps", 0) for row in training), default=0)
        header = ["system", "weights that differ", "greatest deviation", "loss", "tokens a second"]
        tables.append(Table(f"Two training runs of {steps} steps from one seed", header, body))
    return tables


def block_cells(rows: Rows) -> dict[tuple[str, int], dict[str, Row]]:
    """Good rows of blocks by (model, length) and system."""
    cells: dict[tuple[str, int], dict[str, Row]] = {}
    for row in good(rows):
        cells.setdefault((row["model"], row["seqlen"]), {})[row["system"]] = row
    return cells


def block_gains(rows: Rows, below: str, above: str = "auto") -> dict[tuple[str, int], float]:
    """How many times as fast blocks are with one attention as with another, by (model, length)."""
    return {
        cell: systems[below]["ms"] / systems[above]["ms"]
        for cell, systems in block_cells(rows).items()
        if below in systems and above in systems
    }


def blocks(rows: Rows) -> Table:
    """Milliseconds by system, and what auto gains over naive and over the deterministic peers."""
    systems = list(dict.fromkeys(row["system"] for row in rows if "system" in row))
    below = [
        name for name in ("naive", *systems) if name == "naive" or (is_peer(name) and name.endswith("+"))
    ]
    below = [name for name in dict.fromkeys((*below, "unordered")) if name in systems]
    gains = {name: block_gains(rows, name) for name in below}
    cells: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        cells.setdefault((row["model"], row["seqlen"]), {})[row.get("system", "")] = row

    def ms(found: dict[str, Row], system: str) -> str:
        row = found.get(system, found.get(""))
        return NONE if row is None else "failed" if "error" in row else f"{row['ms']:.2f}"

    body = [
        [
            cell[0],
            length(cell[1]),
            *(ms(found, system) for system in systems),
            *(f"{gains[name][cell]:.3f}x" if cell in gains[name] else NONE for name in below),
        ]
        for cell, found in cells.items()
    ]
    return Table(
        "Transformer blocks, forward and backward: ms, and auto's speed against others",
        ["model", "tokens", *systems, *(f"auto / {name}" for name in below)],
        body,
    )


def block_summary(rows: Rows) -> Table:
    """Mean gains by mask."""
    causal = {(row["model"], row["seqlen"]): row["causal"] for row in good(rows)}
    lines = []
    for name in dict.fromkeys(row["system"] for row in good(rows)):
        if name in ("auto", "descending", "shift", "symmetric_shift"):
            continue
        for mask in (True, False):
            gains = [x for cell, x in block_gains(rows, name).items() if causal[cell] == mask]
            if gains:
                lines.append(
                    [
                        f"auto against {name}, {'causal' if mask else 'full'} mask",
                        f"{100 * (statistics.mean(gains) - 1):+.1f} %",
                        f"{100 * (min(gains) - 1):+.1f} to {100 * (max(gains) - 1):+.1f} %",
                    ]
                )
    return Table("Speed of whole blocks", ["", "mean", "range"], lines)


def provenance(record: dict[str, Any]) -> str:
    """In one line where and when a record was taken."""
    e = record.get("environment", {})
    commit = (e.get("commit") or "unknown")[:12] + (" with changes" if e.get("uncommitted_changes") else "")
    form = f"{record['form']} form, " if "form" in record else ""
    return (
        f"{form}{e.get('device')}, driver {e.get('driver')}, CUDA {e.get('cuda')}, torch {e.get('torch')}, "
        f"{str(e.get('date'))[:10]}, commit {commit}"
    )
