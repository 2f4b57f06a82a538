"""`python -m dash_flash_attn COMMAND`."""

import argparse
import importlib
import sys

from ._version import __version__

COMMANDS = {
    "info": "versions, the GPU, and whether the kernels can run on it",
    "demo": "train a small transformer twice and compare the two runs bit by bit",
    "lab": "draw, simulate and compare the schedules, without a GPU",
}


def main() -> int:
    """Hands the arguments after the command to the main function of the module of that name."""
    parser = argparse.ArgumentParser(
        prog="python -m dash_flash_attn",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"  {name:<8}{what}" for name, what in COMMANDS.items()),
    )
    parser.add_argument("--version", action="version", version=f"dash_flash_attn {__version__}")
    parser.add_argument("command", choices=COMMANDS, help="what to do; each command has its own --help")
    command = parser.parse_args(sys.argv[1:2]).command
    return importlib.import_module(f".{command}", __package__).main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
