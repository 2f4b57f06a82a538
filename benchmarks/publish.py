"""Makes what people read from the committed records: charts, the tables of docs/evaluation.md, report.html.

In the document, what stands between `<!-- measured: NAME -->` and `<!-- /measured -->` is replaced.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from . import blocks, claims, harness, records, report, tables

DOCUMENT = harness.ROOT / "docs" / "evaluation.md"

_PLACE = re.compile(r"(<!-- measured: (\w+) -->\n).*?(<!-- /measured -->)", re.DOTALL)

Records = claims.Records

CHARTS = ("backward", "small_jobs", "lengths", "blocks")
"""The kinds of records that there is a chart of."""


def measured(kind: str, found: Records) -> str:
    """The chart and the tables of one kind of record as Markdown, or how to make one."""
    if kind not in found:
        return f"Not measured yet. `{records.command(kind)}` on a GPU makes the record.\n"
    made = report.tables_of(kind, found[kind])
    parts = [table.markdown() for table in made if table.rows]
    if kind in CHARTS and report.drawable(found[kind]):
        parts.insert(0, f"![{dict(report.SECTIONS)[kind]}](../benchmarks/results/{kind}.svg)")
    return "\n\n".join([*parts, f"_{tables.provenance(found[kind])}_"]) + "\n"


def _claims(found: Records) -> str:
    return claims.claims(found).markdown(title=False) + "\n"


def _targets(found: Records) -> str:
    return claims.targets(found).markdown(title=False) + "\n"


def _sizes(found: Records) -> str:
    lines = (f"- {model.name}: {blocks.sizes(model)}" for model in blocks.MODELS)
    return "\n".join(lines) + "\n"


PLACES: dict[str, Callable[[Records], str]] = {
    "claims": _claims,
    "targets": _targets,
    "sizes": _sizes,
    **{kind: lambda found, kind=kind: measured(kind, found) for kind, _ in report.SECTIONS},
}
"""What a document may have a place for."""


def filled(text: str, found: Records) -> str:
    """A document with all its places filled. Raises ValueError for a place that there is nothing for."""

    def fill(match: re.Match[str]) -> str:
        if match[2] not in PLACES:
            raise ValueError(f"nothing is called {match[2]!r}; there are {', '.join(PLACES)}")
        return match[1] + PLACES[match[2]](found) + match[3]

    return _PLACE.sub(fill, text)


def draw(found: Records, folder: Path) -> list[Path]:
    """Writes the charts beside the records, and returns their paths. ImportError without matplotlib."""
    from . import charts

    paths = []
    for kind in CHARTS:
        if kind in found and report.drawable(found[kind]):
            draw = {"blocks": charts.blocks, "lengths": charts.lengths}.get(kind, charts.sweep)
            figure = draw(found[kind]["rows"])
            paths.append(folder / f"{kind}.svg")
            paths[-1].write_bytes(charts.svg(figure))
    return paths


def main(argv: list[str]) -> int:
    """Writes all of it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks publish", description=__doc__)
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="folder of the records")
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="what to fill (docs/evaluation.md)")
    parser.add_argument("--night", type=Path, help="a nightly record.json to put first into the report")
    parser.add_argument("--report", type=Path, default=harness.ROOT / "report.html", help="(report.html)")
    options = parser.parse_args(argv)
    try:
        found = records.committed(options.results)
        # A source distribution has none: every table would become "not measured".
        if not found:
            raise ValueError(
                f"there are no records in {options.results}; a checkout has them, or --results FOLDER"
            )
        text = filled(options.document.read_text(), found)
        night = harness.read_json(options.night) if options.night else None
    except (OSError, ValueError) as error:
        print(f"publish: {error}; nothing is written", file=sys.stderr)
        return 1
    try:
        for path in draw(found, options.results):
            print(path)
    except ImportError:
        print("No charts: matplotlib is not installed.")
    options.document.write_text(text)
    report.write(options.report, night, options.results)
    print(f"{options.document}\n{options.report}")
    return 0
