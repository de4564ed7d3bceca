"""Attention over cut tokens: who computes how much, what hides messages, each way beside its bytes.

An attention that sleeps for each pair of tokens takes the time that it would on four processors.
"Times faster" than a formula is formula / measured here: 1 is exact.
Lesson: long_sequences
"""

import os
import time
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import minidist as md
from minidist.context_parallel import ATTENTION, Block, Cut, cost, kernel
from minidist.context_parallel.ring import Passing
from minidist.instruments.bench import Row, Target, Times, draw, in_turns, show
from minidist.machine.runtime import Pool

RANKS = 4
LINK, SLOW = md.Link(gbps=0.2, latency_us=50), md.Link(gbps=0.1, latency_us=50)
PAIR = 2e-6  # seconds that a pair of tokens sleeps
LONG = 4096  # tokens of all ranks, in the CPU time
HEADS, SLEEPING, D = 12, 4, 64  # heads of queries; of all, where they sleep; numbers of a head
FORMULA, SIDE = "formula", "zigzag, {} tokens a rank"
# Rings that sleep: which cut, how many tokens a rank, and whether messages travel meanwhile.
RINGS = {
    "contiguous, 256 tokens a rank": ("contiguous", 256, True),
    **{SIDE.format(n): ("zigzag", n, True) for n in (128, 256)},
    **{f"{SIDE.format(n)}, waiting": ("zigzag", n, False) for n in (128, 256)},
}
LAST, BALANCED = next(iter(RINGS)), SIDE.format(256)
TARGETS = [
    Target(
        "contiguous / zigzag: 2 - 1/4, less 5 %", {(BALANCED, "contiguous"): 0.95 * (2 - 1 / RANKS)}
    ),
    Target(
        "a ring hides its messages: the formula, and 15 %",
        {(SIDE.format(n), FORMULA): 1 / 1.15 for n in (128, 256)},
    ),
]


def run(rounds: int, picture: Path) -> list[Row]:
    """Balance, then messages beside computing, then the ways on a slower link."""
    with md.ranks(RANKS, "shm", link=LINK) as pool:
        rows = [balance(pool, rounds)]
        times = pool(sleeping_here, rounds, os.getpid())[0]
    rows.append(times.row(BALANCED, BALANCED, LAST, "contiguous"))
    for what, case in RINGS.items():
        rows.append(Row(what, times[what], FORMULA, (seconds(*case),) * rounds, times.noise))
    with md.ranks(RANKS, "shm", link=SLOW) as pool:
        times = pool(ways_here, rounds, os.getpid())[0]
    for way, kv_heads in product(ATTENTION, (HEADS, 2)):
        numbers = cost.sent(way, RANKS, 512 * kv_heads * D, HEADS, kv_heads)[0]
        alone = (SLOW.seconds(4 * numbers),) * rounds
        what = f"{way}, {HEADS} heads, {kv_heads} of keys"
        rows.append(Row(what, times[what], "its bytes", alone, times.noise))
    show(f"attention on {RANKS} ranks, forward", rows)
    draw(f"attention on {RANKS} ranks, forward", rows, picture)
    return rows


def seconds(kind: str, tokens: int, beside: bool) -> float:
    """By formula: of each step the longer one of block and message, or both."""
    message = LINK.seconds(4 * 2 * SLEEPING * D * tokens)
    pairs = cost.work(kind, RANKS * tokens, RANKS)
    if beside:
        return cost.ring_time(pairs, PAIR, message)
    return max(map(sum, pairs)) * PAIR + (RANKS - 1) * message


def balance(pool: Pool, rounds: int) -> Row:
    """Seconds of a processor that the busiest rank computes; prints the share of each."""
    most = {}
    for kind in "zigzag", "contiguous":
        taken = pool(computing_here, kind, rounds)
        most[kind] = [max(each) for each in zip(*taken, strict=True)]
        for what, each in (
            ("CPU time", [median(own) for own in taken]),
            ("pairs", [sum(row) for row in cost.work(kind, LONG, RANKS)]),
        ):
            shares = "  ".join(f"{100 * own / sum(each):3.0f} %" for own in each)
            print(f"{kind:12} {what:10} of rank 0 to {RANKS - 1}: {shares}")
    what = "CPU time of the busiest rank, zigzag"
    return Row(what, most["zigzag"], "contiguous", tuple(most["contiguous"]))


def attend(way: str, cut: Cut, heads: int, kv_heads: int) -> float:
    """Seconds of attention, from a common start."""
    tokens = len(cut.positions[dist.get_rank()])
    q, k, v = (torch.randn(1, each, tokens, D) for each in (heads, kv_heads, kv_heads))
    dist.barrier()
    start = time.perf_counter()
    ATTENTION[way](q, k, v, cut)
    return time.perf_counter() - start


def computing_here(kind: str, rounds: int) -> list[float]:
    """On a rank: seconds of a processor, round by round, without a first one."""
    cut, taken = Cut.of(kind, LONG, RANKS), []
    for _ in range(rounds + 1):
        start = time.thread_time()
        attend("ring", cut, HEADS, HEADS)
        taken.append(time.thread_time() - start)
    return taken[1:]


def sleeping_here(rounds: int, root: int) -> Times:
    """On a rank: rings whose attention takes the time of its pairs, and no processor."""

    def sleep(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block) -> Any:
        time.sleep(PAIR * block.work)
        q = q[:, :, block.rows]
        return torch.zeros_like(q), q.new_zeros(q.shape[:3])

    def ring(cut: Cut, beside: bool) -> float:
        with mock.patch.object(Passing, "beside", beside):
            return attend("ring", cut, SLEEPING, SLEEPING)

    subjects = {
        what: partial(ring, Cut.of(kind, RANKS * tokens, RANKS), beside)
        for what, (kind, tokens, beside) in RINGS.items()
    }
    with mock.patch.object(kernel, "forward", sleep):
        return in_turns(subjects, rounds, 1, root)


def ways_here(rounds: int, root: int) -> Times:
    """On a rank: each way, with many heads of keys and with few."""
    cut = Cut.of("zigzag", 512, RANKS)
    subjects = {
        f"{way}, {HEADS} heads, {kv_heads} of keys": partial(attend, way, cut, HEADS, kv_heads)
        for way, kv_heads in product(ATTENTION, (HEADS, 2))
    }
    return in_turns(subjects, rounds, 1, root)
