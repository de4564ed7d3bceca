"""A trial on a rank: by the strategy, and beside it alone."""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minidist.fuzz.alone import Alone
from minidist.fuzz.random_models import data, make
from minidist.fuzz.strategies import STRATEGIES
from minidist.fuzz.trials import Trial
from minidist.parity.snapshot import differences

TOLERANCE = 1e-9  # relative, of float64: Adam divides by gradients that may be tiny
STEPS = 3


def on_a_rank(trial: Trial) -> str:
    """Words for the first difference, or none."""
    alone = (InParts if trial.model == "batch norm" else Alone)(trial, _made(trial))
    ours = STRATEGIES[trial.strategy](trial, _made(trial))
    averages = [(alone.average(), ours.average())] if trial.averaged else []
    for step in range(STEPS):
        batches = list(data(trial, step))
        wanted, found = alone.step(batches), torch.zeros(1, dtype=torch.float64)
        found += ours.step(batches)
        dist.all_reduce(found)
        problems = [_apart("the mean loss", found.item() / ours.ranks, wanted)]
        problems += _different(ours, alone, batches[0])
        for one, many in averages:
            one.follow(alone)
            many.follow(ours)
            problems += _different(many, one, batches[0], "of the average, ")
        everyone: list[Any] = [None] * ours.ranks  # all ranks stop at once
        dist.all_gather_object(everyone, next(filter(None, problems), ""))
        if any(everyone):
            return f"step {step}: {next(filter(None, everyone))}"
    return ""


def _made(trial: Trial) -> Any:
    module: Any = make(trial)
    wanted = trial.strategy == "pipeline" and not isinstance(module, nn.Sequential)
    return module.sequential() if wanted else module


def _different(ours: Alone, alone: Alone, batch: Any, what: str = "") -> Iterator[str]:
    # Evaluated first: a training pass leaves buffers that differ, and then rank 0's count.
    yield _apart(f"{what}the loss in evaluation", ours.evaluate(*batch), alone.evaluate(*batch))
    expected = {name: value.detach() for name, value in alone.state().items()}
    for words, difference in differences(ours.state(), expected):
        yield "" if difference <= TOLERANCE else what + words


def _apart(what: str, ours: float, wanted: float) -> str:
    equal = math.isclose(ours, wanted, rel_tol=TOLERANCE)
    return "" if equal else f"{what} is {ours}, alone it is {wanted}"


class InParts(Alone):
    """One process with batch norms that see at once what those of a rank see at once."""

    def backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        before = [buffer.clone() for buffer in self.model.buffers()]
        losses, rows = [], torch.arange(len(inputs))
        if count := self.options.get("microbatches"):
            parts = list(rows.tensor_split(count))
        else:  # rank 0 comes last: its buffers stay
            parts = [rows[rank :: self.ranks] for rank in reversed(range(self.ranks))]
        for part in parts:
            if not count:  # each replica has its own
                for buffer, value in zip(self.model.buffers(), before, strict=True):
                    buffer.copy_(value)
            loss = self.loss(self.model(inputs[part]), targets[part]) * len(part) / len(rows)
            (loss / self.trial.passes).backward()
            losses.append(loss.item())
        return sum(losses)
