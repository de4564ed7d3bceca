"""A trial on a rank: by the strategy, and beside it alone."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fuzz.alone import Alone
from fuzz.random_models import data, make
from fuzz.strategies import STRATEGIES
from fuzz.trials import Trial
from minidist.instruments.parity.differences import differences
from minidist.saving import Checkpoints

TOLERANCE = 1e-9  # relative, of float64: Adam divides by gradients that may be tiny
STEPS = 3


def on_a_rank(trial: Trial, tolerance: float = TOLERANCE) -> str:
    """Words for the first difference, or none."""
    alone = (InParts if trial.model == "batch norm" else Alone)(trial, made(trial))
    ours = STRATEGIES[trial.strategy](trial, made(trial))
    compare = Comparison(tolerance)
    if trial.evaluation == "inference_mode":
        compare.everything(ours, alone, next(data(trial, 0)))
    for step in range(STEPS):
        batches = list(data(trial, step))
        wanted, found = alone.step(batches), torch.zeros(1, dtype=torch.float64)
        found += ours.step(batches)
        dist.all_reduce(found)
        compare.number("the mean loss", found.item() / ours.ranks, wanted)
        if trial.evaluation or step == STEPS - 1:
            compare.everything(ours, alone, batches[0])
        everyone: list[Any] = [None] * ours.ranks  # all ranks stop at once
        dist.all_gather_object(everyone, next(iter(compare.problems), ""))
        if any(everyone):
            return f"step {step}: {next(filter(None, everyone))}"
        if trial.checkpoint and step == 0:
            ours = _from_a_checkpoint(ours)
    return ""


def made(trial: Trial) -> Any:
    """The trial's model, for a pipeline as a sequence."""
    module: Any = make(trial)
    wanted = trial.strategy == "pipeline" and not isinstance(module, nn.Sequential)
    return module.sequential() if wanted else module


def _from_a_checkpoint(before: Alone) -> Alone:
    """Another one, of other weights until it loads what is saved here."""
    trial = before.trial
    module = made(trial)
    with torch.no_grad():
        for value in [*module.parameters(), *module.buffers()]:
            value.add_(1)
    other = STRATEGIES[trial.strategy](trial, module)
    with Checkpoints(trial.checkpoint) as checkpoints:
        checkpoints.save(1, model=before.model, optimizer=before.optimizers[0])
        checkpoints.load(model=other.model, optimizer=other.optimizers[0])
    return other


class Comparison:
    """With one process. problems: words for what differs by more than the tolerance, relatively."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.problems: list[str] = []

    def number(self, what: str, ours: float, wanted: float) -> None:
        if not math.isclose(ours, wanted, rel_tol=self.tolerance):
            self.problems.append(f"{what} is {ours}, alone it is {wanted}")

    def everything(self, ours: Alone, alone: Alone, batch: Any) -> None:
        """What an evaluation finds, all weights and all buffers."""
        # Evaluated first: a training pass leaves buffers that differ, and then rank 0's count.
        evaluated = [each.evaluate(*batch) for each in (ours, alone)]
        self.number("the loss in evaluation", *evaluated)
        expected = {name: value.detach() for name, value in alone.state().items()}
        for words, difference in differences(ours.state(), expected):
            if not difference <= self.tolerance:
                self.problems.append(words)


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
