"""The emulated link against the α-β formulas: messages, shm's collectives, those of md.collectives.
Lesson: collectives.

"Times faster" is formula / measured here: 1 is exact, 0.95 is 5 % too slow. gloo has no emulated
link, so both kinds of collectives run on shm.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

import minidist as md
from minidist.collectives import cost
from minidist.instruments.bench import Row, draw, show
from minidist.instruments.link import Link
from minidist.machine.runtime import Pool

LINK = Link(gbps=0.04, latency_us=10_000)
ALPHA, BETA = 1e-6 * LINK.latency_us, 8 / (LINK.gbps * 1e9)
BETWEEN = Link(gbps=40, inter=LINK)  # within a node no time passes
N = 120_000  # float32, of which 2, 3 and 4 ranks have equal blocks: 96 ms on the line
VECTOR = 4 * N * BETA  # seconds of the whole vector on the line

Call = Callable[[torch.Tensor], object]


class Case(NamedTuple):
    """What is timed on how many ranks and nodes; and how many seconds it should take."""

    what: str
    ranks: int
    nodes: int
    call: Call
    formula: float


def cases() -> list[Case]:
    """The table."""
    return [*messages(), *on_one_node(), *on_two_nodes()]


def messages() -> list[Case]:
    """(sender, receiver) of all that are sent at once."""
    at_once: list[tuple[str, int, list[tuple[int, int]], float]] = [
        ("a message", 1, [(0, 1)], 1),
        ("five at once", 1, [(0, 1)] * 5, 5),
        ("both ways", 1, [(0, 1), (1, 0)], 1),
        ("from one to two of a node", 1, [(0, 1), (0, 2)], 1),
        ("from two of a node to another node", 2, [(0, 2), (1, 3)], 2),
        ("between two nodes, both ways", 2, [(0, 2), (3, 1)], 1),
        ("from two nodes to a third", 4, [(1, 0), (2, 0)], 2),
    ]
    return [
        Case(what, 4, nodes, partial(send, pairs=pairs), ALPHA + vectors * VECTOR)
        for what, nodes, pairs, vectors in at_once
    ]


def send(x: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
    """Send x from and to whom these pairs say, at once."""
    rank, works = dist.get_rank(), []
    for sender, receiver in pairs:
        works += [dist.isend(x, receiver)] if rank == sender else []
        works += [dist.irecv(x.clone(), sender)] if rank == receiver else []
    for work in works:
        if work is not None:
            work.wait()


def on_one_node() -> list[Case]:
    """Collectives of shm, and those that are made of messages."""
    found = []
    for p in 2, 3, 4:
        depth = p.bit_length() - 1  # latencies of a tree, of which a full one has as many rounds
        ring = cost("all_reduce", "ring", p, 4 * N).seconds(ALPHA, BETA)
        found += [
            Case("shm: all_reduce, ring", p, 1, dist.all_reduce, ring),
            Case("shm: all_gather, ring", p, 1, all_gather, ring / 2),
            Case("shm: broadcast, tree", p, 1, broadcast, depth * (ALPHA + VECTOR)),
        ]
        # A rank of the tree sends to its children one after the other; they send at once.
        tree = 2 * depth * ALPHA + (depth + (p - 1).bit_length()) * VECTOR
        halving = cost("all_reduce", "halving_doubling", p, 4 * N).seconds(ALPHA, BETA)
        agreement = 2 * depth * ALPHA  # before each call: up a tree, and down again
        for algorithm, seconds in ("ring", ring), ("tree", tree), ("halving_doubling", halving):
            found.append(
                Case(f"messages: {algorithm}", p, 1, by_hand(algorithm), agreement + seconds)
            )
    return found


def on_two_nodes() -> list[Case]:
    """Two ranks each. What leaves a node counts, and what it has to wait for."""
    # Six blocks of a ring go through each cable; every second hop of a block is one. A block that
    # has come round may not be there yet when the cable is free: t is shorter than α, or not.
    t = VECTOR / 4
    ring = max(6 * t + ALPHA, 4 * t + 3 * ALPHA)
    agreement = 2 * ALPHA
    # Half a vector each, of both ranks of a node at once, there and back.
    hierarchical = 2 * (2 * t + ALPHA)
    return [
        Case("shm: all_reduce, ring", 4, 2, dist.all_reduce, ring),
        Case("shm: broadcast, tree", 4, 2, broadcast, ALPHA + VECTOR),
        Case("shm: hierarchical", 4, 2, by_node_shm, hierarchical),
        Case("messages: ring", 4, 2, by_hand("ring"), agreement + ring),
        Case("messages: tree", 4, 2, by_hand("tree"), agreement + 2 * (ALPHA + VECTOR)),
        # Halves of the vector cross first, and again at last; of both ranks at once.
        Case(
            "messages: halving_doubling",
            4,
            2,
            by_hand("halving_doubling"),
            agreement + 2 * (4 * t + ALPHA),
        ),
        Case("messages: hierarchical", 4, 2, by_node, agreement + hierarchical),
    ]


def by_hand(algorithm: str) -> Call:
    """The all_reduce of md.collectives."""
    return lambda x: md.collectives.all_reduce(x, algorithm=algorithm)


def all_gather(x: torch.Tensor) -> None:
    """A vector of the size of x, of which each rank has a block."""
    blocks = list(x.chunk(dist.get_world_size()))
    dist.all_gather(blocks, blocks[dist.get_rank()].clone())


def broadcast(x: torch.Tensor) -> None:
    """From rank 0."""
    dist.broadcast(x, 0)


def by_node(x: torch.Tensor) -> None:
    """Within each node a half for each rank; between the nodes its sum; within each node again."""
    node, nodes = groups()
    halves = list(x.chunk(2))
    mine = torch.empty_like(halves[0])
    md.collectives.reduce_scatter(mine, halves, group=node)
    md.collectives.all_reduce(mine, group=nodes)
    md.collectives.all_gather(halves, mine, group=node)


def by_node_shm(x: torch.Tensor) -> None:
    """The same, by torch's calls."""
    node, nodes = groups()
    halves = list(x.chunk(2))
    mine = torch.empty_like(halves[0])
    dist.reduce_scatter(mine, halves, group=node)
    dist.all_reduce(mine, group=nodes)
    dist.all_gather(halves, mine, group=node)


GROUPS: list[dist.ProcessGroup] = []


def groups() -> list[dist.ProcessGroup]:
    """The ranks of this node, and those at this place of each node."""
    if not GROUPS:
        mesh = dist.init_device_mesh("cpu", (2, 2))
        GROUPS.extend([mesh.get_group(1), mesh.get_group(0)])
    return GROUPS


def run(rounds: int, picture: Path) -> list[Row]:
    """Time each case, from a moment on which all ranks have agreed; the slowest rank counts."""
    rows = []
    for ranks, nodes in dict.fromkeys((case.ranks, case.nodes) for case in cases()):
        own = [i for i, case in enumerate(cases()) if (case.ranks, case.nodes) == (ranks, nodes)]
        with md.ranks(ranks, "shm", nodes, link=LINK if nodes in (1, ranks) else BETWEEN) as pool:
            rows += [measure(pool, i, rounds) for i in own]
    show("link: measured, and by formula", rows)
    draw("link: measured, and by formula", rows, picture)
    off, what = max((abs(1 / median(row.ratios) - 1), row.what) for row in rows)
    print(f"typically off by {100 * off:.1f} % or less: {what}")
    return rows


def measure(pool: Pool, number: int, rounds: int) -> Row:
    """One case, so many times."""
    case, taken = cases()[number], []
    for turn in range(rounds + 1):
        seconds = max(pool(time_here, number, time.monotonic() + 0.05))
        if turn > 0:  # the first one touches memory that is new, and makes groups
            taken.append(seconds)
    what = f"{case.what}, {case.ranks} ranks, {case.nodes} node{'s' * (case.nodes > 1)}"
    return Row(what, taken, "formula", (case.formula,) * rounds)


def time_here(number: int, start: float) -> float:
    """Seconds from `start` on, a time that is soon to come."""
    call, x = cases()[number].call, torch.ones(N)
    time.sleep(max(0.0, start - time.monotonic()))
    call(x)
    return time.monotonic() - start
