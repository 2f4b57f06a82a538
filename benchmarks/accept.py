"""Makes a night's record the one that later nights are compared with.

The record goes to benchmarks/results/nightly/, its bits to benchmarks/results/bits.json; commit both. Slower
cells and other bits are accepted only with a reason, which is kept in the record; other bits are told in
CHANGELOG.md too, from the second release on. A record with failed tests, soak cases or measurements is not
accepted.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import bits, compare, harness, nightly

CHANGELOG = harness.ROOT / "CHANGELOG.md"


class NotAcceptable(ValueError):
    """A record that later nights must not be compared with."""


def accept(
    record: dict[str, Any],
    because: str | None,
    *,
    history: Path = compare.HISTORY,
    bits_path: Path = bits.ACCEPTED,
    changelog: Path = CHANGELOG,
) -> list[Path]:
    """Accepts a record; the files that were written. Raises NotAcceptable.

    Args:
        record: of `nightly`, with its verdict.
        because: why slower cells or other bits are meant to be.
        history: folder of accepted records.
        bits_path: file of the accepted bits.
        changelog: where a change of bits is told.
    """
    problems = record["verdict"]["problems"]
    if fatal := set(problems) - {"slower", "bits", "baseline"}:
        raise NotAcceptable(f"there are problems with {', '.join(sorted(fatal))}")
    if any(record.get(key) is None for key in ("tests", *compare.SWEEPS, "bits", "soak")):
        raise NotAcceptable("the record is not complete")
    if failed := bits.failures(record["bits"]):
        raise NotAcceptable(failed[0])
    # Of the bits as they are accepted now: they may be others than those of the night.
    differing = []
    if bits_path.exists():
        differing = bits.compare(harness.read_json(bits_path), record["bits"])
    meant = [*problems.get("slower", []), *differing]
    if meant and not because:
        raise NotAcceptable(f"--because must say why this is meant to be: {'; '.join(meant)}")
    if because:
        record = {**record, "accepted_because": because}
    environment = record["environment"]
    date = re.sub(r"[^0-9T]", "", environment["date"])[:15]
    commit = (environment["commit"] or "unknown")[:12]
    written = [history / f"{date}_{commit}.json", bits_path]
    # The bits are kept once, in their own file.
    harness.write_json(written[0], {key: value for key, value in record.items() if key != "bits"})
    harness.write_json(bits_path, record["bits"])
    if differing:
        before = changelog.read_text()
        if (after := with_entry(before, because, differing)) != before:
            changelog.write_text(after)
            written.append(changelog)
    return written


def with_entry(text: str, because: str, differing: Sequence[str]) -> str:
    """A changelog with an entry about changed bits at the top of its newest release.

    The first release has none: nobody has other bits from a release before it. Raises ValueError for a
    changelog without a release.
    """
    releases = list(re.finditer(r"^## .*\n+", text, re.MULTILINE))
    if not releases:
        raise ValueError("the changelog has no release")
    if len(releases) == 1:
        return text
    head = releases[0]
    cases = len({line.split(":")[0].split(",")[0] for line in differing})
    noun = "case" if cases == 1 else "cases"
    entry = f"- **The bits change** ({cases} {noun} of `benchmarks/results/bits.json`): {because}\n"
    return text[: head.end()] + entry + text[head.end() :]


def main(argv: Sequence[str]) -> int:
    """Accepts a record. 1 if it cannot be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks accept", description=__doc__)
    parser.add_argument("record", type=Path, nargs="?", default=nightly.FOLDER / "record.json")
    parser.add_argument("--because", help="why slower cells or other bits are meant to be")
    options = parser.parse_args(argv)
    try:
        written = accept(harness.read_json(options.record), options.because)
    except (OSError, ValueError) as error:
        print(f"benchmarks: not accepted: {error}")
        return 1
    print("\n".join(map(str, written)))
    return 0
