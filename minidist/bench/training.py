"""Training steps of one model in several ways, timed in turns on the ranks of a pool."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

import minidist as md
from minidist.runtime import Pool

WARM = 3  # steps before the first that counts: buffers are made, memory is touched
RATE = 0.1  # of plain gradient descent
CLOSE = 1e-4  # how far losses in float32 may be apart, relatively

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Trainer:
    """A way to train: the parameters of this rank, and a forward and backward pass, which returns
    the loss on the ranks that know it, else None."""

    parameters: list[nn.Parameter]
    step: Callable[[torch.Tensor, torch.Tensor], float | None]


Make = Callable[[], Trainer]


def transformer(layers: int, width: int, length: int) -> md.zoo.Transformer:
    """The model that is trained. Its head is not tied: torch's pipelining knows no ties."""
    model = md.zoo.Transformer(256, length, width, heads=4, layers=layers)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def measure(
    pool: Pool, ways: dict[str, Make], rounds: int, rows: int, length: int
) -> dict[str, list[float]]:
    """Seconds of each forward and backward pass, by way, taken in turns; it lasts as long as its
    slowest rank. Every way trains a model of its own on the same rows of text. Raises RuntimeError
    if they do not all come to the same loss."""
    by_rank = pool(_measure_here, ways, rounds, rows, length)
    known = [(name, loss) for name in ways for found in by_rank for loss in found[name][1]]
    for name, loss in known:
        if not math.isclose(loss, known[0][1], rel_tol=CLOSE):
            raise RuntimeError(
                f"{name} comes to a loss of {loss}, and {known[0][0]} to {known[0][1]}"
            )
    untold = set(ways) - {name for name, _ in known}
    if untold:
        raise RuntimeError(f"no rank knows the loss of {', '.join(sorted(untold))}")
    return {
        name: [max(times) for times in zip(*(found[name][0] for found in by_rank), strict=True)]
        for name in ways
    }


def _measure_here(
    ways: dict[str, Make], rounds: int, rows: int, length: int
) -> dict[str, tuple[list[float], list[float]]]:
    """By way: the seconds, and the loss of the last step, where it is known."""
    inputs, targets = (x[:rows] for x in md.zoo.text(length))
    trainers = {name: make() for name, make in ways.items()}
    taken: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ways}
    for turn in range(WARM + rounds):
        for name, trainer in trainers.items():
            for parameter in trainer.parameters:
                parameter.grad = None
            dist.barrier()
            start = time.perf_counter()
            loss = trainer.step(inputs, targets)
            seconds, losses = taken[name]
            if turn >= WARM:
                seconds.append(time.perf_counter() - start)
            losses[:] = [] if loss is None else [loss]
            _descend(trainer.parameters)
    return taken


@torch.no_grad()
def _descend(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.sub_(RATE * parameter.grad)
