"""`python -m benchmarks COMMAND`."""

import argparse
import importlib
import os
import sys

COMMANDS = {
    "backward": "the paper's figure: 24 shapes, every schedule, and other projects",
    "small_jobs": "short sequences, single sequences, and the shape of LLaMA3-8B",
    "lengths": "lengths of every kind, groups of query heads, and unlike numbers of queries and keys",
    "call_cost": "CPU time of a small forward and backward call",
    "blocks": "transformer blocks of five models, forward and backward",
    "reproducibility": "ten runs compared, and two training runs",
    "accuracy": "errors against float64",
    "memory": "peak extra memory of a backward",
    "evaluate": "all of the above, one after the other",
    "bits": "hashes of gradients of fixed inputs, compared with the accepted ones",
    "soak": "random calls, compared with their own repeats and with float64",
    "nightly": "GPU tests, quick sweeps, bits and soak, compared with the last accepted record",
    "accept": "make a nightly record the accepted one",
    "publish": "from the records: charts, docs/evaluation.md, report.html; needs no GPU",
}


def main() -> int:
    """Hands the arguments after the command to the main function of the module of that name."""
    # cuBLAS wants it for reproducible products, before its first call.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"  {name:<16}{what}" for name, what in COMMANDS.items()),
    )
    parser.add_argument("command", choices=COMMANDS, help="what to do; each command has its own --help")
    command = parser.parse_args(sys.argv[1:2]).command
    return importlib.import_module(f".{command}", __package__).main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
