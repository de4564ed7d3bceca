"""A step that `md.watch` looks at, beside one that it does not.

Lesson: wrong_in_silence
"""

import os
from collections.abc import Callable
from time import perf_counter

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import minidist as md
from minidist.instruments.bench import Row, Target, Times, in_turns
from minidist.instruments.bench.training import STRATEGIES, Wrapped

WORLD_SIZES = [2, 4]
LOOK, STEP = "a step with a look", "a step"
REACH = 1 / 5  # a look takes as long as four steps


def case(name: str, world_size: int) -> str:
    """What a row says."""
    return f"0.8 M parameters, {name}, {world_size} ranks"


TARGETS = [
    Target(
        "a look of md.watch costs 4 steps or less, 2 ranks",
        {(case(name, 2), STEP): REACH for name in STRATEGIES},
    )
]


def run(rounds: int) -> list[Row]:
    """Both kinds of steps in turns, by strategy and world size."""
    rows = []
    for world_size in WORLD_SIZES:
        with md.ranks(world_size) as pool:
            for name, wrap in STRATEGIES.items():
                times = pool(steps, wrap, rounds, os.getpid())[0]
                rows.append(times.row(case(name, world_size), LOOK, STEP))
    return rows


def transformer() -> nn.Module:
    """What is trained."""
    return md.zoo.Transformer(width=128, heads=4, layers=4, length=16)


def cross_entropy(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, int]:
    """The sum over the tokens, and their number."""
    inputs, targets = batch
    outputs = model(inputs).flatten(0, 1)
    return F.cross_entropy(outputs, targets.flatten(), reduction="sum"), targets.numel()


def steps(wrap: Callable[..., Wrapped], rounds: int, root: int) -> Times:
    """Train, and take the time of both kinds of steps. On ranks."""
    model, optimizer = wrap(transformer(), torch.optim.AdamW, lr=1e-3)
    watch = md.watch(model, optimizer, bare=transformer, loss=cross_entropy)
    rank = dist.get_rank()
    batch = tuple(each[12 * rank : 12 * rank + 12].clone() for each in md.zoo.text(16))

    def step() -> float:
        start = perf_counter()
        optimizer.zero_grad()
        total, count = cross_entropy(model, batch)
        (total / count).backward()
        optimizer.step()
        return perf_counter() - start

    def look() -> float:
        start = perf_counter()
        with watch([batch]):
            step()
        return perf_counter() - start

    return in_turns({LOOK: look, STEP: step}, rounds, 1, root)
