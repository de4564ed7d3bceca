"""The same training, in one process and on a rank (lesson: distributed_data_parallel)."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from minidist.common.replay import Replay
from minidist.instruments.parity.differences import (
    State,
    buffers_of,
    copy_of,
    differences,
    state_of,
)
from minidist.instruments.watching.snapshot import Key
from minidist.rank import device

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Data = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Step:
    """After a step of the one process. Buffers are those that each rank should have."""

    state: State
    buffers: list[State]
    loss: torch.Tensor


@dataclass(frozen=True)
class Found:
    """After a step on a rank: how far each tensor is from that of the one process, in words too;
    and which pieces are this rank's (None: it was told whole weights)."""

    differences: list[tuple[str, float]]
    pieces: list[Key] | None
    loss: float


@dataclass(frozen=True)
class Job:
    """What is trained, and how."""

    strategy: Callable[[nn.Module], Any]
    model: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    loss_fn: Loss
    step: Callable[..., torch.Tensor]
    weights: Callable[[Any], Mapping[str, torch.Tensor]] | None
    clip: float | None
    dtype: torch.dtype

    def make(self) -> nn.Module:
        with _random_numbers(0, 0):
            return self.model().to(self.dtype)

    def alone(self, batches: list[Data], world_size: int) -> Iterator[Step]:
        """Train on whole batches, or share by share where each share has its own means, or its own
        random numbers."""
        model = self.make()
        optimizer = self.optimizer(model.parameters())
        shares = [slice(None)]
        if _draws(model, batches[0][0]) or any(isinstance(m, _BatchNorm) for m in model.modules()):
            shares = [slice(rank, None, world_size) for rank in range(world_size)]
        for number, (inputs, targets) in enumerate(batches, start=1):
            before, after, losses = buffers_of(model), [], []
            optimizer.zero_grad()
            for rank, share in enumerate(shares):
                model.load_state_dict(before, strict=False)
                with _random_numbers(number, rank):
                    loss = self.loss_fn(model(inputs[share]), targets[share]) / len(shares)
                    loss.backward()
                after.append(buffers_of(model))
                losses.append(loss.detach())
            nn.utils.clip_grad_norm_(model.parameters(), self.clip or float("inf"))
            optimizer.step()
            model.load_state_dict(after[0], strict=False)
            after *= world_size // len(after)
            yield Step(state_of(model, optimizer, {})[0], after, torch.stack(losses).sum())

    def on_a_rank(self, batches: list[Data], alone: list[Step]) -> list[Found]:
        """Train by the strategy on this rank's shares, and compare after each step."""
        rank, world_size, here = dist.get_rank(), dist.get_world_size(), device()
        made = self.strategy(self.make().to(here))
        model, optimizer = made if isinstance(made, tuple) else (made, None)
        optimizer = optimizer or self.optimizer(model.parameters())
        report = []
        for number, (batch, expected) in enumerate(zip(batches, alone, strict=True), start=1):
            inputs, targets = (tensor[rank::world_size].to(here) for tensor in batch)
            with _random_numbers(number, rank):
                loss = self.step(model, optimizer, inputs, targets, self.loss_fn)
            wanted, pieces = {**expected.state, **expected.buffers[rank]}, None
            if self.weights is None:
                found, pieces = state_of(model, optimizer, wanted)
            else:
                found = {name: copy_of(tensor) for name, tensor in self.weights(model).items()}
                wanted = {name: wanted[name] for name, _ in self.make().named_parameters()}
            told = [(f"rank {rank}: {words}", off) for words, off in differences(found, wanted)]
            report.append(Found(told, pieces, loss.item()))
        return report


@contextmanager
def _random_numbers(step: int, rank: int) -> Iterator[None]:
    """Those with which this rank begins this step."""
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(1000 * step + rank)
        yield


def _draws(model: nn.Module, inputs: torch.Tensor) -> bool:
    """Whether a forward pass takes random numbers, as those of dropout."""
    with Replay(model, [inputs]).same_again():
        before = torch.get_rng_state()
        model(inputs)
        return not torch.equal(before, torch.get_rng_state())
