"""Pictures of records, for the documents and the report. Needs matplotlib."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .shapes import Shape
from .tables import OURS, TARGETS, Rows, block_gains, by_cell, good, is_plain, length, mask_words

COLORS = {
    "naive": "#c6dbef",
    "descending": "#9ecae1",
    "shift": "#4292c6",
    "symmetric_shift": "#2171b5",
    "auto": "#08306b",
    "unordered": "#bdbdbd",
    "fa3": "#e6550d",
    "fa4": "#31a354",
    "cudnn": "#756bb1",
    "fa2": "#8c6d31",
}
"""Ours are blue. Of a peer, the deterministic backward has the full colour and the other a pale one."""

_PARAMETERS = {
    "svg.fonttype": "none",  # text stays text: small files, and the reader's own font
    "svg.hashsalt": "dash_flash_attn",  # the same picture is the same file
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def color(system: str) -> tuple[str, float]:
    """A system's colour and opacity."""
    if system in COLORS:
        return COLORS[system], 1.0
    return COLORS.get(system[:-1], "#636363"), 1.0 if system.endswith("+") else 0.5


def panels(rows: Rows) -> list[tuple[Any, ...]]:
    """(head_dim, causal, heads, kv_heads) of each panel that rows make."""
    return list(dict.fromkeys(map(_panel, by_cell(rows))))


def _panel(cell: Shape) -> tuple[Any, ...]:
    return cell.head_dim, cell.causal, cell.heads, cell.kv_heads


def panel_title(panel: Sequence[Any]) -> str:
    """A panel's name."""
    head_dim, causal, heads, kv_heads = panel
    grouped = f", {heads}/{kv_heads} heads" if heads != kv_heads else ""
    return f"d {head_dim}, {'causal' if causal else 'full'} mask{grouped}"


def systems_of(rows: Rows) -> list[str]:
    """The systems of a chart: those of the rows, and auto where a schedule stands for it; ours first."""
    names = dict.fromkeys(name for systems in by_cell(rows).values() for name in systems)
    return [name for name in OURS if name in names] + [name for name in names if name not in OURS]


def draw_sweep(axes: Axes, rows: Rows, panel: Sequence[Any], systems: Sequence[str]) -> None:
    """One panel of the paper's figure: TFLOP/s, groups of bars by sequence length."""
    cells = {c: s for c, s in by_cell(rows).items() if _panel(c) == tuple(panel)}
    order = sorted(cells, key=lambda cell: (cell.seqlen, cell.batch))
    width = 0.84 / len(systems)
    for number, name in enumerate(systems):
        bars = [(i, cells[cell][name]["tflops"]) for i, cell in enumerate(order) if name in cells[cell]]
        shade, alpha = color(name)
        left = (number - (len(systems) - 1) / 2) * width
        axes.bar(
            [i + left for i, _ in bars], [x for _, x in bars], width, color=shade, alpha=alpha, label=name
        )
    axes.set_xticks(range(len(order)), [length(cell.seqlen) for cell in order])
    axes.set_title(panel_title(panel))
    axes.set_ylabel("TFLOP/s")
    axes.set_xlabel("sequence length")
    axes.grid(axis="y", linewidth=0.4)
    axes.set_axisbelow(True)


def sweep(rows: Rows) -> Figure:
    """All panels on one page, in the paper's form."""
    with matplotlib.rc_context(_PARAMETERS):
        shown = panels(rows)
        systems = systems_of(rows)
        lines = (len(shown) + 1) // 2
        figure = Figure(figsize=(13, 4 * lines), layout="constrained")
        for number, panel in enumerate(shown):
            draw_sweep(figure.add_subplot(lines, min(2, len(shown)), number + 1), rows, panel, systems)
        _legend(figure)
    return figure


def sweep_panels(rows: Rows) -> list[tuple[str, Figure]]:
    """Each panel as a picture of its own, narrow enough for a phone, with its title."""
    figures = []
    with matplotlib.rc_context(_PARAMETERS):
        systems = systems_of(rows)
        for panel in panels(rows):
            figure = Figure(figsize=(6.2, 4.4), layout="constrained")
            draw_sweep(figure.add_subplot(), rows, panel, systems)
            _legend(figure)
            figures.append((panel_title(panel), figure))
    return figures


TARGET_COLORS = ("#08306b", "#e6550d", "#bdbdbd")


def length_masks(rows: Rows) -> list[str]:
    """Head dimension and mask of each panel that the squares among rows make."""
    return list(dict.fromkeys(mask_words(cell) for cell in by_cell(rows) if cell.seqlen_k is None))


def draw_lengths(axes: Axes, rows: Rows, mask: str) -> None:
    """One panel: the ratios of "auto" over the length; a line for the paper's hidden size, else marks."""
    for target, shade in zip(TARGETS, TARGET_COLORS, strict=True):
        squares = {
            cell: ratio
            for cell, ratio in target.ratios(rows).by_cell.items()
            if cell.seqlen_k is None and mask_words(cell) == mask
        }
        line = sorted((cell.seqlen, ratio) for cell, ratio in squares.items() if is_plain(cell))
        others = [(cell.seqlen, ratio) for cell, ratio in squares.items() if not is_plain(cell)]
        axes.plot(
            [x for x, _ in line], [y for _, y in line], color=shade, marker="o", markersize=3,
            linewidth=1.2, label=f"over {target.over}",
        )  # fmt: skip
        axes.plot(
            [x for x, _ in others], [y for _, y in others], color=shade, marker="D", markersize=4,
            markerfacecolor="none", linestyle="none", label=f"over {target.over}, other heads",
        )  # fmt: skip
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    ticks = [1 << power for power in range(9, 17)]
    axes.set_xticks(ticks, [length(tick) for tick in ticks])
    axes.set_title(mask)
    axes.set_ylabel("speed of auto over others")
    axes.set_xlabel("sequence length")
    axes.grid(linewidth=0.4)
    axes.set_axisbelow(True)


def lengths(rows: Rows) -> Figure:
    """All panels of the record of lengths on one page."""
    with matplotlib.rc_context(_PARAMETERS):
        shown = length_masks(rows)
        figure = Figure(figsize=(13, 4 * ((len(shown) + 1) // 2)), layout="constrained")
        for number, mask in enumerate(shown):
            axes = figure.add_subplot((len(shown) + 1) // 2, min(2, len(shown)), number + 1)
            draw_lengths(axes, rows, mask)
        _legend(figure, columns=3)
    return figure


def length_panels(rows: Rows) -> list[tuple[str, Figure]]:
    """Each panel as a picture of its own, narrow enough for a phone, with its title."""
    figures = []
    with matplotlib.rc_context(_PARAMETERS):
        for mask in length_masks(rows):
            figure = Figure(figsize=(6.2, 4.4), layout="constrained")
            draw_lengths(figure.add_subplot(), rows, mask)
            _legend(figure, columns=2)
            figures.append((mask, figure))
    return figures


def blocks(rows: Rows) -> Figure:
    """What whole blocks gain from auto over the naive order, and what determinism costs them."""
    with matplotlib.rc_context(_PARAMETERS):
        against = {name: block_gains(rows, name) for name in ("naive", "unordered", "fa3+", "fa4+")}
        against = {name: gains for name, gains in against.items() if gains}
        cells = list(dict.fromkeys((row["model"], row["seqlen"]) for row in good(rows)))
        figure = Figure(figsize=(6.2, 1.2 + 0.42 * len(cells)), layout="constrained")
        axes = figure.add_subplot()
        height = 0.8 / max(1, len(against))
        for number, (name, gains) in enumerate(against.items()):
            bars = [(i, 100 * (gains[cell] - 1)) for i, cell in enumerate(cells) if cell in gains]
            shade, _ = color(name)
            shift = (number - (len(against) - 1) / 2) * height
            axes.barh(
                [i + shift for i, _ in bars],
                [x for _, x in bars],
                height,
                color=shade,
                label=f"against {name}",
            )
        axes.set_yticks(range(len(cells)), [f"{model}, {length(tokens)}" for model, tokens in cells])
        axes.invert_yaxis()
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_xlabel("auto is faster by, %")
        axes.grid(axis="x", linewidth=0.4)
        axes.set_axisbelow(True)
        _legend(figure)
    return figure


def history(points: Sequence[dict[str, Any]]) -> Figure:
    """The ratio to the matmul from record to record; points are those of `report.history`."""
    with matplotlib.rc_context(_PARAMETERS):
        figure = Figure(figsize=(6.2, 4), layout="constrained")
        axes = figure.add_subplot()
        for name in dict.fromkeys(panel for point in points for panel in point["ratios"]):
            at = [(i, point["ratios"][name]) for i, point in enumerate(points) if name in point["ratios"]]
            axes.plot([i for i, _ in at], [y for _, y in at], marker="o", label=name)
        axes.set_xticks(range(len(points)), [point["date"][:10] for point in points], rotation=30, ha="right")
        axes.set_ylabel("auto, part of the matmul")
        axes.set_ylim(bottom=0)
        axes.margins(x=0.15)
        axes.grid(axis="y", linewidth=0.4)
        _legend(figure, columns=2)
    return figure


def _legend(figure: Figure, columns: int = 5) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels() if figure.axes else ([], [])
    if handles:
        figure.legend(
            handles, labels, loc="outside lower center", ncols=min(columns, len(labels)), frameon=False,
            fontsize=9,
        )  # fmt: skip


def svg(figure: Figure) -> bytes:
    """A figure as SVG; without a date, so that the same picture is the same file."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(_PARAMETERS):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def data_uri(figure: Figure) -> str:
    """A figure as the address of an image, which carries it."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg(figure)).decode()
