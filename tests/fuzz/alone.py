"""A trial's training in one process: what its script does, and what strategies are held against."""

import contextlib
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

import minidist as md
from fuzz.habits import HABITS
from fuzz.trials import Options, Trial
from minidist.instruments.parity import cross_entropy

OPTIMIZERS: dict[str, tuple[type[Optimizer], Options]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"lr": 1e-2}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5}),
}


def optimizers_of(trial: Trial, model: Any, **sharded: Any) -> list[Any]:
    """One of all parameters; or two, one of matrices and one of what else there is. sharded: of a
    `ZeroRedundancyOptimizer`."""
    shares = [list(model.parameters())]
    if len(trial.optimizers) == 2:
        shares = [[p for p in shares[0] if (p.dim() > 1) == matrices] for matrices in (True, False)]
    made: list[Any] = []
    for share, name in zip(shares, trial.optimizers, strict=True):
        kind, rates = OPTIMIZERS[name]
        if share:  # a stage may have no parameter
            ours = md.ZeroRedundancyOptimizer
            made.append(ours(share, kind, **sharded, **rates) if sharded else kind(share, **rates))
    return made


class Alone:
    """One process, with the whole batch: what the others are held against."""

    model: Any

    def __init__(self, trial: Trial, module: nn.Module) -> None:
        self.trial = trial
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.options, self.steps = trial.options, 0
        places = Counter(p for _, p in module.named_parameters(remove_duplicate=False))
        named = module.named_parameters()
        self.names = [name for name, p in named if p.requires_grad and places[p] == 1]
        self.optimizers = self.wrap(module)
        self.habit("wrapped")

    def wrap(self, module: nn.Module) -> list[Any]:
        """Makes the model, and returns its optimizers."""
        self.model = module
        return optimizers_of(self.trial, self.model)

    # ---- what the script does besides ------------------------------------------------------

    def habit(self, when: str) -> None:
        """What the script does now, if it does something."""
        habit = HABITS[self.trial.habit]
        if habit.when == when:
            habit.do(self, self.steps)

    def chosen(self) -> list[nn.Parameter]:
        """One of the parameters that are trained and not tied, if it is on this rank."""
        wanted = self.names[self.trial.number % len(self.names)]
        named = self.model.named_parameters()
        return [p for name, p in named if name.replace("module.", "") == wanted]

    # ---- training --------------------------------------------------------------------------

    def share(self) -> slice:
        """This rank's rows of the batch."""
        return slice(None)

    def outputs(self, inputs: torch.Tensor) -> torch.Tensor:
        habit = HABITS[self.trial.habit]
        return habit.do(self, inputs) if habit.when == "outputs" else self.model(inputs)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean over the rows."""
        return cross_entropy(outputs, targets)

    def backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """Adds this pass's part to the gradients. Returns the mean loss of this rank's rows."""
        loss = self.loss(self.outputs(inputs), targets)
        (loss / self.trial.passes).backward()
        return loss.item()

    def step(self, batches: list[Any]) -> float:
        """A step of one backward pass for each batch. Returns the mean loss of this rank's rows."""
        self.habit("step")
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        losses = []
        for number, (inputs, targets) in enumerate(batches, start=1):
            with self.waits(number < len(batches)):
                losses.append(self.backward(inputs[self.share()], targets[self.share()]))
        self.habit("gradients")
        if self.trial.clip is not None:
            self.clip(self.trial.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        self.steps += 1
        return sum(losses) / len(losses)

    def waits(self, waits: bool) -> Any:
        """Around a backward pass whose gradients may wait for those of the next."""
        return contextlib.nullcontext()

    def clip(self, norm: float) -> None:
        clip_grad_norm_(self.model.parameters(), norm)

    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """The loss of the whole batch, on every rank."""
        self.model.eval()
        with getattr(torch, self.trial.evaluation or "no_grad")():
            loss = self.loss(self.model(inputs), targets).item()
        self.model.train()
        return loss

    def state(self) -> dict[str, torch.Tensor]:
        """The weights and buffers of the whole model, on every rank."""
        return dict(self.model.state_dict())
