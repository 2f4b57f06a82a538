"""The schedule policies: valid for every shape, and without stalls where they promise it."""

import itertools
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dash_flash_attn import _native
from dash_flash_attn.ops import auto_schedule
from dash_flash_attn.schedule import SCHEDULES, Schedule, make_policy, schedule_name

LARGEST_GROUP = 64  # KV tiles that may rotate together: all of them must be resident
ROWS = [(4, 4), (2, 4), (4, 2)]  # (queries, keys) a tile: the kernels' ratios 1:1 and 1:2, and 2:1


class Shape(NamedTuple):
    seqlen_q: int
    seqlen_k: int
    q_rows: int
    kv_rows: int
    causal: bool
    paired: bool = False
    heads: int = 1

    @property
    def grid(self):
        return _native.TileGrid(*self)


def visible_pairs(shape):
    """(query tiles, q_rows, KV tiles, kv_rows): whether that query sees that key.

    Written from the positions of the elements, with nothing of the policies' arithmetic. Rows past the end
    see nothing and are seen by nobody.
    """
    q_tiles, kv_tiles = -(-shape.seqlen_q // shape.q_rows), -(-shape.seqlen_k // shape.kv_rows)
    query = np.arange(q_tiles * shape.q_rows)[:, None]
    key = np.arange(kv_tiles * shape.kv_rows)[None, :]
    visible = (query < shape.seqlen_q) & (key < shape.seqlen_k)
    if shape.causal:
        # The last query sees the last key.
        visible &= shape.seqlen_q - 1 - query <= shape.seqlen_k - 1 - key
    return visible.reshape(q_tiles, shape.q_rows, kv_tiles, shape.kv_rows)


def needed_pairs(shape):
    """(KV tiles, query tiles): whether some query of that tile sees some key of that one."""
    return visible_pairs(shape).any(axis=(1, 3)).T


def check_visits(visits, needed):
    """Each chain visits the query tiles that its KV tile needs, each once, and nothing else."""
    kv_tile, step = np.nonzero(visits >= 0)
    np.testing.assert_array_equal(step, np.concatenate([np.arange(n) for n in needed.sum(1)]))
    count = np.zeros(needed.shape, int)
    np.add.at(count, (kv_tile, visits[kv_tile, step]), 1)
    np.testing.assert_array_equal(count, needed)


def check_ranks(ranks, needed):
    """The ranks at each query tile are 0, 1, 2, ... of the KV tiles that it needs, each once."""
    np.testing.assert_array_equal(ranks >= 0, needed)
    kv_tile, q_tile = np.nonzero(needed)
    count = np.zeros(needed.shape, int)
    np.add.at(count, (ranks[kv_tile, q_tile], q_tile), 1)
    np.testing.assert_array_equal(count, np.arange(len(needed))[:, None] < needed.sum(0))


def check_chains(policy, heads):
    """Every chain of every head is claimed once, and cycles are contiguous, of one head, and resident."""
    kv_tiles = policy.grid.kv_tiles()
    chains = policy.chain_table(heads)
    assert chains.min() >= 0 and chains[:, 1].max() < kv_tiles
    np.testing.assert_array_equal(
        np.sort(chains[:, 0] * kv_tiles + chains[:, 1]), np.arange(heads * kv_tiles)
    )

    begin = 0
    while begin < len(chains):
        end = policy.cycle_end(begin, heads)
        assert begin < end <= len(chains)
        assert end - begin <= policy.resident_ctas_needed()
        assert {policy.cycle_end(claim, heads) for claim in range(begin, end)} == {end}
        assert len(set(chains[begin:end, 0])) == 1
        begin = end


def check_progress(policy, heads=3):
    """No deadlock with as few CTAs as the policy asks for, nor with more, nor on a whole H200."""
    needed = policy.resident_ctas_needed()
    assert 1 <= needed <= LARGEST_GROUP
    for ctas, claim_ahead in itertools.product((needed, needed + 3, 132), (False, True)):
        assert policy.completes(heads, ctas, claim_ahead), (policy.name, ctas, claim_ahead)
    # And on both sides of the L2 cache, whether there are enough CTAs on either of them or only on both.
    for ctas, others in ((1, needed), (max(1, needed // 2), needed - needed // 2), (66, 66)):
        assert policy.completes(4, ctas, others=others), (policy.name, ctas, others)
    if policy.grid.paired:
        return  # each head has its own K and V
    # Chains of GQA, whole and cut into parts that add their dK and dV in turn.
    for ctas, parts in itertools.product((needed, 132), ([3], [2, 2], [1, 2])):
        assert policy.completes(2 * len(parts), ctas, True, parts), (policy.name, ctas, parts)


def check_all(shape, needed, name):
    policy = make_policy(name, shape.grid)
    assert policy.ways in (1, 2) and (policy.ways == 1 or shape.paired)
    for way in range(policy.ways):
        check_visits(policy.visit_table(way), needed)
        check_ranks(policy.rank_table(way), needed)
    check_progress(policy, 4 if shape.paired else 3)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("ragged", [False, True], ids=["whole", "ragged"])
@pytest.mark.parametrize(("q_rows", "kv_rows"), ROWS)
def test_every_grid_up_to_40_by_40_tiles(q_rows, kv_rows, ragged, causal):
    for q_tiles, kv_tiles in itertools.product(range(1, 41), repeat=2):
        # Ragged: one query in the last tile, and all keys but one.
        seqlen_q = q_tiles * q_rows - (q_rows - 1 if ragged else 0)
        shape = Shape(seqlen_q, kv_tiles * kv_rows - ragged, q_rows, kv_rows, causal)
        needed = needed_pairs(shape)
        for name in SCHEDULES:
            check_all(shape, needed, name)
        if causal and shape.seqlen_q == shape.seqlen_k:
            check_all(shape._replace(paired=True), needed, "shift")
        if not causal and kv_tiles > 16:
            check_all(shape._replace(heads=8), needed, "shift")


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_chains_of_up_to_140_kv_tiles(name, causal):
    for kv_tiles, heads in itertools.product(range(1, 141), range(1, 6)):
        check_chains(make_policy(name, _native.TileGrid(512, kv_tiles * 4, 4, 4, causal)), heads)
        square = _native.TileGrid(kv_tiles * 4, kv_tiles * 4, 4, 4, causal, paired=True, heads=8)
        check_chains(make_policy(name, square), heads)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("tiles", [(1, 1), (4, 2), (3, 5), (16, 8), (33, 33), (4, 65), (9, 130)])
def test_many_heads(tiles, name, causal):
    # Enough to fill several blocks of the heads that are issued together, and to leave the last one ragged.
    policy = make_policy(name, _native.TileGrid(tiles[0] * 4, tiles[1] * 4, 4, 4, causal))
    for heads in (17, 64, 130, 257):
        check_chains(policy, heads)
        check_progress(policy, heads)
    policy = make_policy(
        name, _native.TileGrid(tiles[1] * 4, tiles[1] * 4, 4, 4, causal, paired=True, heads=8)
    )
    for heads in (18, 64, 130, 258):
        check_chains(policy, heads)
        check_progress(policy, heads)


@st.composite
def shapes(draw):
    q_rows, kv_rows = draw(st.sampled_from(ROWS))
    seqlen_q = draw(st.integers(1, 150 * q_rows))
    seqlen_k = draw(st.one_of(st.integers(1, 300 * kv_rows), st.just(seqlen_q)))
    heads = draw(st.sampled_from((1, 4, 16)))
    return Shape(seqlen_q, seqlen_k, q_rows, kv_rows, draw(st.booleans()), draw(st.booleans()), heads)


@settings(max_examples=150, deadline=None)
@given(shapes(), st.integers(1, 5))
@example(Shape(64 * 4, 64 * 4, 4, 4, True), 2)
@example(Shape(65 * 4, 65 * 4, 4, 4, False), 2)  # two groups, the second one shorter
@example(Shape(256 * 2, 128 * 4, 2, 4, False), 3)  # 16,384 tokens at head dimension 128
@example(Shape(129 * 4, 129 * 4, 4, 4, True), 2)
@example(Shape(129 * 4, 129 * 4, 4, 4, True, paired=True), 2)
@example(Shape(3, 259 * 4, 4, 4, False), 3)  # one query tile, five groups
@example(Shape(150 * 4, 7, 4, 4, True), 1)  # most queries see no key
def test_larger_grids(shape, heads):
    needed = needed_pairs(shape)
    for name in SCHEDULES:
        check_all(shape, needed, name)
        check_chains(make_policy(name, shape.grid), heads)


@settings(deadline=None)
@given(shapes(), st.data())
def test_tile_grid_matches_the_mask(shape, data):
    grid, visible = shape.grid, visible_pairs(shape)
    needed = needed_pairs(shape)
    q_tile = data.draw(st.integers(0, grid.q_tiles() - 1))
    kv_tile = data.draw(st.integers(0, grid.kv_tiles() - 1))
    assert needed.shape == (grid.kv_tiles(), grid.q_tiles())
    assert list(np.nonzero(needed[:, q_tile])[0]) == list(range(grid.contributors(q_tile)))
    assert list(np.nonzero(needed[kv_tile])[0]) == list(range(grid.first_query(kv_tile), grid.q_tiles()))
    queries = min(shape.q_rows, shape.seqlen_q - q_tile * shape.q_rows)
    assert grid.needs_mask(kv_tile, q_tile) == (not visible[q_tile, :queries, kv_tile].all())


# The closed forms of the paper, for as many query tiles as KV tiles.


def square(name, n, causal, q_rows=4, kv_rows=4):
    return make_policy(name, _native.TileGrid(n * 4, n * 4, q_rows, kv_rows, causal))


def chain_visits(policy, way=0):
    return [[q for q in row if q >= 0] for row in policy.visit_table(way).tolist()]


@pytest.mark.parametrize("n", range(1, LARGEST_GROUP + 1))
def test_naive_and_descending_as_in_the_paper(n):
    assert chain_visits(square("naive", n, causal=False)) == [list(range(n))] * n
    assert chain_visits(square("naive", n, causal=True)) == [list(range(i, n)) for i in range(n)]
    expected = [list(range(n - 1, i - 1, -1)) for i in range(n)]
    assert chain_visits(square("descending", n, causal=True)) == expected
    for name in ("naive", "descending"):
        ranks = square(name, n, causal=True).rank_table()
        assert all(ranks[i, j] == i for j in range(n) for i in range(j + 1))


@pytest.mark.parametrize("n", range(1, LARGEST_GROUP + 1))
@pytest.mark.parametrize("name", ["shift", "symmetric_shift"])  # the same without a mask
def test_shift_as_in_the_paper(name, n):
    policy = square(name, n, causal=False)
    assert chain_visits(policy) == [[*range(i, n), *range(i)] for i in range(n)]
    np.testing.assert_array_equal(policy.rank_table(), [[(j - i) % n for j in range(n)] for i in range(n)])


@pytest.mark.parametrize("n", range(2, LARGEST_GROUP + 1, 2))
def test_symmetric_shift_as_in_the_paper(n):
    policy = square("symmetric_shift", n, causal=True)
    h = n // 2
    visits = chain_visits(policy)
    ranks = policy.rank_table()
    for i in range(h):
        rectangle = [h + (i + step) % h for step in range(h)]
        assert visits[i] == [*rectangle, *range(i, h)]
        assert visits[n - 1 - i] == list(range(n - 1, n - 2 - i, -1))
        assert len(visits[i]) + len(visits[n - 1 - i]) == n + 1
        assert policy.slot(i) == policy.slot(n - 1 - i) == i
    for j in range(n):
        for k in range(j + 1):
            expected = j - k if j < h else (j - h - k) % h if k < h else k
            assert ranks[k, j] == expected


# Free of stalls: if all CTAs walk in step, no two are ever at one query tile, and each query tile is reached
# in the order of the ranks.


def check_stall_free(policy, sequences, way=0):
    """`sequences`: for each CTA its (KV tile, query tile) pairs, one a step of time, or None."""
    arrivals = {}
    for pairs in itertools.zip_longest(*sequences):
        q_tiles = [pair[1] for pair in pairs if pair is not None]
        assert len(set(q_tiles)) == len(q_tiles)
        for pair in filter(None, pairs):
            arrivals.setdefault(pair[1], []).append(pair[0])
    for q_tile, kv_tiles in arrivals.items():
        ranks = [policy.rank(kv_tile, q_tile, way) for kv_tile in kv_tiles]
        assert ranks == sorted(ranks)


def cycles(policy):
    """The KV tiles of each cycle, in the sequence of their issue."""
    chains = policy.chain_table(1)[:, 1].tolist()
    begin = 0
    while begin < len(chains):
        end = policy.cycle_end(begin, 1)
        yield chains[begin:end]
        begin = end


@pytest.mark.parametrize("heads", [1, 16])
@pytest.mark.parametrize("kv_tiles", [*range(1, 41), 64, 65, 128, 130])
def test_groups_never_wait_without_a_mask(kv_tiles, heads):
    for q_tiles in {kv_tiles, kv_tiles + 1, 2 * kv_tiles - 1, 2 * kv_tiles, 3 * kv_tiles}:
        policy = make_policy("shift", _native.TileGrid(q_tiles * 4, kv_tiles * 4, 4, 4, False, heads=heads))
        visits = chain_visits(policy)
        rotating = kv_tiles - policy.in_line
        for place, kv_tile in enumerate(range(rotating, kv_tiles)):
            assert visits[kv_tile] == list(range(q_tiles))[::-1]
            assert set(policy.rank_table()[kv_tile].tolist()) == {place}
        for members in cycles(policy):
            assert [policy.slot(kv_tile) for kv_tile in members] == list(range(len(members)))
            check_stall_free(policy, [[(kv, q) for q in visits[kv]] for kv in members])


@pytest.mark.parametrize("kv_tiles", range(2, LARGEST_GROUP + 1, 2))
@pytest.mark.parametrize(("q_rows", "kv_rows"), [(4, 4), (2, 4)])
def test_symmetric_shift_never_waits_under_a_causal_mask(kv_tiles, q_rows, kv_rows):
    seqlen = kv_tiles * kv_rows
    policy = make_policy("symmetric_shift", _native.TileGrid(seqlen, seqlen, q_rows, kv_rows, True))
    ctas = [[] for _ in range(policy.resident_ctas_needed())]
    for kv_tile in policy.chain_table(1)[:, 1].tolist():
        steps = range(policy.visits(kv_tile))
        ctas[policy.slot(kv_tile)] += [(kv_tile, policy.visit(kv_tile, step)) for step in steps]
    check_stall_free(policy, ctas)


@pytest.mark.parametrize("kv_tiles", [*range(1, 41), 64, 65, 128, 130])
@pytest.mark.parametrize(("q_rows", "kv_rows"), [(4, 4), (2, 4)])
def test_shift_climbs_under_a_causal_mask_on_a_square(kv_tiles, q_rows, kv_rows):
    seqlen = kv_tiles * kv_rows - 1
    policy = make_policy("shift", _native.TileGrid(seqlen, seqlen, q_rows, kv_rows, True))
    visits = chain_visits(policy)
    for kv_tile, visited in enumerate(visits):
        assert list(visited) == list(range(policy.grid.first_query(kv_tile), policy.grid.q_tiles()))
    # Whoever comes before a chain in a query tile's sum was issued before it, in any number of heads.
    assert policy.resident_ctas_needed() == 1
    for heads in (1, 2, 7):
        issued = {tuple(chain): claim for claim, chain in enumerate(policy.chain_table(heads).tolist())}
        for q_tile in range(policy.grid.q_tiles()):
            order = sorted(range(policy.grid.contributors(q_tile)), key=lambda kv: policy.rank(kv, q_tile))
            for head in range(heads):
                claims = [issued[head, kv] for kv in order]
                assert claims == sorted(claims)


@pytest.mark.parametrize("kv_tiles", [2, 3, 8, 33, 64, 128, 200])
def test_a_band_that_climbs_has_a_query_tile_for_everybody(kv_tiles):
    """Chains of a band that start together are never at one query tile, and the first ones are ahead.

    Nor are they in the heads of a group, each walked back from where the last one ended.
    """
    policy = make_policy("shift", _native.TileGrid(kv_tiles * 4, kv_tiles * 4, 4, 4, True))
    chains = policy.chain_table(1)[:, 1].tolist()
    ends = [i + 1 for i, kv in enumerate(chains) if i + 1 == len(chains) or chains[i + 1] > kv]
    left = kv_tiles
    for begin, end in itertools.pairwise([0, *ends]):  # half of what is left, rounded up
        assert end - begin == min(LARGEST_GROUP, (left + 1) // 2)
        left -= end - begin
    assert left == 0
    visits = chain_visits(policy)
    for begin, end in itertools.pairwise([0, *ends]):
        check_stall_free(policy, [[(kv, q) for q in visits[kv]] for kv in chains[begin:end]])
        walks = {kv: policy.walk(kv, 3).tolist() for kv in chains[begin:end]}
        for kv, walk in walks.items():
            assert walk == [[head, q] for head in range(3) for q in visits[kv][:: -1 if head == 1 else 1]]
        for head in range(3):
            in_head = [[(kv, q) if h == head else None for h, q in walk] for kv, walk in walks.items()]
            check_stall_free(policy, in_head)


@pytest.mark.parametrize("kv_tiles", [*range(2, 41), 64, 65, 128, 130, 300])
@pytest.mark.parametrize(("q_rows", "kv_rows"), [(4, 4), (2, 4)])
def test_heads_of_a_pair_go_opposite_ways_and_never_wait(kv_tiles, q_rows, kv_rows):
    """A CTA takes one chain of each head, one after the other: all end together, and nobody ever waits."""
    seqlen = kv_tiles * kv_rows - 1
    policy = make_policy("shift", _native.TileGrid(seqlen, seqlen, q_rows, kv_rows, True, paired=True))
    if q_rows < kv_rows and kv_tiles > 8:  # bands, as where heads are no pairs
        assert policy.ways == 1
        return
    assert (policy.ways, policy.resident_ctas_needed()) == (2, 1)
    climbing, descending = chain_visits(policy, 0), chain_visits(policy, 1)
    for kv_tile in range(kv_tiles):
        up = list(range(policy.grid.first_query(kv_tile), policy.grid.q_tiles()))
        assert climbing[kv_tile] == up and descending[kv_tile] == up[::-1]
    chains = policy.chain_table(2)
    up, down = (chains[chains[:, 0] == head, 1].tolist() for head in range(2))
    assert up == down[::-1] == list(range(kv_tiles))[::-1]
    pairs = list(zip(up, down, strict=True))
    assert len({len(climbing[first]) + len(descending[then]) for first, then in pairs}) == 1
    check_stall_free(policy, [[(kv, q) for q in climbing[kv]] for kv, _ in pairs], way=0)
    late = [[None] * len(climbing[kv]) + [(then, q) for q in descending[then]] for kv, then in pairs]
    check_stall_free(policy, late, way=1)
    # Whoever comes before a chain in a query tile's sum was issued before it, in any number of heads.
    for heads in (2, 6):
        issued = {tuple(chain): claim for claim, chain in enumerate(policy.chain_table(heads).tolist())}
        for q_tile, head in itertools.product(range(policy.grid.q_tiles()), range(heads)):
            contributors = range(policy.grid.contributors(q_tile))
            order = sorted(contributors, key=lambda kv: policy.rank(kv, q_tile, head % 2))
            claims = [issued[head, kv] for kv in order]
            assert claims == sorted(claims)


@pytest.mark.parametrize("sides", [1, 2])
def test_pairs_fill_the_sms_once_or_twice(sides):
    def chains_of(tokens, head_dim, heads):
        grid = Schedule("shift", tokens, tokens, head_dim, True, paired_heads=True).grid
        return make_policy("shift", grid.on_sides(sides)).chain_table(heads)

    # 1,024 tokens at head dimension 64, 8 KV tiles: 32 heads of either way fill two chips, 16 two sides.
    n = 32 // sides
    chains = chains_of(1024, 64, 4 * n).tolist()
    assert chains[:n] == [[head, 7] for head in range(0, 2 * n, 2)]
    assert chains[n * 7 : n * 8] == [[head, 0] for head in range(0, 2 * n, 2)]
    assert chains[n * 8 : n * 9] == [[head, 0] for head in range(1, 2 * n, 2)]
    assert {head for head, _ in chains[2 * n * 8 :]} == set(range(2 * n, 4 * n))
    # At head dimension 128, where neighbours are two query tiles apart by the mask, one. No small block.
    for heads, climbing in ((64, 16), (32, 16), (80, 20), (24, 12)):
        chains = chains_of(1024, 128, heads // sides)
        climbing //= sides
        assert set(chains[: climbing * 8, 0]) == set(range(0, 2 * climbing, 2))
    # 192 KV tiles fill two chips well enough, 170 do not; of a side 96 and 85.
    for kv_tiles, heads in ((192, 1), (170, 2)):
        chains = chains_of(kv_tiles // sides * 128, 64, 16)
        assert len(set(chains[: 100 // sides, 0])) == heads


@pytest.mark.parametrize(
    ("heads_q", "heads_k", "pairs"), [(4, 4, True), (3, 3, False), (4, 2, False), (2, 2, True)]
)
def test_heads_that_come_in_pairs(heads_q, heads_k, pairs):
    assert _native.heads_in_pairs(heads_q, heads_k) == pairs
    grid = _native.call_grid(300, 200, heads_q, heads_k, 128, True)
    assert (grid.seqlen_q, grid.seqlen_k, grid.q_rows, grid.kv_rows) == (300, 200, 64, 128)
    assert grid.causal and grid.paired == pairs


@pytest.mark.parametrize("stride", [1, 2, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("kv_tiles", [5, 64])
def test_neighbours_of_a_rotation_keep_a_distance_that_the_cache_can_hold(kv_tiles, stride):
    policy = make_policy("shift", _native.TileGrid(kv_tiles * stride * 4, kv_tiles * 4, 4, 4, False))
    starts = [policy.visit(kv_tile, 0) for kv_tile in range(kv_tiles)]
    assert set(np.diff(starts)) == {max(apart for apart in (1, 2, 4) if apart <= stride)}


# The checks themselves can fail.


@pytest.mark.parametrize("n", [2, 3, 8, 64, 100])
def test_a_cycle_without_room_deadlocks(n):
    policy = square("shift", n, causal=False)
    needed = policy.resident_ctas_needed()
    assert policy.completes(2, needed, claim_ahead=False)
    assert not policy.completes(2, needed - 1, claim_ahead=False)
    for parts in ([3], [1, 1], [2, 2], [1, 2]):
        assert policy.completes(2, needed, False, parts)
        assert not policy.completes(2, needed - 1, False, parts)
    # Two sides of the L2 cache are open where each has as many; or each would wait for the other one's.
    for ahead in (False, True):
        assert policy.completes(4, needed, ahead, others=needed)
        assert policy.completes(4, needed - 1, ahead, others=needed - 1)
        assert not policy.completes(4, needed - 1, ahead, others=needed - 1, open=True)
    with pytest.raises(ValueError, match="3 do not fall into halves"):
        policy.completes(3, needed, others=1)
    with pytest.raises(ValueError, match="others: -1 is negative"):
        policy.completes(2, needed, others=-1)
    with pytest.raises(ValueError, match="3 are not whole parts of 2"):
        policy.completes(3, needed, parts=[1, 1])
    for wrong in ([], [1, 0]):
        with pytest.raises(ValueError, match="not positive"):
            policy.completes(2, needed, parts=wrong)


def test_a_wrong_table_is_found():
    shape = Shape(16, 16, 4, 4, True)
    needed = needed_pairs(shape)
    policy = make_policy("symmetric_shift", shape.grid)
    for check, table in ((check_visits, policy.visit_table()), (check_ranks, policy.rank_table())):
        check(table, needed)
        twice = table.copy()
        twice[0, 1] = twice[0, 2]
        missing = table.copy()
        missing[0, -1] = -1
        for wrong in (twice, missing):
            with pytest.raises(AssertionError):
                check(wrong, needed)
    with pytest.raises(AssertionError):
        # FlashAttention-3's order: all chains at one query tile.
        naive = square("naive", 4, causal=False)
        check_stall_free(naive, [[(kv, q) for q in range(4)] for kv in range(4)])


# The Python side.


@pytest.mark.parametrize("spelling", ["symmetric_shift", "symmetric-shift", "Symmetric-SHIFT"])
def test_names_in_any_spelling(spelling):
    assert schedule_name(spelling) == "symmetric_shift"


@pytest.mark.parametrize("wrong", ["", "auto", "symmetricshift", "fifo"])
def test_unknown_names_are_refused(wrong):
    with pytest.raises(ValueError, match="naive, descending, shift, symmetric_shift"):
        schedule_name(wrong)


def test_schedule_shows_the_policy_as_lists():
    # 64 x 128 tiles: four query tiles, two KV tiles.
    schedule = Schedule("Shift", 256, 256, head_dim=128)
    assert schedule.name == "shift"
    assert (schedule.grid.q_tiles(), schedule.grid.kv_tiles()) == (4, 2)
    assert [schedule.visits(kv) for kv in range(2)] == [[0, 1, 2, 3], [2, 3, 0, 1]]
    assert [schedule.order(q) for q in range(4)] == [[0, 1], [0, 1], [1, 0], [1, 0]]
    assert schedule.chains(heads=2) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert schedule.resident_ctas_needed == 2


def test_sizes_and_tiles_are_checked():
    for sizes in ((0, 8, 4, 4), (8, -1, 4, 4), (8, 8, 0, 4), (8, 8, 4, 0)):
        with pytest.raises(ValueError, match="not positive"):
            _native.TileGrid(*sizes, False)
    for sizes in ((0, 8, 2, 2, 64), (8, 0, 2, 2, 64), (8, 8, 2, 2, 0)):
        with pytest.raises(ValueError, match="not all positive"):
            _native.call_grid(*sizes, False)
    with pytest.raises(ValueError, match="can't share"):
        _native.call_grid(8, 8, 3, 2, 64, False)
    policy = square("shift", 4, causal=True)
    for call in (
        lambda: policy.visits(4),
        lambda: policy.visit(3, 1),  # KV tile 3 sees one query tile
        lambda: policy.rank(1, 0),  # query tile 0 does not see KV tile 1
        lambda: policy.slot(-1),
        lambda: policy.chain(8, 2),
        lambda: policy.grid.contributors(4),
    ):
        with pytest.raises(IndexError):
            call()


# Parts of a group of query heads.


def parts_of(heads_q, heads_k, seqlen, head_dim, causal=True, schedule="shift"):
    policy = Schedule(schedule, seqlen, seqlen, head_dim, causal).policy
    return _native.part_sizes(heads_q, heads_k, policy.grid, head_dim, policy.waits_in_line)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_parts_are_whole_and_not_too_short(head_dim, causal):
    for (heads_k, group), seqlen in itertools.product(
        itertools.product((1, 2, 8), (1, 2, 6, 7, 8, 32)), (1, 100, 512, 1000, 2048, 4096, 16384)
    ):
        parts = parts_of(heads_k * group, heads_k, seqlen, head_dim, causal)
        q_tiles = Schedule("naive", seqlen, seqlen, head_dim, causal).grid.q_tiles()
        assert sum(parts) == group
        # All alike, but the first one has what is left over.
        assert len(set(parts[1:])) <= 1 and 0 < parts[0] <= parts[-1]
        assert len(parts) == 1 or parts[-1] * q_tiles >= 32


def test_groups_are_cut_where_it_was_measured_to_pay():
    """docs/schedules.md, "The heads of a group"."""
    by_length = {1024: [2] * 2, 2048: [2] * 2, 4096: [2] * 2, 8192: [2] * 2, 16384: [2] * 2}
    assert {n: parts_of(32, 8, n, 128) for n in by_length} == by_length
    assert [parts_of(64, 8, n, 128) for n in (2048, 4096)] == [[4] * 2, [2] * 4]
    assert [parts_of(28, 4, n, 128) for n in (2048, 4096, 16384)] == [[1, 2, 2, 2]] * 3
    assert [parts_of(24, 8, n, 128) for n in (2048, 4096, 16384)] == [[1, 2], [3], [3]]
    assert [parts_of(32, 8, n, 64) for n in (1024, 4096, 8192, 16384)] == [[4], [4], [4], [2] * 2]
    # Without a mask only for a chip that would be idle otherwise; without a group never.
    assert [parts_of(32, 8, n, 128, False) for n in (2048, 16384)] == [[4]] * 2
    assert [parts_of(32, heads_k, 2048, 128, False) for heads_k in (4, 1)] == [[4] * 2, [4] * 8]
    assert parts_of(32, 32, 16384, 128) == [1]
    # Or where an entry alone would be a few waves of equal chains, and the last of them nearly empty: 8 x 34
    # chains are 2.06 of 132. 8 x 33 are two.
    assert [parts_of(32, 8, 128 * n, 128, False) for n in (33, 34)] == [[4], [1] * 4]
    assert [parts_of(16, 1, n, 128, False) for n in (8192, 12000)] == [[8] * 2, [4] * 4]
    # Under a causal mask where all chains of whole groups are fewer than a chip has SMs.
    assert [parts_of(12, 2, n, 128) for n in (7000, 9000)] == [[1] * 6, [2] * 3]
    # For a chip that would be idle otherwise: any schedule. For the L2 cache: not where chains wait in line.
    for name in SCHEDULES:
        assert parts_of(16, 2, 2048, 128, schedule=name) == [1] * 8
        whole = name in ("naive", "descending")
        assert parts_of(32, 8, 16384, 128, schedule=name) == ([4] if whole else [2, 2])


@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "in_line", "group_size"),
    [
        ((1792, 1792), (16, 16), 128, 0, 14),  # 14 KV tiles: one group
        ((4096, 4096), (16, 16), 128, 0, 32),
        ((8192, 8192), (32, 8), 128, 0, 64),
        ((12288, 12288), (16, 16), 128, 0, 32),
        ((2200, 2200), (16, 16), 128, 7, 11),
        ((4250, 4250), (16, 16), 128, 12, 22),
        ((4250, 4250), (24, 24), 64, 12, 22),
        ((5120, 5120), (28, 4), 128, 7, 33),
        ((8500, 8500), (32, 32), 64, 34, 33),
        ((1500, 5000), (16, 16), 128, 8, 16),  # 24 query tiles: no longer line, but two groups
        ((600, 7000), (16, 16), 64, 0, 5),  # five query tiles: no room for more
        ((4250, 4250), (2, 2), 128, 0, 34),  # 68 chains
        ((4250, 4250), (16, 1), 128, 12, 22),  # 34, but each of 16 parts
    ],
)
def test_what_rotates_without_a_mask(tokens, heads, head_dim, in_line, group_size):
    """docs/schedules.md, "shift", has the times that the sizes are from."""
    grid = _native.call_grid(*tokens, *heads, head_dim, False)
    for name in ("shift", "symmetric_shift"):
        policy = make_policy(name, grid)
        assert (policy.in_line, policy.group_size) == (in_line, group_size)
        assert policy.resident_ctas_needed() == group_size
    assert auto_schedule(*tokens, *heads, head_dim, False) == "shift"


@pytest.mark.parametrize("ctas", [16, 39, 57, 66, 78, 114, 132])
@pytest.mark.parametrize("heads", [1, 2, 5, 17, 64])
@pytest.mark.parametrize(
    "tokens",
    [(n, n) for n in (2200, 4096, 4250, 8500, 9000, 12288, 16384)]
    + [(1500, 5000), (1100, 9000), (2000, 20000)],  # several groups behind a line
)
def test_gangs_are_whole_and_come_behind_the_line(tokens, heads, ctas):
    grid = _native.call_grid(*tokens, 64, 64, 128, False).on_sides(1, ctas)
    policy = make_policy("shift", grid)
    check_chains(policy, heads)
    if policy.resident_ctas_needed() <= ctas and heads < 64:
        for ahead in (False, True):
            assert policy.completes(heads, ctas, ahead)
            assert policy.completes(heads, policy.resident_ctas_needed(), ahead)
    order = policy.chain_table(heads)
    claim = {tuple(chain): i for i, chain in enumerate(order.tolist())}
    kv_tiles, size = grid.kv_tiles(), policy.group_size
    rotating = kv_tiles - policy.in_line
    for head in range(heads):
        line = [claim[head, kv] for kv in range(rotating, kv_tiles)]
        assert line == sorted(line)
        first = [claim[head, kv] for kv in range(0, rotating, size)]
        assert first == sorted(first) and (not line or line[-1] < first[0])
    # Behind what is ahead, waves of whole groups with chains in line on the CTAs that they leave over.
    groups = max(1, min(ctas // size, heads))
    rotates = order[:, 1] < rotating
    ahead = int(rotates.argmax())
    spare = max(0, ctas - groups * size)
    rest = (heads * policy.in_line - ahead) // spare if spare else 0
    wave = [True] * (groups * size) + [False] * spare
    assert rotates[ahead : ahead + rest * len(wave)].tolist() == wave * rest
    assert rotates[ahead + rest * len(wave) :].all()


def test_where_groups_leave_ctas_over():
    many = make_policy(
        "shift", _native.call_grid(4250, 4250, 16, 16, 128, False)
    )  # 12 in line, a group of 22
    assert [many.idle_ctas(ctas) for ctas in (21, 22, 66, 57, 39, 78)] == [0, 0, 0, 0, 4, 0]
    even = make_policy("shift", _native.call_grid(8192, 8192, 16, 16, 128, False))
    assert [even.idle_ctas(ctas) for ctas in (66, 132, 114)] == [2, 4, 50]
    # H100 PCIe: a side has 57 SMs, of which one group of 33 leaves 24, and the line of 7 in 40 fills 9.
    some = make_policy("shift", _native.call_grid(5120, 5120, 16, 16, 128, False))
    assert [some.idle_ctas(ctas) for ctas in (57, 114)] == [15, 0]
    assert [some.l2_sides(3, 16, 1, sms) for sms in (132, 114)] == [2, 1]
