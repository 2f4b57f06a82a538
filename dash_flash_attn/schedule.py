"""The schedules by name: in which sequence KV tiles visit query tiles, and in which order dQ is summed.

The policies themselves are C++ (csrc/schedule/), the very code that the kernel runs. This module finds them
by name and shows them as plain lists. The schedules are those of DASH, arXiv 2601.21824.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from . import _native

_POLICIES = {
    policy.name: policy
    for policy in (_native.Naive, _native.Descending, _native.Shift, _native.SymmetricShift)
}

SCHEDULES: tuple[str, ...] = tuple(_POLICIES)
"""The names of the schedules: naive, descending, shift, symmetric_shift."""


def schedule_name(name: str) -> str:
    """The name as in SCHEDULES, of a name in any case, with hyphens or underscores.

    Raises ValueError for an unknown name.
    """
    found = name.lower().replace("-", "_")
    if found not in _POLICIES:
        raise ValueError(f"schedule {name!r} is none of {', '.join(SCHEDULES)}")
    return found


def make_policy(name: str, grid: _native.TileGrid) -> _native.Policy:
    """The native policy `name` for one head's tiles. Raises ValueError for an unknown name."""
    return _POLICIES[schedule_name(name)](grid)


@dataclass(frozen=True)
class Schedule:
    """What one schedule does for one shape: a readable view of the native policy.

    Args:
        name: a schedule's name, see `schedule_name`.
        seqlen_q, seqlen_k: rows of Q, and of K and V; positive.
        head_dim: decides the tiles, as in the kernels.
        causal: query r sees key c if c <= r + seqlen_k - seqlen_q.

    Raises ValueError for an unknown name or a size that is not positive.
    """

    name: str
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    causal: bool = False
    policy: _native.Policy = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Normalises the name, and makes the policy."""
        object.__setattr__(self, "name", schedule_name(self.name))
        grid = _native.TileGrid(
            self.seqlen_q, self.seqlen_k, *_native.tile_shape(self.head_dim), causal=self.causal
        )
        object.__setattr__(self, "policy", make_policy(self.name, grid))

    @property
    def grid(self) -> _native.TileGrid:
        """The tiles of one head, and which of them meet."""
        return self.policy.grid

    def visits(self, kv_tile: int) -> list[int]:
        """The query tiles that a KV tile's chain visits, in that sequence."""
        return [self.policy.visit(kv_tile, step) for step in range(self.policy.visits(kv_tile))]

    def order(self, q_tile: int) -> list[int]:
        """The KV tiles that add to a query tile's dQ, in that order."""
        return sorted(
            range(self.grid.contributors(q_tile)), key=lambda kv_tile: self.policy.rank(kv_tile, q_tile)
        )

    def chains(self, heads: int) -> list[tuple[int, int]]:
        """(head, KV tile) of the chains of `heads` heads, in the sequence in which CTAs claim them."""
        return [(head, kv_tile) for head, kv_tile in self.policy.chain_table(heads).tolist()]

    @property
    def resident_ctas_needed(self) -> int:
        """How many CTAs must run at the same time for the schedule to make progress."""
        return self.policy.resident_ctas_needed()
