"""report.html: everything that the records say, in one file that needs nothing else."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from . import harness, records, tables
from .tables import Table

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 75rem; padding: 1rem; color: #1b1f24; background: #fff;
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: .5rem 0; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .4rem;
  border-bottom: 1px solid #d0d7de; } h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; }
.verdict { padding: .6rem .9rem; border-radius: .4rem; border: 1px solid; }
.passed { background: #e6f4ea; border-color: #1a7f37; }
.failed { background: #ffebe9; border-color: #cf222e; }
.source { color: #57606a; font-size: .85rem; margin: .3rem 0; }
nav a { color: #0969da; } nav { display: flex; flex-wrap: wrap; gap: .2rem .9rem; font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #d8dee4; text-align: right; white-space: nowrap; }
th { background: #f6f8fa; } td.words, th.words { text-align: left; }
td.words { white-space: normal; min-width: 8rem; }
td:first-child, th:first-child { position: sticky; left: 0; background: #f6f8fa; max-width: 13rem; }
td, th { overflow-wrap: normal; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
img { width: 100%; height: auto; display: block; max-width: 44rem; }
code { font-size: .85em; background: #f6f8fa; }
"""

SECTIONS = (
    ("backward", "The paper's shapes"),
    ("backward_fa2", "The paper's shapes, FlashAttention-2"),
    ("small_jobs", "Short sequences, single ones, and LLaMA3-8B"),
    ("lengths", "Every length"),
    ("blocks", "Transformer blocks"),
    ("reproducibility", "Reproducibility"),
    ("accuracy", "Accuracy"),
    ("memory", "Memory"),
    ("call_cost", "CPU time of a call"),
)


def tables_of(kind: str, record: dict[str, Any]) -> list[Table]:
    """The tables of one kind of record."""
    rows = record["rows"]
    if kind in records.SWEEPS:
        return [tables.headline(rows), *tables.backward(rows)]
    if kind == "blocks":
        return [tables.block_summary(rows), tables.blocks(rows)]
    made = getattr(tables, kind)(rows)
    return made if isinstance(made, list) else [made]


def drawable(record: dict[str, Any]) -> bool:
    """Whether a record has enough rows for a chart. The quick form of `lengths` has too few for a line."""
    few = record.get("kind") == "lengths" and record.get("form") == "quick"
    return bool(tables.good(record["rows"])) and not few


def charts_of(kind: str, record: dict[str, Any]) -> list[tuple[str, Any]]:
    """(title, figure) of one kind of record. ImportError without matplotlib."""
    from . import charts

    rows = record["rows"]
    if not drawable(record):
        return []
    if kind in records.SWEEPS:
        return charts.sweep_panels(rows)
    if kind == "lengths":
        return charts.length_panels(rows)
    return [("Transformer blocks", charts.blocks(rows))] if kind == "blocks" else []


def build(night: dict[str, Any] | None = None, folder: Path = harness.RESULTS) -> str:
    """The report.

    Args:
        night: a record of `nightly`, which comes first.
        folder: of the committed records.
    """
    found = records.committed(folder)
    parts = ["<h1>dash_flash_attn: measurements</h1>"]
    links, sections = [], []

    def section(identifier: str, title: str, *content: str) -> None:
        links.append(f'<a href="#{identifier}">{_text(title)}</a>')
        sections.append(f'<section id="{identifier}"><h2>{_text(title)}</h2>{"".join(content)}</section>')

    if night:
        parts.append(_verdict(night))
        for kind, title in (("backward", "This night's sweep"), ("lengths", "This night's lengths")):
            if night.get(kind):
                section(f"night_{kind}", title, *_content(kind, night[kind]))
    checks = night or {"tests": found.get("gpu_tests"), "bits": found.get("bits")}
    if lines := _checks(checks):
        section("checks", "Checks", "<ul>" + "".join(f"<li>{_text(line)}</li>" for line in lines) + "</ul>")
    points = records.history(folder)
    if night and night.get("backward"):
        points.append(records.point(night["backward"]))
    for kind, title in SECTIONS:
        if kind in found:
            section(kind, title, *_content(kind, found[kind]))
        else:
            section(kind, title, f"<p>Not measured yet: <code>{records.command(kind)}</code> on a GPU.</p>")
    section("history", "History", *_history(points))
    nav = f"<nav>{''.join(links)}</nav>"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>dash_flash_attn: measurements</title><style>{STYLE}</style></head><body>"
        f"{''.join(parts)}{nav}{''.join(sections)}</body></html>\n"
    )


def _text(words: object) -> str:
    return html.escape(str(words))


def _verdict(night: dict[str, Any]) -> str:
    verdict = night["verdict"]
    kind = "passed" if verdict["passed"] else "failed"
    lines = [f"{name}: {p}" for name, problems in verdict["problems"].items() for p in problems]
    lines += [f"note: {note}" for note in verdict["notes"]]
    listed = "".join(f"<li>{_text(line)}</li>" for line in lines)
    against = f", compared with {_text(verdict['accepted'])}" if verdict["accepted"] else ""
    return (
        f'<div class="verdict {kind}"><b>{kind.upper()}</b>{against}<ul>{listed}</ul></div>'
        f"<p class=source>{_text(tables.provenance(night))}, {night.get('seconds', 0):.0f} s</p>"
    )


def _checks(night: dict[str, Any]) -> list[str]:
    lines = []
    if tests := night.get("tests"):
        lines.append(
            f"GPU tests: {tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped"
            + _source(tests)
        )
    if soak := night.get("soak"):
        lines.append(
            f"Soak: {soak['cases']:,} cases in {soak['seconds']:.0f} s, {len(soak['failed'])} failed"
        )
    if found := night.get("bits"):
        lines.append(f"Bits: hashes of {len(found['cases'])} cases" + _source(found))
    return lines


def _source(record: dict[str, Any]) -> str:
    """Where a record was taken: committed ones may be of unlike dates."""
    return f" ({tables.provenance(record)})" if "environment" in record else ""


def _content(kind: str, record: dict[str, Any]) -> list[str]:
    parts = [f"<p class=source>{_text(tables.provenance(record))}</p>"]
    try:
        parts.append(_charts(charts_of(kind, record)))
    except ImportError:
        parts.append(_NO_CHARTS)
    return [*parts, *(table.html() for table in tables_of(kind, record) if table.rows)]


_NO_CHARTS = "<p class=source>Without matplotlib the report has no charts.</p>"


def _charts(figures: list[tuple[str, Any]]) -> str:
    if not figures:
        return ""
    from . import charts

    images = "".join(f'<img alt="{_text(title)}" src="{charts.data_uri(f)}">' for title, f in figures)
    return f"<div class=charts>{images}</div>"


def _history(points: list[dict[str, Any]]) -> list[str]:
    if not points:
        return ["<p>No committed record of the paper's shapes.</p>"]
    names = list(dict.fromkeys(name for point in points for name in point["ratios"]))
    body = [
        [
            point["date"][:16].replace("T", " "),
            (point["commit"] or "unknown")[:12],
            str(point["device"]),
            *(f"{point['ratios'][name]:.3f}" if name in point["ratios"] else tables.NONE for name in names),
        ]
        for point in points
    ]
    title = "auto's ratio to the matmul, geometric mean over 1k and 16k"
    table = Table(title, ["date", "commit", "GPU", *names], body, words=(0, 1, 2)).html()
    try:
        from . import charts

        return [_charts([("History", charts.history(points))]), table]
    except ImportError:
        return [_NO_CHARTS, table]


def write(path: Path, night: dict[str, Any] | None = None, folder: Path = harness.RESULTS) -> None:
    """Writes the report."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(build(night, folder))
