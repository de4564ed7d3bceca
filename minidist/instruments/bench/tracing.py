"""Recording a trace: what it costs, whether its exposed communication is right, and its file.

Exposed communication is compared with how much longer a step takes than without messages. Layers
that sleep take the time that they would on four processors. "Times faster" is the one through the
other, and the other way round: 1 is exact.
Lesson: reading_a_step
"""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import minidist as md
from minidist.instruments.bench import Row, Target, Times, draw, in_turns, show

Step = Callable[[], Any]
RANKS, LINK = 4, md.Link(gbps=0.125, latency_us=200)
MS, WIDTH, LAYERS = 5.0, 256, 4  # a layer sleeps forward, and twice that backward
BUCKETS = {"one bucket": 100.0, "4 buckets": 0.25}  # MB
DIFFERENCE, WITHOUT = "with messages - without", "without messages"
EXPOSED = {name: f"exposed, {name}" for name in BUCKETS}
EXACT = {pair: 0.95 for x in EXPOSED.values() for pair in ((x, DIFFERENCE), (DIFFERENCE, x))}
TARGETS = [Target("exposed communication: within 5 %", EXACT)]


def run(rounds: int, picture: Path) -> list[Row]:
    """In one process, plain and recorded; then on ranks."""
    root = os.getpid()
    with md.ranks(1, "shm") as pool:
        times = pool(cost_here, rounds, root)[0]
    rows = [times.row(f"{x}, recorded", f"{x}, recorded", x, "plain") for x in list(times)[::2]]
    with md.ranks(RANKS, "shm", link=LINK) as pool, TemporaryDirectory() as folder:
        times = pool(exposed_here, rounds, root)[0]
        for ending in "json", "json.gz":
            path = Path(folder) / f"trace.{ending}"
            md.tracing.save(pool(training_here), path)
            events, size = md.tracing.validate(path), path.stat().st_size / 1e6
            print(f".{ending}, {RANKS} ranks × 3 steps: {events:,} events, {size:.2f} MB")
    for name, what in EXPOSED.items():
        times[DIFFERENCE] = [a - b for a, b in zip(times[name], times[WITHOUT], strict=True)]
        rows += [times.row(a, a, b) for a, b in ((what, DIFFERENCE), (DIFFERENCE, what))]
    show("traces", rows)
    draw("traces", rows, picture)
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


def traced(step: Step, steps: int = 3) -> md.tracing.Trace:
    """So many steps, each from a common start."""
    with md.tracing.record() as trace:
        for _ in range(steps):
            dist.barrier()
            with trace.step():
                step()
    return trace


def cost_here(rounds: int, root: int) -> Times:
    """Small operations, products, and a transformer's step: each plain, and recorded."""
    torch.set_num_threads(1)
    small, large = torch.zeros(16), torch.randn(256, 256)
    steps: dict[str, Step] = {"a transformer's step": transformer()}
    steps["2,000 small operations"] = lambda: [small.add_(1) for _ in range(2000)]
    steps["50 products of 256²"] = lambda: [large @ large for _ in range(50)]
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
    trace = traced(step)
    return median(md.tracing.breakdown(trace, s.start, s.end).exposed for s in trace.steps())


def training_here() -> md.tracing.Trace:
    """On a rank: three steps of a transformer."""
    return traced(transformer(md.DistributedDataParallel))


def sleeping(wrap: Callable[..., Any] = nn.Sequential) -> Step:
    """Forward and backward of layers that sleep."""
    layers = [nn.Sequential(md.zoo.Sleep(MS), nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS)]
    model, x = wrap(nn.Sequential(*layers)), torch.ones(1, WIDTH, requires_grad=True)
    return lambda: model(x).sum().backward()


def transformer(wrap: Callable[..., Any] = nn.Sequential) -> Step:
    """A step of a small one: forward, backward and AdamW."""
    torch.set_num_threads(1)
    model = wrap(md.zoo.Transformer(length=64, width=128, heads=4, layers=4))
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = (each[:16] for each in md.zoo.text(64))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()

    return step
