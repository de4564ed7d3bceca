"""Experts on ranks: the fullest rank, and how long its rows travel, beside formulas.

Experts that sleep for each row take the time that they would on four processors. "Times faster"
than a formula is formula / measured here: 1 is exact.
Lesson: experts
"""

import os
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import minidist as md
from minidist.experts import MoE, exchange
from minidist.instruments.bench import Row, Target, Times, in_turns
from minidist.machine.runtime import Pool

RANKS, FORMULA = 4, "formula"
ROW = 1e-3  # seconds that a row sleeps
TOKENS, WIDTH, EXPERTS, K = 200, 16, 16, 2
SKEWS = 0.0, 0.05, 0.1, 0.2, 0.5  # of the first experts' bias
CABLE = md.Link(gbps=0.025, latency_us=2000)
NODES = {n: md.Link(gbps=0.1, latency_us=500, inter=CABLE if n > 1 else None) for n in (1, 2)}
ROWS = 400, 800  # of an exchange, to each rank
FULLEST = [f"fullest rank, skew {each}" for each in SKEWS]
LINKS = {(nodes, rows): f"{rows} rows a pair, nodes: {nodes}" for nodes in NODES for rows in ROWS}
TARGETS = [
    Target("the fullest rank: within 10 %", dict.fromkeys([(x, FORMULA) for x in FULLEST], 0.9)),
    Target("links: within 5 %", {(x, FORMULA): 0.95 for x in LINKS.values()}),
]


def run(rounds: int) -> list[Row]:
    """The fullest rank by skew, then links by rows."""
    rows = []
    with md.ranks(RANKS, "shm") as pool:
        times, loads = pool(sleeping_here, rounds, os.getpid())[0]
    for what, load in zip(FULLEST, loads, strict=True):
        rows.append(Row(what, times[what], FORMULA, [ROW * load] * rounds, times.disturbed))
    for nodes, link in NODES.items():
        with md.ranks(RANKS, "shm", nodes=nodes, link=link) as pool:
            rows += links(pool, nodes, rounds)
    return rows


def timed(step: Any) -> float:
    """Seconds of a step, from a common start until the last rank has ended."""
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


def sleeping_here(rounds: int, root: int) -> tuple[Times, list[int]]:
    """On a rank: layers whose experts sleep for each row; and the rows of the fullest rank."""

    def sleep(rows: torch.Tensor, *others: Any) -> torch.Tensor:
        time.sleep(ROW * len(rows))
        return rows

    layers: list[Any] = []
    subjects, x = {}, torch.randn(TOKENS, WIDTH)
    for what, skew in zip(FULLEST, SKEWS, strict=True):
        torch.manual_seed(0)  # the same layer on each rank; its first experts are full
        layer = MoE(WIDTH, 2 * WIDTH, EXPERTS, K)
        layer.router.bias += torch.linspace(skew, 0, EXPERTS)
        layers.append(md.experts.parallelize(layer))
        layers[-1].experts.compute = sleep
        subjects[what] = partial(timed, partial(layers[-1], x))
    with torch.no_grad():
        times = in_turns(subjects, rounds, 1, root)
    counts = torch.stack([each.counts for each in layers])
    dist.all_reduce(counts)
    return times, counts.view(len(SKEWS), RANKS, -1).sum(2).amax(1).tolist()


def links(pool: Pool, nodes: int, rounds: int) -> list[Row]:
    """An exchange of rows, beside the seconds of its bytes: three steps, whose messages have lines
    of their own, or share a cable."""
    times, found = pool(exchanging_here, nodes, rounds, os.getpid())[0], []
    line, most = (NODES[1], (1, 1, 1)) if nodes == 1 else (CABLE, (1, 2, 1))
    for rows in ROWS:
        formula, what = sum(line.seconds(m * rows * 1024) for m in most), LINKS[nodes, rows]
        found.append(Row(what, times[what], FORMULA, [formula] * rounds, times.disturbed))
    return found


def exchanging_here(nodes: int, rounds: int, root: int) -> Times:
    """On a rank: seconds of an exchange of so many rows to each rank."""
    subjects = {}
    for rows in ROWS:
        even, x = [rows] * RANKS, torch.zeros(RANKS * rows, 256)
        own = partial(exchange, x, even, even, dist.group.WORLD)
        subjects[LINKS[nodes, rows]] = partial(timed, own)
    return in_turns(subjects, rounds, 1, root)
