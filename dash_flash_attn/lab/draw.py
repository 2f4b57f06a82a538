"""Pictures of schedules: Gantt charts on one time axis, and maps of steps and ranks. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection
from matplotlib.colors import Colormap, ListedColormap, Normalize, to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from numpy.typing import NDArray

from .simulate import Simulation, simulate

STALL = "#d62728"
IDLE = "#ffffff"
CHAIN = "#9a9a9a"  # between two chains
ABSENT = "#ececec"  # pairs of tiles that the mask leaves out

FEW_TASKS = 1200  # up to here every task is a box with its number, beyond it a pixel's colour
PIXELS = 2400
NUMBERED_MAP = 16  # tiles a side, up to which a map's cells show their numbers

_KINDS = {"idle": 0, "chain": 1, "stalled": 2}


def query_tile_colors(q_tiles: int) -> Colormap:
    """From blue for the first query tile to yellow for the last one: nothing that looks like a stall."""
    return ListedColormap(matplotlib.colormaps["viridis"](np.linspace(0.12, 1.0, max(2, q_tiles))))


def gantt(runs: Sequence[Simulation], title: str = "") -> Figure:
    """A page with one chart for each run, all on the same time axis. One row an SM.

    Colour is the query tile; the darker end of a task is its reduction (in the pipelined model reductions
    run beside the tasks and are not drawn); red is an SM that waits with a task in hand.

    Args:
        runs: results of `simulate`, of one model and as many query tiles.
        title: above all charts.
    """
    end = max(run.makespan for run in runs)
    few = all(len(run.events) <= FEW_TASKS for run in runs)
    rows = max(run.num_sms for run in runs)
    height = min(0.31 * rows, 3.4) + 0.75
    figure = Figure(figsize=(13, 1.15 + height * len(runs)), layout="constrained", dpi=110)
    all_axes = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    q_tiles = runs[0].plan.grid.q_tiles()
    colors = query_tile_colors(q_tiles)
    for axes, run in zip(all_axes, runs, strict=True):
        if few:
            _boxes(axes, run, colors, end)
        else:
            _pixels(axes, run, colors, end)
        _label_chart(axes, run, end)
    all_axes[-1].set_xlabel("time")
    if title:
        figure.suptitle(title, fontsize=13, fontweight="bold")
    bar = figure.colorbar(
        ScalarMappable(Normalize(-0.5, q_tiles - 0.5), colors), ax=list(all_axes), fraction=0.02, pad=0.01
    )
    bar.set_label("query tile")
    bar.set_ticks(_ticks(q_tiles))
    legend = [Patch(facecolor=STALL, label="waits (stalled)")]
    if few and runs[0].model == "paper":
        shades = {"facecolor": colors(0.45), "edgecolor": "black", "linewidth": 0.4}
        legend = [
            Patch(**shades, label="computes; the number is the query tile"),
            Patch(facecolor=_darker(colors(0.45)), label="reduces dQ"),
            *legend,
        ]
    else:
        legend = [Patch(facecolor=colors(0.45), label="works, coloured by query tile"), *legend]
    if any(run.costs.chain > 0 for run in runs):
        legend.append(Patch(facecolor=CHAIN, label="changes the chain"))
    legend.append(Patch(facecolor=IDLE, edgecolor="#b0b0b0", label="no work left"))
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), frameon=False, fontsize=9)
    return figure


def rank_maps(runs: Sequence[Simulation], title: str = "") -> Figure:
    """For each run two maps over (KV tile, query tile) of the first head: arrival, and rank.

    The first one is the moment at which a chain would get there if nobody ever waited; the second one its
    place in the query tile's sum, red where its SM waits. A schedule is free of waits where ranks
    and arrivals, read down a column, climb together and at different times.

    Args:
        runs: results of `simulate`, of one grid.
        title: above all maps.
    """
    q_tiles, kv_tiles = runs[0].plan.grid.q_tiles(), runs[0].plan.grid.kv_tiles()
    side = 3.1
    figure = Figure(figsize=(side * len(runs) + 1.0, 2 * side + 1.2), layout="constrained", dpi=110)
    all_axes = figure.subplots(2, len(runs), squeeze=False, sharex=True, sharey=True)
    upper = [_arrivals(run) for run in runs]
    lower = [run.plan.rank_table[0] for run in runs]
    for axes_row, tables, what in (
        (all_axes[0], upper, "step of arrival, if nobody waited"),
        (all_axes[1], lower, "rank in the sum"),
    ):
        top = max(table.max() for table in tables)
        for axes, table in zip(axes_row, tables, strict=True):
            image = _map(axes, table, top)
        axes_row[0].set_ylabel("KV tile")
        figure.colorbar(image, ax=list(axes_row), fraction=0.03, pad=0.01, label=what)
    for column, run in enumerate(runs):
        _mark_waits(all_axes[1, column], run)
        all_axes[0, column].set_title(run.plan.name)
        all_axes[1, column].set_xlabel("query tile")
    all_axes[0, 0].set_xticks(_ticks(q_tiles))
    all_axes[0, 0].set_yticks(_ticks(kv_tiles))
    figure.legend(
        handles=[
            Patch(
                facecolor=STALL if max(q_tiles, kv_tiles) > NUMBERED_MAP else "none", edgecolor=STALL,
                linewidth=2, label="the SM waits",
            ),
            Patch(facecolor=ABSENT, label="masked"),
        ],
        loc="outside lower center", ncols=2, frameon=False, fontsize=9,
    )  # fmt: skip
    if title:
        figure.suptitle(title, fontsize=13, fontweight="bold")
    return figure


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Writes name.png and name.svg, and returns their paths. The folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        # Without a date the same picture is the same file.
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def _boxes(axes: Axes, run: Simulation, colors: Colormap, end: float) -> None:
    e = run.events
    shade = colors(_unit(e.q_tile, run.plan.grid.q_tiles()))
    paper = run.model == "paper"
    axes.add_collection(_rectangles(e.sm, e.compute_start, e.compute_end, shade))
    if paper:
        axes.add_collection(_rectangles(e.sm, e.reduce_start, e.reduce_end, _darker(shade)))
    axes.add_collection(_rectangles(*_stalls(run), STALL))
    axes.add_collection(_rectangles(*_chain_changes(run), CHAIN))
    # The chart is about 11 inches wide; a number needs 0.11 of them, a chain's name five times as much.
    width = run.costs.compute / end * 11
    numbered = width > 0.11 and run.num_sms <= 12
    _outline_chains(axes, run, named=numbered and width > 0.5)
    if not numbered:
        return
    for sm, start, stop, q_tile in zip(e.sm, e.compute_start, e.compute_end, e.q_tile, strict=True):
        dark = _unit(q_tile, run.plan.grid.q_tiles()) < 0.6
        axes.text(
            (start + stop) / 2, sm + 0.1, str(q_tile), ha="center", va="center", fontsize=7,
            color="white" if dark else "black",
        )  # fmt: skip


def _outline_chains(axes: Axes, run: Simulation, named: bool) -> None:
    """A frame around each chain, so that one sees which tasks run back to back, with its head and KV tile."""
    e = run.events
    for claim in np.unique(e.claim):
        tasks = np.flatnonzero(e.claim == claim)
        stop = e.reduce_end if run.model == "paper" else e.staged
        frame = _rectangles(e.sm[tasks[:1]], e.compute_start[tasks[:1]], stop[tasks[-1:]], "none")
        frame.set(edgecolor="black", linewidth=1.3)
        axes.add_collection(frame)
        if named:
            head, kv_tile = run.plan.chain_table[claim]
            first = tasks[0]
            dark = _unit(e.q_tile[first], run.plan.grid.q_tiles()) < 0.6
            axes.text(
                e.compute_start[first], e.sm[first] - 0.36, f" head {head}, KV {kv_tile}", va="top",
                fontsize=5, color="white" if dark else "black",
            )  # fmt: skip


def _pixels(axes: Axes, run: Simulation, colors: Colormap, end: float) -> None:
    e = run.events
    q_tiles = run.plan.grid.q_tiles()
    palette = np.array(
        [to_rgba(IDLE), to_rgba(CHAIN), to_rgba(STALL), *colors(_unit(np.arange(q_tiles), q_tiles))]
    )
    codes = np.zeros((run.num_sms, PIXELS), np.int32)
    paint = [(*_chain_changes(run), np.full(len(run.claimed), _KINDS["chain"]))]
    stop = e.reduce_end if run.model == "paper" else e.compute_end
    paint.append((e.sm, e.compute_start, stop, e.q_tile + len(_KINDS)))
    sms, starts, stops = _stalls(run)
    paint.append((sms, starts, stops, np.full(len(sms), _KINDS["stalled"])))
    for sms, starts, stops, values in paint:
        # A pixel shows what goes on at its middle.
        first = np.ceil(starts / end * PIXELS - 0.5).astype(int)
        last = np.ceil(stops / end * PIXELS - 0.5).astype(int)
        for sm, begin, after, value in zip(sms, first, last, values, strict=False):
            codes[sm, begin:after] = value
    axes.imshow(
        palette[codes], extent=(0, end, run.num_sms - 0.5, -0.5), aspect="auto", interpolation="nearest"
    )


def _label_chart(axes: Axes, run: Simulation, end: float) -> None:
    axes.set_xlim(0, end * 1.01)
    axes.set_ylim(run.num_sms - 0.5, -0.5)
    axes.set_ylabel("SM")
    axes.set_yticks(_ticks(run.num_sms))
    axes.axvline(run.lower_bound, color="black", linewidth=1.0, linestyle=(0, (4, 3)))
    over = run.makespan / run.lower_bound - 1
    verdict = "at the lower bound" if abs(over) < 5e-4 else f"{over:.1%} above the lower bound"
    axes.set_title(
        f"{run.plan.name}: {run.makespan:g}, {verdict} (dashed); {run.stall_share:.1%} stalled",
        loc="left", fontsize=10,
    )  # fmt: skip
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _stalls(run: Simulation) -> tuple[NDArray[np.int32], NDArray[np.float64], NDArray[np.float64]]:
    """(SM, from, until) of all waits."""
    e = run.events
    if run.model == "paper":
        return e.sm, e.compute_end, e.reduce_start
    first = np.unique(e.claim, return_index=True)[1]
    # A CTA that drains a chain before it claims the next one: from the end of the SM's task before.
    before = np.full(len(e), np.nan)
    order = np.lexsort((e.compute_start, e.sm))
    same = e.sm[order][1:] == e.sm[order][:-1]
    before[order[1:][same]] = e.staged[order[:-1][same]]
    drained = np.where(np.isnan(before[first]), 0.0, before[first])
    started = e.compute_start[first] - run.costs.chain
    return (
        np.concatenate([e.sm, e.sm[first]]),
        np.concatenate([e.compute_end, drained]),
        np.concatenate([e.staged, np.maximum(started, drained)]),
    )


def _chain_changes(run: Simulation) -> tuple[NDArray[np.int32], NDArray[np.float64], NDArray[np.float64]]:
    e = run.events
    first = np.unique(e.claim, return_index=True)[1]
    return e.sm[first], e.compute_start[first] - run.costs.chain, e.compute_start[first]


def _rectangles(sms, starts, stops, color) -> PolyCollection:
    seen = stops > starts
    if not isinstance(color, str):
        color = color[seen]
    sms, starts, stops = sms[seen], starts[seen], stops[seen]
    top, bottom = sms - 0.42, sms + 0.42
    corners = np.stack(
        [np.stack([x, y], 1) for x, y in ((starts, top), (stops, top), (stops, bottom), (starts, bottom))], 1
    )
    return PolyCollection(corners, facecolors=color, edgecolors="none")


def _map(axes: Axes, table: NDArray[np.int32], top: int):
    axes.set_facecolor(ABSENT)
    image = axes.imshow(
        np.ma.masked_less(table, 0), cmap="viridis", aspect="auto", interpolation="nearest", vmin=0, vmax=top
    )
    if max(table.shape) <= NUMBERED_MAP:
        for (kv_tile, q_tile), value in np.ndenumerate(table):
            if value >= 0:
                color = "white" if value < 0.6 * top else "black"
                axes.text(q_tile, kv_tile, str(value), ha="center", va="center", fontsize=7, color=color)
    return image


def _arrivals(run: Simulation) -> NDArray[np.int32]:
    """(KV tiles, query tiles) of the first head: after how many tasks' time; -1 where the two do not meet."""
    costs = run.costs
    free = simulate(
        run.plan, run.num_sms, costs.compute, costs.reduce, 0.0, run.model, staging=max(1, run.staging),
        unordered=True,
    )  # fmt: skip
    task = costs.compute + (costs.reduce if run.model == "paper" else 0.0)
    return _first_head(free, np.round(free.events.compute_start / task))


def _mark_waits(axes: Axes, run: Simulation) -> None:
    # In the pipelined model a staged tile may wait and hold nobody up: only the SM's own waits are marked.
    e = run.events
    on = e.reduce_start if run.model == "paper" else e.staged
    waits = _first_head(run, on - e.compute_end > 1e-9 * run.makespan) > 0
    if max(waits.shape) <= NUMBERED_MAP:
        for kv_tile, q_tile in np.argwhere(waits):
            axes.add_patch(
                Rectangle(
                    (q_tile - 0.44, kv_tile - 0.44), 0.88, 0.88, fill=False, edgecolor=STALL, linewidth=2
                )
            )
    else:
        red = np.zeros((*waits.shape, 4))
        red[waits] = to_rgba(STALL, 0.85)
        axes.imshow(red, aspect="auto", interpolation="nearest")


def _first_head(run: Simulation, values: NDArray) -> NDArray[np.int32]:
    e = run.events
    mine = e.q_head == 0
    table = np.full(run.plan.rank_table.shape[1:], -1, np.int32)
    table[run.plan.chain_table[e.claim[mine], 1], e.q_tile[mine]] = values[mine]
    return table


def _unit(q_tile, q_tiles: int):
    """A query tile's place among the colours, in 0..1."""
    return (q_tile + 0.5) / q_tiles


def _darker(rgba):
    shade = np.array(rgba, float)
    shade[..., :3] *= 0.55
    return shade


def _ticks(count: int) -> list[int]:
    every = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, count) if count / step <= 9)
    return list(range(0, count, every))
