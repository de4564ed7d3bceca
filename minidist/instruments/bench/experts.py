"""Experts on ranks: bytes and links beside formulas, the fullest rank, and ways to compute them.

Experts that sleep for each row take the time that they would on four processors. "Times faster"
than a formula is formula / measured here: 1 is exact.
Lesson: experts
"""

import os
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import minidist as md
from minidist.experts import MoE, NaiveExperts, exchange, grouped_mm, loop, padded
from minidist.instruments.bench import Row, Target, Times, draw, in_turns, show

RANKS, FORMULA = 4, "formula"
ROW = 1e-3  # seconds that a row sleeps
TOKENS, WIDTH, EXPERTS, K = 200, 16, 16, 2
SKEWS = 0.0, 0.05, 0.1, 0.2, 0.5  # of the first experts' bias
CABLE = md.Link(gbps=0.025, latency_us=2000)
NODES = {n: md.Link(gbps=0.1, latency_us=500, inter=CABLE if n > 1 else None) for n in (1, 2)}
ROWS, MANY = (400, 800), (8, 32, 128)  # of an exchange, to each rank; and experts of a layer
FULLEST = [f"fullest rank, skew {each}" for each in SKEWS]
LINKS = {(nodes, rows): f"{rows} rows a pair, nodes: {nodes}" for nodes in NODES for rows in ROWS}
WAYS: Any = {"loop": loop, "padded": padded, "grouped_mm": grouped_mm}
TARGETS = [
    Target("the fullest rank: within 10 %", dict.fromkeys([(x, FORMULA) for x in FULLEST], 0.9)),
    Target("links: within 5 %", {(x, FORMULA): 0.95 for x in LINKS.values()}),
]


def run(rounds: int, picture: Path) -> list[Row]:
    """Bytes, the fullest rank, links; then how a rank computes, and the layer beside the naive."""
    with md.ranks(RANKS, "shm", nodes=RANKS, link=md.Link(100, 1)) as pool:
        for p, (counted, formula) in enumerate(pool(bytes_here)):
            print(f"rank {p}: {counted:,} bytes left it, formula {formula:,}")
    root, rows = os.getpid(), []
    with md.ranks(RANKS, "shm") as pool:
        times, loads = pool(sleeping_here, rounds, root)[0]
        for what, load in zip(FULLEST, loads, strict=True):
            print(f"{what}: {load / (TOKENS * K):.2f} times the mean")
            rows.append(Row(what, times[what], FORMULA, (ROW * load,) * rounds, times.noise))
        times = pool(layers_here, rounds, root)[0]
    rows += [times.row(what, what, "naive") for what in times if what != "naive"]
    for nodes, link in NODES.items():
        with md.ranks(RANKS, "shm", nodes=nodes, link=link) as pool:
            rows += links(pool, nodes, rounds)
    with md.ranks(1, "shm") as pool:
        times = pool(computing_here, rounds, root)[0]
    pairs = [(f"{way}, {n}", f"loop, {n}") for n, way in product(MANY, WAYS) if way != "loop"]
    rows += [times.row(what, what, plain) for what, plain in pairs]
    show(f"experts on {RANKS} ranks", rows)
    draw(f"experts on {RANKS} ranks", rows, picture)
    return rows


def layer(experts: int = EXPERTS, skew: float = 0.0, width: int = WIDTH, **options: Any) -> MoE:
    """The same one on each rank; its first experts are full."""
    torch.manual_seed(0)
    made = MoE(width, 2 * width, experts, K, **options)
    made.router.bias += torch.linspace(skew, 0, experts)
    return md.experts.parallelize(made) if dist.get_world_size() > 1 else made  # type: ignore


def timed(step: Any) -> float:
    """Seconds of a step, from a common start until the last rank has ended."""
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


def bytes_here() -> tuple[int, int]:
    """On a rank that is a node: bytes that a step sends, and those of rows and counts."""
    r, own = dist.get_rank(), layer(12, 0.3)
    dist.barrier()
    before = md.Link.sent_by_node(r)
    own(torch.randn(50 + 10 * r, WIDTH).requires_grad_()).sum().backward()
    dist.barrier()
    nbytes = 2 * 4 * WIDTH * (own.plan.leaving(r) if own.plan else 0)
    return int(md.Link.sent_by_node(r) - before), nbytes + 8 * 12 * (RANKS - 1) // RANKS


def sleeping_here(rounds: int, root: int) -> tuple[Times, list[int]]:
    """On a rank: layers whose experts sleep for each row; and the rows of the fullest rank."""

    def sleep(rows: torch.Tensor, *others: Any) -> torch.Tensor:
        time.sleep(ROW * len(rows))
        return rows

    layers, x = [layer(skew=each) for each in SKEWS], torch.randn(TOKENS, WIDTH)
    subjects = {}
    for what, own in zip(FULLEST, layers, strict=True):
        own.experts.compute, subjects[what] = sleep, partial(timed, partial(own, x))
    with torch.no_grad():
        times = in_turns(subjects, rounds, 1, root)
    counts = torch.stack([each.counts for each in layers])
    dist.all_reduce(counts)
    return times, counts.view(len(SKEWS), RANKS, -1).sum(2).amax(1).tolist()


def links(pool: Any, nodes: int, rounds: int) -> list[Row]:
    """An exchange of rows, beside the seconds of its bytes: three steps, whose messages have lines
    of their own, or share a cable."""
    times, found = pool(exchanging_here, rounds)[0], []
    line, most = (NODES[1], (1, 1, 1)) if nodes == 1 else (CABLE, (1, 2, 1))
    for rows in ROWS:
        formula = sum(line.seconds(m * rows * 1024) for m in most)
        found.append(Row(LINKS[nodes, rows], times[rows], FORMULA, (formula,) * rounds))
    return found


def exchanging_here(rounds: int) -> dict[int, list[float]]:
    """On a rank: seconds of an exchange of so many rows to each rank, without a first one."""
    found = {}
    for rows in ROWS:
        even = [rows] * RANKS
        own = partial(exchange, torch.zeros(RANKS * rows, 256), even, even, dist.group.WORLD)
        found[rows] = [timed(own) for _ in range(rounds + 1)][1:]
    return found


def step(own: nn.Module, x: torch.Tensor) -> None:
    """Forward and backward."""
    own(x).square().mean().backward()


def layers_here(rounds: int, root: int) -> Times:
    """On a rank: the layer, each token once, with a capacity, and the naive one."""
    ways: Any = {"ours": {}, "ours, once": {"once": True}, "ours, capacity 1": {"capacity": 1.0}}
    made: Any = {what: layer(width=64, **way) for what, way in ways.items()}
    experts = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(16)]
    made["naive"] = NaiveExperts(nn.Linear(64, 16), nn.ModuleList(experts), K)
    x = torch.randn(512, 64).requires_grad_()
    subjects = {what: partial(timed, partial(step, own, x)) for what, own in made.items()}
    return in_turns(subjects, rounds, 1, root)


def computing_here(rounds: int, root: int) -> Times:
    """In one process: all experts of a layer, in each way."""
    subjects, x = {}, torch.randn(512, 64).requires_grad_()
    for n, (name, way) in product(MANY, WAYS.items()):
        own = layer(n, width=64)
        own.experts.compute, subjects[f"{name}, {n}"] = way, partial(timed, partial(step, own, x))
    return in_turns(subjects, rounds, 1, root)
