"""Attention over cut tokens: whether zigzag shares the work, and a ring hides its messages.

An attention that sleeps for each pair of tokens takes the time that it would on four processors.
"Times faster" than a formula is formula / measured here: 1 is exact.
Lesson: long_sequences
"""

import os
import time
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import minidist as md
from minidist.context_parallel import ATTENTION, Block, Cut, cost, kernel
from minidist.instruments.bench import Row, Target, Times, in_turns

RANKS, LINK = 4, md.Link(gbps=0.2, latency_us=50)
PAIR = 2e-6  # seconds that a pair of tokens sleeps
HEADS, D = 4, 64  # and numbers of a head
RINGS = {  # which cut, and how many tokens a rank
    f"{kind}, {n} tokens a rank": (kind, n)
    for kind, n in [("contiguous", 256), ("zigzag", 128), ("zigzag", 256)]
}
LAST, SHORT, BALANCED = RINGS
TARGETS = [
    Target(
        "contiguous / zigzag: 2 - 1/4, less 5 %", {(BALANCED, "contiguous"): 0.95 * (2 - 1 / RANKS)}
    ),
    Target(
        "a ring hides its messages: the formula, and 15 %",
        {(what, "formula"): 1 / 1.15 for what in (SHORT, BALANCED)},
    ),
]


def run(rounds: int) -> list[Row]:
    """Rings of both cuts, in turns."""
    with md.ranks(RANKS, "shm", link=LINK) as pool:
        times: Times = pool(sleeping_here, rounds, os.getpid())[0]
    rows = [times.row(BALANCED, BALANCED, LAST, "contiguous")]
    for what, (kind, tokens) in RINGS.items():
        pairs = cost.work(kind, RANKS * tokens, RANKS)
        formula = cost.ring_time(pairs, PAIR, LINK.seconds(4 * 2 * HEADS * D * tokens))
        rows.append(Row(what, times[what], "formula", [formula] * rounds, times.disturbed))
    return rows


def sleeping_here(rounds: int, root: int) -> Times:
    """On a rank: rings whose attention takes the time of its pairs, and no processor."""

    def sleep(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block) -> Any:
        time.sleep(PAIR * block.work)
        q = q[:, :, block.rows]
        return torch.zeros_like(q), q.new_zeros(q.shape[:3])

    def attend(cut: Cut) -> float:
        q, k, v = torch.randn(3, 1, HEADS, len(cut.positions[dist.get_rank()]), D)
        dist.barrier()
        start = time.perf_counter()
        ATTENTION["ring"](q, k, v, cut)
        return time.perf_counter() - start

    subjects = {
        what: partial(attend, Cut.of(kind, RANKS * tokens, RANKS))
        for what, (kind, tokens) in RINGS.items()
    }
    with mock.patch.object(kernel, "forward", sleep):
        return in_turns(subjects, rounds, 1, root)
