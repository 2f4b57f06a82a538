"""What csrc/bindings offers: the schedules, a simulator, the workspace's size, and calls into the kernels."""

from collections.abc import Sequence
from typing import ClassVar, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray

class TileGrid:
    """Which KV tiles meet which query tiles in one head (csrc/schedule/tile_grid.h).

    ValueError for a size that is not positive; IndexError for a tile that is not there.
    """

    def __init__(
        self,
        seqlen_q: int,
        seqlen_k: int,
        q_rows: int,
        kv_rows: int,
        causal: bool,
        paired: bool = False,
        heads: int = 1,
    ) -> None: ...
    @property
    def seqlen_q(self) -> int: ...
    @property
    def seqlen_k(self) -> int: ...
    @property
    def q_rows(self) -> int:
        """Queries a tile."""
    @property
    def kv_rows(self) -> int:
        """Keys a tile."""
    @property
    def causal(self) -> bool: ...
    @property
    def paired(self) -> bool:
        """Whether the schedule may let the heads of a pair go different ways, see heads_in_pairs."""
    @property
    def heads(self) -> int:
        """Heads of a batch entry, as chains count them: parts of the query heads of a KV head."""
    @property
    def two_sides(self) -> bool:
        """Whether each side of the L2 cache has an order of issue, for its half of the heads."""
    @property
    def ctas_an_order(self) -> int:
        """How many CTAs share an order of issue."""
    def on_sides(self, sides: int, ctas: int = 128) -> TileGrid:
        """The same grid for so many CTAs, in all, on 1 or 2 sides of the L2 cache: for orders of issue."""
    def q_tiles(self) -> int: ...
    def kv_tiles(self) -> int: ...
    def offset(self) -> int:
        """Under a causal mask query r sees key c if c <= r + offset."""
    def first_query(self, kv_tile: int) -> int:
        """The first query tile that sees a key of this KV tile; it sees the tiles from there to the last."""
    def contributors(self, q_tile: int) -> int:
        """How many KV tiles add to this query tile's dQ: the first ones."""
    def needs_mask(self, kv_tile: int, q_tile: int) -> bool:
        """Whether some pair of rows of this pair of tiles must not meet."""

class _Policy:
    """A schedule for one head's tiles (csrc/schedule/policy.h). IndexError for tiles that do not meet."""

    name: ClassVar[str]
    waits_in_line: ClassVar[bool]
    def __init__(self, grid: TileGrid) -> None: ...
    @property
    def grid(self) -> TileGrid: ...
    @property
    def ways(self) -> int:
        """1, or 2 where the heads of a pair go different ways: head h goes way h % ways."""
    def visits(self, kv_tile: int) -> int:
        """How many query tiles the chain of a KV tile visits."""
    def visit(self, kv_tile: int, step: int, way: int = 0) -> int:
        """The query tile that it visits at a step, in a head that goes that way."""
    def rank(self, kv_tile: int, q_tile: int, way: int = 0) -> int:
        """The place of its contribution in the query tile's sum, in a head that goes that way."""
    def chain(self, claim: int, heads: int) -> tuple[int, int]:
        """(head, KV tile): the order in which chains are issued."""
    def cycle_end(self, claim: int, heads: int) -> int:
        """The first claim after the chains that may wait for each other and for this one."""
    def slot(self, kv_tile: int) -> int:
        """The CTA, within a cycle, that the schedule has in mind for a KV tile."""
    def resident_ctas_needed(self) -> int:
        """The longest cycle: so many CTAs must run at the same time."""
    def idle_ctas(self, ctas: int) -> int:
        """How many of the CTAs of an order of issue find no whole cycle, and nothing else."""
    def l2_sides(self, batch: int, heads_k: int, parts: int, sms: int, sm_margin: int = 0) -> int:
        """How many sides of the L2 cache, 1 or 2, share the KV heads of a call (csrc/core/l2_sides.h).

        The query heads of each are in so many parts.
        """
    def visit_table(self, way: int = 0) -> NDArray[np.int32]:
        """(KV tiles, query tiles): `visit` at [kv_tile, step], and -1 after a chain's end."""
    def rank_table(self, way: int = 0) -> NDArray[np.int32]:
        """(KV tiles, query tiles): `rank` at [kv_tile, q_tile], and -1 where the two do not meet."""
    def chain_table(self, heads: int) -> NDArray[np.int32]:
        """(heads * KV tiles, 2): `chain` at [claim]."""
    def walk(self, kv_tile: int, group: int, way: int = 0) -> NDArray[np.int32]:
        """(group * visits, 2): the head of the group and the query tile at each step of a KV tile's chain."""
    def split_table(self) -> NDArray[np.int32]:
        """(KV tiles): the visits before it are walked in all query heads of a group, and then the others."""
    def heads_together(self, group: int) -> int:
        """In how many of the `group` heads a query tile is visited before the next tile."""
    @property
    def turns(self) -> bool:
        """Whether a chain walks every other head of a group back, from its last visit to its first."""
    def completes(
        self,
        heads: int,
        ctas: int,
        claim_ahead: bool = True,
        parts: Sequence[int] = (1,),
        others: int = 0,
        open: bool | None = None,
    ) -> bool:
        """Whether `ctas` CTAs run all chains to the end, claiming as the kernel does. False: a deadlock.

        With claim_ahead a CTA claims its next chain while one runs, where the policy allows it. As many
        neighbouring heads as there are `parts` belong to one KV head, and end their chains in turn; each
        walks as many query heads as its part says.

        With `others`, CTAs on the other side of the L2 cache, half of the heads belong to each side, and
        these CTAs claim theirs first if that side is open: None, if the kernel would open it.
        """

def schedules() -> tuple[str, ...]:
    """The names that `policy` knows."""

def heads_in_pairs(heads_q: int, heads_k: int) -> bool:
    """Whether heads come in pairs: an even number of them, each with its own K and V."""

class Naive(_Policy): ...
class Descending(_Policy): ...

class Rotating(_Policy):
    @property
    def in_line(self) -> int:
        """How many KV tiles of a head, the last ones, wait in line."""
    @property
    def group_size(self) -> int:
        """How many of the others rotate together."""

class Climbing(_Policy): ...
class OppositeHeads(_Policy): ...

class SymmetricShift(_Policy):
    def folds(self) -> bool:
        """Whether chains that rotate end one after the other, and those that descend can follow them."""
    def heads_that_fit(self) -> int:
        """How many heads have first cycles that fit on the CTAs: a block, where the triangle folds."""
    def fills(self) -> bool:
        """Whether these are all of the rotating chains, and take a full chip or one side of it."""

Policy: TypeAlias = Naive | Descending | Rotating | Climbing | OppositeHeads | SymmetricShift

def policy(schedule: str, grid: TileGrid) -> Policy:
    """What a schedule's name stands for on this grid. ValueError for an unknown name."""

class _Timeline(TypedDict):
    """By task: claims in the order of issue, their steps in the order of execution. -1: it never happened."""

    sm: NDArray[np.int32]
    claim: NDArray[np.int32]
    q_head: NDArray[np.int32]
    q_tile: NDArray[np.int32]
    compute_start: NDArray[np.float64]
    compute_end: NDArray[np.float64]
    staged: NDArray[np.float64]
    reduce_start: NDArray[np.float64]
    reduce_end: NDArray[np.float64]
    claimed: NDArray[np.float64]
    """By claim."""
    unfinished: int
    """Tasks that were never done; not 0: a deadlock."""

def simulate(
    *,
    chain_table: NDArray[np.int32],
    cycle_end: NDArray[np.int32],
    way: NDArray[np.int32],
    visit_table: NDArray[np.int32],
    rank_table: NDArray[np.int32],
    q_heads: NDArray[np.int32],
    together: int,
    turns: bool,
    split: NDArray[np.int32],
    sides: int,
    sms: int,
    others: int,
    compute: float,
    reduce: float,
    signal: float,
    chain: float,
    staging: int,
    jitter: float,
    pace: float,
    seed: int,
    ordered: bool,
) -> _Timeline:
    """Executes a schedule's tables on a model of the machine (csrc/lab/simulate.h): see lab.simulate.

    ValueError for tables that are no permutations, or a number out of range.
    """

def tile_shape(head_dim: int) -> tuple[int, int]:
    """(queries, keys) a tile. ValueError unless positive."""

def call_grid(
    seqlen_q: int, seqlen_k: int, heads_q: int, heads_k: int, head_dim: int, causal: bool
) -> TileGrid:
    """The tiles of one head in a backward call. ValueError for sizes that are no call's."""

def part_sizes(heads_q: int, heads_k: int, grid: TileGrid, head_dim: int, waits_in_line: bool) -> list[int]:
    """How many query heads each of the CTAs walks that share those of one KV head.

    `waits_in_line` is what the schedule's policy says. ValueError unless heads_k divides heads_q.
    """

def side_1_opens(cycle_ctas: int, ctas_on_0: int, ctas_on_1: int) -> bool:
    """Whether CTAs may begin with the chains of side 1, by how many there are on either side."""

def workspace_bytes(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    heads_q: int,
    heads_k: int,
    head_dim: int,
    causal: bool,
    schedule: str,
) -> int:
    """The size of a backward's workspace: the fp32 sum of dQ, and counters (csrc/core/workspace.h).

    ValueError unless head_dim is 64 or 128, heads_k divides heads_q and the schedule is one of the four.
    """

def load_kernels(path: str) -> None:
    """Opens libdash_kernels.so, for the whole process. RuntimeError where that fails."""

def kernels_loaded() -> bool:
    """Whether `load_kernels` has succeeded."""

def resident_ctas(device: int, sm_margin: int = 0, stream: int = 0) -> int:
    """How many CTAs a stream of a CUDA device runs at the same time, with `sm_margin` SMs left to others.

    Fewer than the device has SMs if the stream belongs to a green context, or under MPS or MIG. `stream` is
    the address of a CUDA stream; 0 is the default stream of the context that is current.

    RuntimeError with the reason where the device cannot run the kernels.
    """

def stuck_report() -> str | None:
    """Which wait ran into wait_limit_ns since the library was loaded, None if none did.

    It can be asked after the CUDA error that such a wait causes. RuntimeError if no library is loaded, or
    without a GPU.
    """

_Matrix: TypeAlias = tuple[int, int, int, int]

def backward(
    q: _Matrix,
    k: _Matrix,
    v: _Matrix,
    out: _Matrix,
    dout: _Matrix,
    dq: _Matrix,
    dk: _Matrix,
    dv: _Matrix,
    lse: int,
    dlse: int,
    workspace: int,
    shape: tuple[int, int, int, int, int, int],
    softmax_scale: float,
    causal: bool,
    element: str,
    schedule: str,
    ordered: bool,
    device: int,
    sm_margin: int,
    wait_limit_ns: int,
    stream: int,
    *,
    prepare: bool = True,
) -> None:
    """Launches the backward (csrc/core/backward.h), which writes dq, dk and dv.

    Args:
        q, k, v, out, dout, dq, dk, dv: (address, batch stride, row stride, head stride) of matrices
            (batch, row, head, head_dim); strides in elements, the last dimension contiguous.
        lse: address of the natural log-sum-exp, float32 (batch, heads_q, seqlen_q), contiguous.
        dlse: address of the gradient of lse, float32 and contiguous in its shape, or 0 for none. What it
            holds for a query that sees no key (lse = -inf) is ignored.
        workspace: address of `workspace_bytes` bytes, aligned to 256.
        shape: (batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim).
        element: "bf16" or "fp16".
        schedule: a name of `schedule.SCHEDULES`.
        ordered: whether dQ is summed in the schedule's order; if not, in the order of arrival.
        device, stream: the CUDA device's index and the address of one of its streams.
        sm_margin: SMs left to others.
        wait_limit_ns: a CTA that waits longer for its turn ends the kernel with an error, unless others still
            got ahead in the second half of the wait.
        prepare: False leaves out the first kernel, which computes the statistics that the second one uses
            up: for timing, since the gradients are wrong then.

    Raises:
        ValueError: an unknown element or schedule.
        RuntimeError: the kernel library is not loaded, or it refused the call, with its reason.
    """
