"""A step of a pipeline, 8 micro-batches: ours and torch.distributed.pipelining's, by schedule.

Lesson: layer_splitting
"""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

import minidist as md
from minidist.instruments.bench import Row, Target
from minidist.instruments.bench.training import (
    BACKENDS,
    Make,
    Trainer,
    measure,
    sgd,
    text,
    transformer,
)
from minidist.pipeline import balance_by_parameters

LAYERS, WIDTH, LENGTH, ROWS = 8, 64, 64, 16  # 0.4 million parameters; words a row, rows a batch
MICROBATCHES = 8
WORLD_SIZES = [2, 4]

# Ours, torch's, and how many stages each rank has. ZBV lays the stages in a V over the ranks, so
# that the first and the last are on rank 0; ours (ZB-H1) has one stage a rank.
PAIRS: dict[str, tuple[Callable[..., Any], int]] = {
    "gpipe": (pipelining.ScheduleGPipe, 1),
    "1f1b": (pipelining.Schedule1F1B, 1),
    "interleaved": (pipelining.ScheduleInterleaved1F1B, 2),
    "zero_bubble": (pipelining.ScheduleZBVZeroBubble, 2),
}


TARGETS = [
    Target(
        "a pipeline step by gpipe, 1f1b, interleaved, zero_bubble, against torch's on the same "
        "backend, gloo and shm",
        {
            (f"2 ranks, {schedule}, {backend}", f"torch, {backend}"): 1.05
            for backend in BACKENDS
            for schedule in PAIRS
        },
    )
]


def run(rounds: int) -> list[Row]:
    """Time forward and backward in turns, by schedule, backend and world size."""
    rows = []
    for world_size in WORLD_SIZES:
        with md.ranks(world_size, backend="gloo") as pool:
            for schedule in PAIRS:
                taken = measure(pool, ways(schedule), rounds, partial(text, ROWS, LENGTH))
                what = f"{world_size} ranks, {schedule}"
                rows += [
                    taken.row(f"{what}, {backend}", ours(backend), there)
                    for backend in BACKENDS
                    for there in dict.fromkeys(["torch, gloo", f"torch, {backend}"])
                ]
    return rows


def ours(backend: str) -> str:
    return f"minidist, {backend}"


def ways(schedule: str) -> dict[str, Make]:
    """Ours and torch's over each backend."""
    found: dict[str, Make] = {}
    for backend in BACKENDS:
        found[ours(backend)] = partial(by_minidist, schedule, backend)
        found[f"torch, {backend}"] = partial(by_torch, schedule, backend)
    return found


def by_minidist(schedule: str, backend: str) -> Trainer:
    """`md.Pipeline`."""
    module = transformer(LAYERS, WIDTH, LENGTH).sequential()
    pipeline = md.Pipeline(
        module, MICROBATCHES, schedule, process_group=dist.new_group(backend=backend)
    )

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        return pipeline.train_step(inputs, targets, md.parity.cross_entropy).item()

    return Trainer(step, sgd(pipeline))


def by_torch(schedule: str, backend: str) -> Trainer:
    """The schedule of torch that is like it."""
    group = dist.new_group(backend=backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    kind, per_rank = PAIRS[schedule]
    module = transformer(LAYERS, WIDTH, LENGTH).sequential()
    cuts = [0, *accumulate(balance_by_parameters(module, ranks * per_rank))]
    places = [rank + ranks * turn for turn in range(per_rank)]
    if schedule == "zero_bubble":
        places[1] = 2 * ranks - 1 - rank
    parts = {place: module[cuts[place] : cuts[place + 1]] for place in places}
    stages = [
        pipelining.PipelineStage(part, place, ranks * per_rank, torch.device("cpu"), group=group)
        for place, part in parts.items()
    ]
    pipeline = kind(
        stages if per_rank > 1 else stages[0], MICROBATCHES, loss_fn=md.parity.cross_entropy
    )
    first, last = 0 in parts, ranks * per_rank - 1 in parts

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float | None:
        losses: list[torch.Tensor] = []
        known = dict(target=targets, losses=losses) if last else {}
        pipeline.step(*[inputs] * first, return_outputs=False, **known)
        return torch.stack(losses).mean().item() if last else None

    return Trainer(step, sgd(nn.ModuleList(parts.values())))
