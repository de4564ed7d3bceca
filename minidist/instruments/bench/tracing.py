"""Recording a trace: what it costs, and whether its exposed communication is right.

Exposed communication is compared with how much longer a step takes than without messages. Layers
that sleep take the time that they would on four processors. "Times faster" is the one through the
other, and the other way round: 1 is exact.
Lesson: reading_a_step
"""

import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import minidist as md
from minidist.instruments.bench import Row, Target, Times, in_turns

Step = Callable[[], Any]
RANKS, LINK = 4, md.Link(gbps=0.125, latency_us=200)
MS, WIDTH, LAYERS = 5.0, 256, 4  # a layer sleeps forward, and twice that backward
BUCKETS = {"one bucket": 100.0, "4 buckets": 0.25}  # MB
DIFFERENCE, WITHOUT = "with messages - without", "without messages"
EXPOSED = {name: f"exposed, {name}" for name in BUCKETS}
EXACT = {pair: 0.95 for x in EXPOSED.values() for pair in ((x, DIFFERENCE), (DIFFERENCE, x))}
TARGETS = [Target("exposed communication: within 5 %", EXACT)]


def run(rounds: int) -> list[Row]:
    """In one process, plain and recorded; then on ranks."""
    with md.ranks(1, "shm") as pool:
        times = pool(cost_here, rounds, os.getpid())[0]
    rows = [times.row(f"{x}, recorded", f"{x}, recorded", x, "plain") for x in list(times)[::2]]
    with md.ranks(RANKS, "shm", link=LINK) as pool:
        times = pool(exposed_here, rounds, os.getpid())[0]
    for name, what in EXPOSED.items():
        times[DIFFERENCE] = [a - b for a, b in zip(times[name], times[WITHOUT], strict=True)]
        rows += [times.row(a, a, b) for a, b in ((what, DIFFERENCE), (DIFFERENCE, what))]
    return rows


def timed(step: Step, recorded: bool = False) -> float:
    """Seconds of a step, from a common start, without those that the record takes itself."""
    if recorded:
        with md.tracing.record():
            return timed(step)
    dist.barrier()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def cost_here(rounds: int, root: int) -> Times:
    """Small operations, and products: each plain, and recorded."""
    torch.set_num_threads(1)
    small, large = torch.zeros(16), torch.randn(256, 256)
    steps: dict[str, Step] = {
        "2,000 small operations": lambda: [small.add_(1) for _ in range(2000)],
        "50 products of 256²": lambda: [large @ large for _ in range(50)],
    }
    subjects: dict[str, Callable[[], float]] = {}
    for name, step in steps.items():
        subjects |= {name: partial(timed, step), f"{name}, recorded": partial(timed, step, True)}
    return in_turns(subjects, rounds, 1, root)


def exposed_here(rounds: int, root: int) -> Times:
    """On a rank: layers that sleep, without messages and behind DDP; and their exposed
    communication, from a trace."""
    subjects: dict[str, Callable[[], float]] = {WITHOUT: partial(timed, sleeping())}
    for name, cap in BUCKETS.items():
        step = sleeping(partial(md.DistributedDataParallel, bucket_cap_mb=cap))
        subjects |= {name: partial(timed, step), EXPOSED[name]: partial(exposed, step)}
    return in_turns(subjects, rounds, 1, root)


def exposed(step: Step) -> float:
    """Seconds of communication behind which nothing computes: the median of three steps."""
    with md.tracing.record() as trace:
        for _ in range(3):
            dist.barrier()
            with trace.step():
                step()
    return median(md.tracing.breakdown(trace, s.start, s.end).exposed for s in trace.steps())


def sleeping(wrap: Callable[..., Any] = nn.Sequential) -> Step:
    """Forward and backward of layers that sleep."""
    layers = [nn.Sequential(md.zoo.Sleep(MS), nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS)]
    model, x = wrap(nn.Sequential(*layers)), torch.ones(1, WIDTH, requires_grad=True)
    return lambda: model(x).sum().backward()
