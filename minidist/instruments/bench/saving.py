"""Saving 100 MB: how long training stands still, and how long it takes until it is on the disk.

Lesson: surviving_failures
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch

import minidist as md
from minidist.instruments.bench import Row, Target, Times, in_turns
from minidist.instruments.bench.training import STRATEGIES, Wrapped
from minidist.saving import Checkpoints

BYTES = 100 * 10**6  # of parameters and one optimizer state each
WORLD_SIZES = [2, 4]
STALL, WHOLE = "training stands still", "until it is whole on the disk"
REACH = 20  # 5 %


def case(name: str, world_size: int) -> str:
    """What a row says."""
    return f"100 MB, {name}, {world_size} ranks: {STALL}"


TARGETS = [
    Target(
        "a save stalls training for less than 5 % of writing it, 2 ranks",
        {(case(name, 2), WHOLE): REACH for name in STRATEGIES},
    )
]


def run(rounds: int) -> list[Row]:
    """Save in turns, by strategy and world size."""
    rows = []
    for world_size in WORLD_SIZES:
        with md.ranks(world_size) as pool:
            for name, wrap in STRATEGIES.items():
                # Not in the folder for temporary files, which may be in memory.
                with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
                    times = pool(saves, wrap, BYTES, Path(folder), rounds, os.getpid())[0]
                rows.append(times.row(case(name, world_size), STALL, WHOLE))
    return rows


def saves(wrap: Callable[..., Wrapped], nbytes: int, folder: Path, rounds: int, root: int) -> Times:
    """Save again and again, and take both times of each save. On ranks."""
    side, layers = 500, max(1, nbytes // (8 * 500 * 500))  # 4 bytes a parameter, and its momentum
    model, optimizer = wrap(
        md.zoo.mlp(*[side] * (layers + 1)), torch.optim.SGD, lr=0.1, momentum=0.9
    )
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(2, side)).sum().backward()
        optimizer.step()
    with Checkpoints(folder) as checkpoints:
        began, step = 0.0, 0

        def stall() -> float:
            nonlocal began, step
            step, began = step + 1, perf_counter()
            checkpoints.save(step, model=model, optimizer=optimizer)
            return perf_counter() - began

        def whole() -> float:
            checkpoints.wait()
            return perf_counter() - began

        return in_turns({STALL: stall, WHOLE: whole}, rounds, 1, root)
