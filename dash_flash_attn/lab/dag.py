"""The DAG behind a schedule, for proofs: DASH's Lemma 1, and the best schedule of a small case by search."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations_with_replacement, permutations, product

Edge = tuple[int, int]
Task = tuple[int, int]  # (KV tile, query tile)


class Cycle(ValueError):
    """The edges go round in a circle: no order of execution obeys them."""


def depths(weights: Sequence[float], edges: Iterable[Edge]) -> list[float]:
    """For each node the longest way to it, over the weights of the nodes before it.

    `weights` belong to nodes 0, 1, 2, ... An edge (u, v) says that v starts when u is done. Raises Cycle.
    """
    after: list[list[int]] = [[] for _ in weights]
    missing = [0] * len(weights)
    for u, v in edges:
        after[u].append(v)
        missing[v] += 1
    depth = [0.0] * len(weights)
    ready = [node for node, count in enumerate(missing) if count == 0]
    for node in ready:  # grows while it runs
        for v in after[node]:
            depth[v] = max(depth[v], depth[node] + weights[node])
            missing[v] -= 1
            if missing[v] == 0:
                ready.append(v)
    if len(ready) < len(weights):
        raise Cycle(f"{len(weights) - len(ready)} nodes are on a circle, or behind one")
    return depth


def critical_path(weights: Sequence[float], edges: Iterable[Edge]) -> float:
    """The longest way through the DAG: its time with an SM for every chain. Raises Cycle."""
    depth = depths(weights, edges)
    return max((d + w for d, w in zip(depth, weights, strict=True)), default=0.0)


def schedule_time(
    visits: Sequence[Sequence[int]], orders: Mapping[int, Sequence[int]], compute: float, reduce: float
) -> float:
    """The time of one head's schedule by DASH's DAG, with an SM for every KV tile. Raises Cycle.

    Args:
        visits: for each KV tile its query tiles, in sequence.
        orders: for each query tile its KV tiles, in the order of the sum. Query tiles may be left out: what
            is left in is then a lower bound.
        compute, reduce: the two phases of a task.
    """
    weights: list[float] = []
    edges: list[Edge] = []
    reduction: dict[Task, int] = {}
    for kv_tile, q_tiles in enumerate(visits):
        for step, q_tile in enumerate(q_tiles):
            first = len(weights)
            weights += (compute, reduce)
            reduction[kv_tile, q_tile] = first + 1
            edges.append((first, first + 1))
            if step:
                edges.append((first - 1, first))
    for q_tile, kv_tiles in orders.items():
        edges += (
            (reduction[before, q_tile], reduction[after, q_tile])
            for before, after in zip(kv_tiles, kv_tiles[1:], strict=False)
        )
    return critical_path(weights, edges)


def shortest(
    needed: Sequence[Sequence[int]], compute: float, reduce: float, known: float = float("inf")
) -> tuple[float, int]:
    """The best time over all visit orders and all rank orders of one head, with an SM for every KV tile.

    Args:
        needed: for each KV tile the query tiles that it sees.
        compute, reduce: the two phases of a task.
        known: the time of a schedule at hand. The search is faster with it, and finds the same.

    Returns the time, and how many schedules reach it, counted up to exchanging KV tiles that see the same.

    The search goes through every visit order and sets one query tile's order after the other. It leaves out
    only what is longer already than the best so far, since more edges never shorten a path.
    """
    everyone = {q: [kv for kv, seen in enumerate(needed) if q in seen] for q in sorted({*sum(needed, [])})}
    best, count = known, 0

    def search(visits: Sequence[Sequence[int]], orders: dict[int, Sequence[int]]) -> None:
        nonlocal best, count
        try:
            time = schedule_time(visits, orders, compute, reduce)
        except Cycle:
            return
        if time > best:
            return
        open_tiles = [q for q in everyone if q not in orders]
        if not open_tiles:
            best, count = time, 1 if time < best else count + 1
            return
        for order in permutations(everyone[open_tiles[0]]):
            search(visits, {**orders, open_tiles[0]: order})

    for visits in _visit_orders(needed):
        search(visits, {})
    return best, count


def _visit_orders(needed: Sequence[Sequence[int]]) -> Iterable[list[Sequence[int]]]:
    # KV tiles that see the same are alike: of the ways to hand orders out among them, one is enough.
    alike: dict[tuple[int, ...], list[int]] = {}
    for kv_tile, q_tiles in enumerate(needed):
        alike.setdefault(tuple(q_tiles), []).append(kv_tile)
    choices = (
        combinations_with_replacement(list(permutations(q_tiles)), len(kv_tiles))
        for q_tiles, kv_tiles in alike.items()
    )
    for choice in product(*choices):
        visits: list[Sequence[int]] = [()] * len(needed)
        for kv_tiles, orders in zip(alike.values(), choice, strict=True):
            for kv_tile, order in zip(kv_tiles, orders, strict=True):
                visits[kv_tile] = order
        yield visits
