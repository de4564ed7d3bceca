"""What the benchmark of averaging trains: images and text, and what each way came to
(lesson: beyond_gradients)."""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import minidist as md

BATCH = 16  # examples a rank
HELD_OUT = 512  # examples that nobody trains on: the loss is theirs
RATE = 0.5
PERIOD = 16  # the longest, and the steps of which one time consists

Pair = tuple[torch.Tensor, torch.Tensor]


class Task(NamedTuple):
    """A model, its inputs and its targets."""

    model: Callable[[], nn.Module]
    data: Callable[[], Pair]

    def parameters(self) -> int:
        """How many the model has."""
        return sum(p.numel() for p in self.model().parameters())

    def batches(self, share: int, shares: int) -> Iterator[Pair]:
        """Without end: of BATCH examples for each share, this one's. No two have the same."""
        inputs, targets = (each[:-HELD_OUT] for each in self.data())
        for first in count(0, BATCH * shares):
            own = torch.arange(first + share, first + BATCH * shares, shares) % len(inputs)
            yield inputs[own], targets[own]

    @torch.no_grad()
    def loss(self, model: nn.Module) -> float:
        """Of the examples that were held out."""
        inputs, targets = (each[-HELD_OUT:] for each in self.data())
        return F.cross_entropy(model(inputs), targets).item()


def characters() -> nn.Module:
    """Logits of the byte after 8 others: a network for their vectors, side by side."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = (nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 256))
        return nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), *head)


def text() -> Pair:
    """Pieces of 8 bytes, and the byte after each."""
    inputs, targets = md.zoo.text(8)
    return inputs, targets[:, -1]


TASKS = {
    "digits": Task(partial(md.zoo.mlp, 64, 256, 10), md.zoo.digits),
    "text": Task(characters, text),
}


class Outcome(NamedTuple):
    """Bytes a step of the rank that sends most, and the loss at the end."""

    nbytes: float
    loss: float


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of every way."""
    return torch.optim.SGD(parameters, lr=RATE)


def train(model: nn.Module, optimizer: Any, batches: Iterator[Pair], steps: int) -> float:
    """So many steps; returns seconds a step."""
    start = time.perf_counter()
    for _, (inputs, targets) in zip(range(steps), batches, strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return (time.perf_counter() - start) / steps
