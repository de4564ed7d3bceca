"""Training steps of one model in several ways, timed in turns on the ranks of a pool."""

import math
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import minidist as md
from minidist.fully_sharded import by_class
from minidist.instruments.bench.turns import Times, in_turns
from minidist.machine.runtime import Pool

WARM = 3  # steps before the first that counts: buffers are made, memory is touched
CLOSE = 1e-4  # how far losses in float32 may be apart, relatively
BACKENDS = ["gloo", "shm"]

Batch = tuple[torch.Tensor, torch.Tensor]
Wrapped = tuple[nn.Module, torch.optim.Optimizer]


class Trainer(NamedTuple):
    """A way to train. step: what is timed, of inputs and targets; it returns the loss on the ranks
    that know it, else None. optimizer: steps after that, if `step` is forward and backward only."""

    step: Callable[[torch.Tensor, torch.Tensor], float | None]
    optimizer: torch.optim.Optimizer | None = None


Make = Callable[[], Trainer]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """That of a `Trainer` whose step has none."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def mean_of_squares(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Forward and backward; returns the loss."""
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    return loss.item()


def transformer(layers: int, width: int, length: int) -> md.zoo.Transformer:
    """The model that is trained. Its head is not tied: torch's pipelining knows no ties."""
    model = md.zoo.Transformer(256, length, width, heads=4, layers=layers)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def vectors(rows: int, width: int) -> Batch:
    """Inputs and targets (rows, width), the same on every rank."""
    inputs, targets = torch.randn(2, rows, width, generator=torch.Generator().manual_seed(0))
    return inputs, targets


def text(rows: int, length: int) -> Batch:
    """So many rows of torch's help pages."""
    inputs, targets = md.zoo.text(length)
    return inputs[:rows], targets[:rows]


def ddp(model: nn.Module, kind: type[torch.optim.Optimizer], **options: Any) -> Wrapped:
    """Every rank has everything."""
    return md.DistributedDataParallel(model), kind(model.parameters(), **options)


def zero_1(model: nn.Module, kind: type[torch.optim.Optimizer], **options: Any) -> Wrapped:
    """Every rank has the optimizer states of its shard."""
    optimizer = md.ZeroRedundancyOptimizer(model.parameters(), kind, **options)
    return md.DistributedDataParallel(model), optimizer


def fsdp(model: nn.Module, kind: type[torch.optim.Optimizer], **options: Any) -> Wrapped:
    """Every rank has its shard of everything."""
    wrapped = md.FullyShardedDataParallel(model, auto_wrap_policy=by_class(md.zoo.Block))
    return wrapped, kind(wrapped.parameters(), **options)


STRATEGIES: dict[str, Callable[..., Wrapped]] = {"DDP": ddp, "ZeRO, stage 1": zero_1, "FSDP": fsdp}


def measure(pool: Pool, ways: dict[str, Make], rounds: int, batch: Callable[[], Batch]) -> Times:
    """Seconds of each step, by way, taken in turns; it lasts as long as its slowest rank. Every way
    trains a model of its own on the same batch. Raises RuntimeError if they do not all come to the
    same loss."""
    by_rank = pool(_here, ways, rounds, batch, os.getpid())
    losses = {name: [each[name] for _, each in by_rank if each[name] is not None] for name in ways}
    first = next(iter(losses.values()))
    for name, known in losses.items():
        if not known or not all(math.isclose(loss, first[0], rel_tol=CLOSE) for loss in known):
            raise RuntimeError(f"{name} comes to the losses {known}, {next(iter(ways))} to {first}")
    return by_rank[0][0]


def _here(
    ways: dict[str, Make], rounds: int, batch: Callable[[], Batch], root: int
) -> tuple[Times, dict[str, float | None]]:
    """The times; and by way the loss of the last step, where it is known."""
    inputs, targets = batch()
    trainers = {name: make() for name, make in ways.items()}
    losses: dict[str, float | None] = {}

    def step(name: str) -> float:
        run, optimizer = trainers[name]
        dist.barrier()
        start = time.perf_counter()
        losses[name] = run(inputs, targets)
        seconds = time.perf_counter() - start
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        return seconds

    return in_turns({name: partial(step, name) for name in ways}, rounds, WARM, root), losses
