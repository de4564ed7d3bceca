"""The course's one oracle (lesson 4): does a strategy train as one process does?

Rank r takes every p-th example of each batch, from the r-th on; one process takes the whole batch.
After every step the weights, the buffers, the optimizer's states and the loss must be the same. In
float64 that is 12 digits of 16: sums in another order differ in the last ones, and a wrong
average does not.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

import minidist as md
from minidist.runtime import Pool

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-4}

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Data = tuple[torch.Tensor, torch.Tensor]
State = dict[str, torch.Tensor]


class ParityError(AssertionError):
    """A strategy does not train as one process does."""


@dataclass(frozen=True)
class Parity:
    """What was compared, and how large the largest relative difference was."""

    world_size: int
    steps: int
    tensors: int
    tolerance: float
    largest: float

    def __repr__(self) -> str:
        return (
            f"equal to one process, to {self.tolerance:g}: {self.tensors} tensors and the loss, "
            f"after each of {self.steps} steps, on {self.world_size} ranks"
        )


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over all predictions: outputs (*, classes), targets (*,)."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def digits_mlp() -> nn.Module:
    """The model that `check` trains if it is given none: (B, 64) to (B, 10)."""
    return md.zoo.mlp(64, 32, 10)


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that `check` takes if it is given none: SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    loss_fn: Loss,
) -> torch.Tensor:
    """A step of training, as anybody writes it. Returns the loss."""
    optimizer.zero_grad()
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss


def check(
    strategy: Callable[[nn.Module], Any],
    *,
    model: Callable[[], nn.Module] = digits_mlp,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = momentum,
    data: Data | None = None,
    loss_fn: Loss = cross_entropy,
    step: Callable[..., torch.Tensor] = train_step,
    world_size: int = 2,
    steps: int = 4,
    batch_size: int | None = None,
    dtype: torch.dtype = torch.float64,
    tolerance: float | None = None,
    ranks: Pool | None = None,
) -> Parity:
    """Train `model()` by `strategy` on ranks and by one process, and compare them. Lesson 4.

        md.parity.check(md.DistributedDataParallel, world_size=4)

    strategy: called on each rank with its model; returns the module to train, or that module and
        its optimizer. Weights are compared by the names in its `state_dict()` (a leading
        "module." does not count), optimizer states by the same names.
    model, optimizer: functions that make a new model, and an optimizer for parameters. `model` is
        called with torch's seed set to 0, in every process.
    data: inputs and targets, examples first; the digits, if None. batch_size: 16 for each rank.
    step: one step of training on a rank, for strategies with a loop of their own; see `train_step`.
    tolerance: the largest relative difference, max|a - b| / max|b| of a tensor.
    ranks: a pool that is there already; `world_size` is then its own.

    A model with batch norm takes means over the examples that it sees, and those of a rank are only
    its own. So for such a model the one process goes through the ranks' shares one by one, from
    the same buffers, and adds up the gradients; buffers are compared with those after the rank's
    own share, and the next step begins with rank 0's.

    Returns a `Parity`. Raises ParityError that names the first tensor that differs, by how much, at
    which step and on which rank; ValueError and TypeError for arguments that make no sense.
    """
    world_size = ranks.world_size if ranks else world_size
    batch_size = 16 * world_size if batch_size is None else batch_size
    if tolerance is None:
        if dtype not in TOLERANCES:
            raise ValueError(f"parity.check needs a tolerance for {dtype}")
        tolerance = TOLERANCES[dtype]
    if isinstance(model, nn.Module):
        raise TypeError("model must be a function that makes a module, not a module")
    if min(steps, batch_size, world_size) < 1 or batch_size % world_size:
        raise ValueError(
            f"parity.check trains 1 step or more, with a batch that {world_size} ranks can share "
            f"evenly, not {steps} steps of {batch_size} examples"
        )
    job = _Job(strategy, model, optimizer, loss_fn, step, dtype, tolerance)
    images, labels = md.zoo.digits(dtype) if data is None else data
    picks = [torch.arange(s * batch_size, (s + 1) * batch_size) % len(images) for s in range(steps)]
    batches = [(_to(images[pick], dtype), labels[pick]) for pick in picks]
    alone = list(job.alone(batches, world_size))
    arguments = job.on_a_rank, batches, alone
    reports = ranks(*arguments) if ranks else md.launch(*arguments, world_size=world_size)
    return _verdict(reports, alone, tolerance)


@dataclass(frozen=True)
class _Step:
    """After a step of the one process. Buffers are those that each rank should have."""

    state: State
    buffers: list[State]
    loss: float


@dataclass
class _Report:
    """What a rank found: the first difference (its step, and words for it), and its losses."""

    largest: float = 0.0
    first: tuple[int, str] | None = None
    losses: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class _Job:
    """The same training, alone and on a rank."""

    strategy: Callable[[nn.Module], Any]
    model: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    loss_fn: Loss
    step: Callable[..., torch.Tensor]
    dtype: torch.dtype
    tolerance: float

    def make(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.model().to(self.dtype)

    def alone(self, batches: list[Data], world_size: int) -> Iterator[_Step]:
        """Train on whole batches, or share by share where each share has its own means."""
        model = self.make()
        optimizer = self.optimizer(model.parameters())
        shares = [slice(None)]
        if any(isinstance(module, _BatchNorm) for module in model.modules()):
            shares = [slice(rank, None, world_size) for rank in range(world_size)]
        for inputs, targets in batches:
            before, after, losses = _buffers(model), [], []
            optimizer.zero_grad()
            for share in shares:
                model.load_state_dict(before, strict=False)
                loss = self.loss_fn(model(inputs[share]), targets[share]) / len(shares)
                loss.backward()
                after.append(_buffers(model))
                losses.append(loss.item())
            optimizer.step()
            model.load_state_dict(after[0], strict=False)
            after *= world_size // len(after)
            yield _Step(_state(model, optimizer), after, sum(losses))

    def on_a_rank(self, batches: list[Data], alone: list[_Step]) -> _Report:
        """Train by the strategy on this rank's shares, and compare after each step."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        device = md.rank.device()
        made = self.strategy(self.make().to(device))
        model, optimizer = made if isinstance(made, tuple) else (made, None)
        optimizer = optimizer or self.optimizer(model.parameters())
        report = _Report()
        for number, (batch, expected) in enumerate(zip(batches, alone, strict=True), start=1):
            inputs, targets = (tensor[rank::world_size].to(device) for tensor in batch)
            loss = self.step(model, optimizer, inputs, targets, self.loss_fn)
            report.losses.append(loss.item())
            wanted = {**expected.state, **expected.buffers[rank]}
            for words, difference in _compare(_state(model, optimizer), wanted):
                report.largest = max(report.largest, difference)
                if report.first is None and not difference <= self.tolerance:
                    report.first = number, words
        return report


def _to(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().clone()


def _buffers(model: nn.Module) -> State:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {k: _copy(v) for k, v in model.state_dict().items() if k not in parameters}


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Weights, buffers and optimizer states, by the names of the bare module."""
    state = dict(model.state_dict())
    consume_prefix_in_state_dict_if_present(state, "module.")
    states = _states(model, optimizer)
    sharded = isinstance(model, md.FullyShardedDataParallel)
    bare = model if sharded else getattr(model, "module", model)
    for name, parameter in bare.named_parameters():
        for key, value in states.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                state[f"{key} of {name}"] = value
    return {name: _copy(value) for name, value in state.items()}


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Of each parameter, whole also where a rank has only a part (lessons 8 and 9)."""
    if isinstance(model, md.FullyShardedDataParallel):
        whole = model.optim_state_dict(optimizer)
    elif isinstance(optimizer, md.ZeroRedundancyOptimizer):
        for rank in range(dist.get_world_size()):
            optimizer.consolidate_state_dict(rank)
        whole = optimizer.state_dict()
    else:
        return optimizer.state
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {parameters[i]: state for i, state in whole["state"].items()}


def _compare(ours: State, wanted: State) -> Iterator[tuple[str, float]]:
    """Each tensor's difference, and words for it."""
    for name, b in wanted.items():
        a = ours.get(name)
        if a is None:
            yield f"{name} is missing", math.inf
        elif a.shape != b.shape:
            yield f"{name} has shape {tuple(a.shape)}, not {tuple(b.shape)}", math.inf
        else:
            yield _differs(name, relative_difference(a, b))
    for name in ours:
        if name not in wanted:
            yield f"{name} is there, and one process has none", math.inf


def _differs(what: str, difference: float) -> tuple[str, float]:
    return f"{what} differs from one process, relatively by {difference:.1e}", difference


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """max|a - b| / max|b|: 0 if all elements are equal, nan if one is not a number. Lesson 4.

    Raises ValueError if the shapes differ, which broadcasting would hide.
    """
    if a.shape != b.shape:
        raise ValueError(f"tensors of shapes {tuple(a.shape)} and {tuple(b.shape)} do not compare")
    if a.numel() == 0 or torch.equal(a, b):
        return 0.0
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    return ((a - b).abs().max() / b.abs().max()).item()


def _verdict(reports: list[_Report], alone: list[_Step], tolerance: float) -> Parity:
    differences = [
        (step, f"rank {rank}: {words}")
        for rank, report in enumerate(reports)
        if report.first is not None
        for step, words in [report.first]
    ]
    largest = max(report.largest for report in reports)
    for number, expected in enumerate(alone, start=1):
        mean = torch.tensor([report.losses[number - 1] for report in reports], dtype=torch.float64)
        loss = torch.tensor(expected.loss, dtype=torch.float64)
        words, difference = _differs("the mean loss", relative_difference(mean.mean(), loss))
        largest = max(largest, difference)
        if not difference <= tolerance:
            differences.append((number, words))
    if differences:
        step, words = min(differences, key=lambda difference: difference[0])
        raise ParityError(f"step {step}, {words} ({tolerance:g} is allowed)")
    tensors = len(alone[0].state | alone[0].buffers[0])
    return Parity(len(reports), len(alone), tensors, tolerance, largest)
