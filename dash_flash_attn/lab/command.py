"""`python -m dash_flash_attn lab`: draws schedules on one page, and prints what each one costs.

`python -m dash_flash_attn lab explain` says which schedule a call takes, and why.
`python -m dash_flash_attn lab calibrate` fits the model to the kernels' times.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ..schedule import H200_SMS, SCHEDULES, plan, schedule_name
from .simulate import MODELS, Simulation, simulate

MISSING = (
    "The lab's command needs matplotlib and rich: they come with the extra [lab], as in pip install '.[lab]'"
)


def main(argv: Sequence[str]) -> int:
    """Runs the command. The arguments are the command line's after `lab`."""
    if argv and argv[0] == "explain":
        return _explain(argv[1:])
    if argv and argv[0] == "calibrate":
        return _calibrate(argv[1:])
    return _draw(argv)


def _draw(argv: Sequence[str]) -> int:
    parser = _draw_parser()
    options = parser.parse_args(argv)
    _check_pairs(parser, tiles=options.tiles)
    try:
        from rich.console import Console

        from . import draw
    except ImportError:
        print(MISSING, file=sys.stderr)
        return 2

    q_tiles, kv_tiles = options.tiles[0], options.tiles[-1]
    sms = options.sms or kv_tiles
    runs = []
    for name in SCHEDULES if "all" in options.schedule else options.schedule:
        made = plan(
            name, q_tiles, kv_tiles, causal=options.mask == "causal", num_heads=options.heads,
            group=options.group, tile_rows=(kv_tiles, q_tiles) if options.square else (1, 1),
            heads_per_block=options.heads_per_block,
        )  # fmt: skip
        if made.num_ctas_needed > sms:
            print(f"{name} is left out: it needs {made.num_ctas_needed} SMs", file=sys.stderr)
            continue
        made.validate(sms)
        runs.append(
            simulate(
                made,
                sms,
                options.compute,
                options.reduce,
                options.signal,
                options.model,
                chain=options.chain,
                staging=options.staging,
                jitter=options.jitter,
                pace=options.pace,
                seed=options.seed,
            )  # fmt: skip
        )
    if not runs:
        return 1
    heads = "1 head" if options.heads == 1 else f"{options.heads} heads"
    title = f"{options.mask} mask, {q_tiles} query tiles x {kv_tiles} KV tiles, {heads} on {sms} SMs"
    Console().print(_table(runs, title))
    try:
        files = draw.save(draw.gantt(runs, title), options.out, "gantt")
        files += draw.save(draw.rank_maps(runs, title), options.out, "ranks")
    except OSError as error:
        print(f"lab: --out: {error}", file=sys.stderr)
        return 1
    for path in files:
        print(path)
    return 0


def _table(runs: Sequence[Simulation], title: str):
    from rich.table import Table

    table = Table(title=title)
    table.add_column("schedule", no_wrap=True)
    for column in ("time", "lower bound", "busy", "stalled", "idle", "SMs needed"):
        table.add_column(column, justify="right")
    best = min(run.makespan for run in runs)
    for run in runs:
        whole = run.makespan * run.num_sms
        table.add_row(
            run.plan.name, f"{run.makespan:g}", f"{run.lower_bound:g}", f"{run.busy.sum() / whole:.1%}",
            f"{run.stalled.sum() / whole:.1%}", f"{run.idle.sum() / whole:.1%}",
            str(run.plan.num_ctas_needed), style="bold" if run.makespan == best else None,
        )  # fmt: skip
    return table


def _check_pairs(parser: argparse.ArgumentParser, **values: Sequence[int]) -> None:
    """Ends the command if an option that takes one number or two was given more."""
    for name, numbers in values.items():
        if len(numbers) > 2:
            parser.error(f"argument --{name}: expected one number or two, got {len(numbers)}")


def _explain(argv: Sequence[str]) -> int:
    from .explain import explain

    parser = argparse.ArgumentParser(prog="python -m dash_flash_attn lab explain")
    parser.add_argument("--batch", type=_positive, default=1)
    parser.add_argument("--seqlen", type=_positive, nargs="+", default=[4096], help="of Q; of K, if another")
    parser.add_argument("--heads", type=_positive, nargs="+", default=[16], help="of Q; of K, if another")
    parser.add_argument("--head-dim", type=int, choices=(64, 128), default=128)
    parser.add_argument("--mask", choices=("full", "causal"), default="causal")
    parser.add_argument("--schedule", default="auto", help=f"auto, {', '.join(SCHEDULES)}")
    parser.add_argument("--sms", type=_positive, default=H200_SMS, help="of the device")
    parser.add_argument("--sm-margin", type=int, default=0, help="SMs that are left to others")
    options = parser.parse_args(argv)
    _check_pairs(parser, seqlen=options.seqlen, heads=options.heads)
    try:
        print(
            explain(
                options.batch,
                options.seqlen[0],
                options.seqlen[-1],
                options.heads[0],
                options.heads[-1],
                options.head_dim,
                options.mask == "causal",
                schedule=options.schedule,
                num_sms=options.sms,
                sm_margin=options.sm_margin,
            )  # fmt: skip
        )
    except ValueError as error:
        parser.error(str(error))
    return 0


def _calibrate(argv: Sequence[str]) -> int:
    from . import calibrate

    parser = argparse.ArgumentParser(
        prog="python -m dash_flash_attn lab calibrate",
        description="Times the backward kernels on the 24 shapes of the paper with each schedule, fits the "
        "pipelined model's costs to that, and prints how far the two agree.",
    )
    parser.add_argument(
        "--record",
        type=Path,
        help="JSON of `python -m benchmarks backward` or of this command: no GPU is needed",
    )
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    options = parser.parse_args(argv)
    try:
        if options.record:
            timings, sms, environment = calibrate.read_record(options.record)
            source = {"fitted_from": "record", "record": options.record.name}
        else:
            environment = calibrate.gpu_environment()
            sms, source = environment["sms"], {"fitted_from": "kernels timed by this command"}
            timings = calibrate.measure(
                report=lambda t: print(f"{t.shape}, {t.schedule}: {t.us / 1e3:.3f} ms", file=sys.stderr)
            )
        result = calibrate.calibrate(timings, sms)
    except RuntimeError as error:
        print(f"lab calibrate: {error}; --record FILE takes times measured elsewhere", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"lab calibrate: {error}", file=sys.stderr)
        return 1
    print(result)
    if options.out:
        content = {**source, "environment": environment, **result.as_json()}
        try:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(content, indent=1) + "\n")
        except OSError as error:
            print(f"lab calibrate: --out: {error}", file=sys.stderr)
            return 1
        print(options.out)
    return 0


def _draw_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dash_flash_attn lab",
        description="Draws schedules on one page (gantt) and their ranks (ranks), as PNG and SVG.",
        epilog="`lab explain --help`: which schedule a call takes, and why; "
        "`lab calibrate --help`: the model's costs from the kernels' times",
    )
    parser.add_argument("--mask", choices=("full", "causal"), default="causal")
    parser.add_argument(
        "--tiles",
        type=_positive,
        nargs="+",
        default=[8],
        help="query tiles a head; KV tiles, if another number",
    )
    parser.add_argument("--heads", type=_positive, default=2, help="chain heads: batch * KV heads")
    parser.add_argument("--group", type=_positive, default=1, help="query heads a chain walks")
    parser.add_argument("--schedule", type=_schedule, nargs="+", default=["all"], help="names, or all")
    parser.add_argument("--sms", type=_positive, help="default: as many as KV tiles")
    parser.add_argument("--heads-per-block", type=_positive, help="the order of issue; default: the kernel's")
    parser.add_argument(
        "--square",
        action="store_true",
        help="both sequences are equally long: tiles differ in rows, not in reach",
    )
    parser.add_argument("--model", choices=MODELS, default="paper")
    parser.add_argument("--compute", type=float, default=1.0, help="time of a task's products")
    parser.add_argument("--reduce", type=float, default=0.25, help="time of a task's reduction")
    parser.add_argument("--signal", type=float, default=0.0, help="time from a reduction to the next rank")
    parser.add_argument("--chain", type=float, default=0.0, help="time between two chains")
    parser.add_argument("--staging", type=_positive, default=2, help="dQ buffers of the pipelined model")
    parser.add_argument("--jitter", type=float, default=0.0, help="of compute, as a part of it")
    parser.add_argument("--pace", type=float, default=0.0, help="the same for 16 tasks of a chain in a row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("lab"), help="folder for the pictures")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def _schedule(text: str) -> str:
    if text == "all":
        return text
    try:
        return schedule_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
