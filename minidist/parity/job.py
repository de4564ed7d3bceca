"""The same training, in one process and on a rank (lesson: distributed_data_parallel)."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from minidist.parity.snapshot import State, buffers_of, copy_of, differences, state_of
from minidist.rank import device

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Data = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Step:
    """After a step of the one process. Buffers are those that each rank should have."""

    state: State
    buffers: list[State]
    loss: float


@dataclass
class Report:
    """What a rank found: the first difference (its step, and words for it), and its losses."""

    tensors: int = 0
    largest: float = 0.0
    first: tuple[int, str] | None = None
    losses: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Job:
    """What is trained, and how."""

    strategy: Callable[[nn.Module], Any]
    model: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    loss_fn: Loss
    step: Callable[..., torch.Tensor]
    weights: Callable[[Any], Mapping[str, torch.Tensor]] | None
    dtype: torch.dtype
    tolerance: float

    def make(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.model().to(self.dtype)

    def alone(self, batches: list[Data], world_size: int) -> Iterator[Step]:
        """Train on whole batches, or share by share where each share has its own means."""
        model = self.make()
        optimizer = self.optimizer(model.parameters())
        shares = [slice(None)]
        if any(isinstance(module, _BatchNorm) for module in model.modules()):
            shares = [slice(rank, None, world_size) for rank in range(world_size)]
        for inputs, targets in batches:
            before, after, losses = buffers_of(model), [], []
            optimizer.zero_grad()
            for share in shares:
                model.load_state_dict(before, strict=False)
                loss = self.loss_fn(model(inputs[share]), targets[share]) / len(shares)
                loss.backward()
                after.append(buffers_of(model))
                losses.append(loss.item())
            optimizer.step()
            model.load_state_dict(after[0], strict=False)
            after *= world_size // len(after)
            yield Step(state_of(model, optimizer), after, sum(losses))

    def on_a_rank(self, batches: list[Data], alone: list[Step]) -> Report:
        """Train by the strategy on this rank's shares, and compare after each step."""
        rank, world_size, here = dist.get_rank(), dist.get_world_size(), device()
        made = self.strategy(self.make().to(here))
        if made is None:
            raise TypeError("strategy must return the module to train, and it returns None")
        model, optimizer = made if isinstance(made, tuple) else (made, None)
        optimizer = optimizer or self.optimizer(model.parameters())
        report = Report()
        for number, (batch, expected) in enumerate(zip(batches, alone, strict=True), start=1):
            inputs, targets = (tensor[rank::world_size].to(here) for tensor in batch)
            loss = self.step(model, optimizer, inputs, targets, self.loss_fn)
            report.losses.append(loss.item())
            found, wanted = self.to_compare(model, optimizer, expected, rank)
            report.tensors = len(wanted)
            for words, difference in differences(found, wanted):
                report.largest = max(report.largest, difference)
                if report.first is None and not difference <= self.tolerance:
                    report.first = number, words
        return report

    def to_compare(
        self, model: Any, optimizer: torch.optim.Optimizer, expected: Step, rank: int
    ) -> tuple[State, State]:
        """What this rank has, and what it should have."""
        if self.weights is None:
            return state_of(model, optimizer), {**expected.state, **expected.buffers[rank]}
        found = {name: copy_of(tensor) for name, tensor in self.weights(model).items()}
        return found, {name: expected.state[name] for name, _ in self.make().named_parameters()}
