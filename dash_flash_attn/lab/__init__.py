"""The schedule lab: see a schedule, prove it, and choose one, without a GPU. See docs/lab.md.

Its pictures and its command need the extra [lab]; the rest needs no more than the package does.
"""

from collections.abc import Sequence

from .simulate import Costs, Deadlock, Events, Simulation, lower_bound, simulate

__all__ = ["Costs", "Deadlock", "Events", "Simulation", "lower_bound", "main", "simulate"]


def main(argv: Sequence[str]) -> int:
    """`python -m dash_flash_attn lab`. The arguments are the command line's after `lab`."""
    from . import command

    return command.main(argv)
