"""Training steps of one model in several ways: timed in turns on the ranks of a pool, and their
memory."""

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import minidist as md
from minidist.instruments.bench.turns import Times, in_turns
from minidist.machine.runtime import Pool

WARM = 3  # steps before the first that counts: buffers are made, memory is touched
RATE = 0.1  # of plain gradient descent
CLOSE = 1e-4  # how far losses in float32 may be apart, relatively
BACKENDS = ["gloo", "shm"]

Batch = tuple[torch.Tensor, torch.Tensor]
Wrapped = tuple[nn.Module, torch.optim.Optimizer]


@dataclass
class Trainer:
    """A way to train: the parameters of this rank, and a forward and backward pass, which returns
    the loss on the ranks that know it, else None. With an optimizer the step is a whole one, and
    `parameters` are those of `model`."""

    parameters: list[nn.Parameter]
    step: Callable[[torch.Tensor, torch.Tensor], float | None]
    model: nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None


Make = Callable[[], Trainer]


def transformer(layers: int, width: int, length: int) -> md.zoo.Transformer:
    """The model that is trained. Its head is not tied: torch's pipelining knows no ties."""
    model = md.zoo.Transformer(256, length, width, heads=4, layers=layers)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def trainer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Trainer:
    """A step is forward, backward, and that of the optimizer. The loss is a mean of squares."""

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    return Trainer(list(model.parameters()), step, model, optimizer)


def on_each_backend(
    strategies: Mapping[str, Callable[..., Wrapped]], sizes: tuple[int, ...]
) -> dict[str, Make]:
    """Every strategy over each backend, with layers of these sizes."""
    return {
        f"{name}, {backend}": partial(_by, wrap, backend, sizes)
        for name, wrap in strategies.items()
        for backend in BACKENDS
    }


def _by(wrap: Callable[..., Wrapped], backend: str, sizes: tuple[int, ...]) -> Trainer:
    return trainer(*wrap(md.zoo.mlp(*sizes), dist.new_group(backend=backend)))


def vectors(rows: int, width: int, out: int) -> Batch:
    """Inputs (rows, width) and targets (rows, out), the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(rows, n, generator=generator) for n in (width, out))  # type: ignore[return-value]


def text(rows: int, length: int) -> Batch:
    """So many rows of torch's help pages."""
    inputs, targets = md.zoo.text(length)
    return inputs[:rows], targets[:rows]


def measure(pool: Pool, ways: dict[str, Make], rounds: int, batch: Callable[[], Batch]) -> Times:
    """Seconds of each step, by way, taken in turns; it lasts as long as its slowest rank. Every way
    trains a model of its own on the same batch. Raises RuntimeError if they do not all come to the
    same loss."""
    by_rank = pool(_here, ways, rounds, batch, os.getpid())
    known = [(name, loss) for name in ways for _, found in by_rank for loss in found[name]]
    for name, loss in known:
        if not math.isclose(loss, known[0][1], rel_tol=CLOSE):
            raise RuntimeError(
                f"{name} comes to a loss of {loss}, and {known[0][0]} to {known[0][1]}"
            )
    unknown = set(ways) - {name for name, _ in known}
    if unknown:
        raise RuntimeError(f"no rank knows the loss of {', '.join(sorted(unknown))}")
    return by_rank[0][0]


def _here(
    ways: dict[str, Make], rounds: int, batch: Callable[[], Batch], root: int
) -> tuple[Times, dict[str, list[float]]]:
    """The times; and by way the loss of the last step, where it is known."""
    inputs, targets = batch()
    trainers = {name: make() for name, make in ways.items()}
    losses: dict[str, list[float]] = {name: [] for name in ways}

    def step(name: str) -> float:
        trainer = trainers[name]
        for parameter in trainer.parameters:
            parameter.grad = None
        dist.barrier()
        start = time.perf_counter()
        loss = trainer.step(inputs, targets)
        seconds = time.perf_counter() - start
        losses[name][:] = [] if loss is None else [loss]
        if trainer.optimizer is None:
            _descend(trainer.parameters)
        return seconds

    return in_turns({name: partial(step, name) for name in ways}, rounds, WARM, root), losses


def show_peaks(pool: Pool, ways: dict[str, Make], rows: int, batch: Callable[[], Batch]) -> None:
    """Print the memory of each way; over gloo, where some messages are copies."""
    gloo = {name: make for name, make in ways.items() if name.endswith("gloo")}
    print(f"\nthe most bytes that live on one of {pool.world_size} ranks, batch {rows}")
    for name, nbytes in peaks(pool, gloo, batch).items():
        print(f"{name:24} {nbytes:13,}")


def peaks(pool: Pool, ways: dict[str, Make], batch: Callable[[], Batch]) -> dict[str, int]:
    """By way: the most bytes that live on any rank during a step, the second."""
    by_rank = pool(_peaks_here, ways, batch)
    return {name: max(found[name] for found in by_rank) for name in ways}


def _peaks_here(ways: dict[str, Make], batch: Callable[[], Batch]) -> dict[str, int]:
    inputs, targets = batch()
    found = {}
    for name, make in ways.items():
        trainer = make()
        assert trainer.model is not None
        trainer.step(inputs, targets)
        with md.measure.MemoryTracker(trainer.model, trainer.optimizer) as memory:
            trainer.step(inputs, targets)
        found[name] = memory.peak
    return found


@torch.no_grad()
def _descend(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.sub_(RATE * parameter.grad)
