"""The course's one oracle: does a strategy train as one process does?

Rank r takes every p-th example of each batch, from the r-th on; one process takes the whole batch.
After every step the weights, the buffers, the optimizer's states and the loss must be the same. In
float64 that is 12 digits of 16: sums in another order differ in the last ones, and a wrong
average does not.

To read: `check` below, then `job` (the training, alone and on a rank) and `differences` (what it
leaves, and how far two of them are apart).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import minidist as md
from minidist.instruments.parity.differences import differs, missing, relative_difference
from minidist.instruments.parity.job import Data, Found, Job, Loss, Step
from minidist.machine.runtime import Pool

__all__ = [
    "Parity",
    "ParityError",
    "check",
    "cross_entropy",
    "digits_mlp",
    "momentum",
    "relative_difference",
    "train_step",
]

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-4}


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
    weights: Callable[[Any], Mapping[str, torch.Tensor]] | None = None,
    world_size: int = 2,
    clip: float | None = None,
    steps: int = 4,
    batch_size: int | None = None,
    dtype: torch.dtype = torch.float64,
    tolerance: float | None = None,
    ranks: Pool | None = None,
) -> Parity:
    """Train `model()` by `strategy` on ranks and by one process, and compare them.

        md.parity.check(md.DistributedDataParallel, world_size=4)

    strategy: called on each rank with its model; returns the module to train, or that module and
        its optimizer. Weights are compared by the names in its `state_dict()` (a leading
        "module." does not count), optimizer states by the same names.
    model, optimizer: functions that make a new model, and an optimizer for parameters. `model` is
        called with torch's seed set to 0, in every process.
    data: inputs and targets, examples first; the digits, if None. batch_size: 16 for each rank.
    step: one step of training on a rank, for strategies with a loop of their own; see `train_step`.
    weights: for a wrapper whose `state_dict()` gives something else: called on each rank with the
        module, it returns whole parameters by the names of the bare model. Only these are compared
        then. (Optimizer states are seen all the same, one step later, in the weights.)
    clip: the largest norm of the gradients. The one process clips by it; `step` clips as it does.
    tolerance: the largest relative difference, max|a - b| / max|b| of a tensor. None: 1e-12 in
        float64, 1e-4 in float32.
    ranks: a pool that is there already; `world_size` is then its own.

    A rank compares what it has, whole tensors or pieces of them; together the ranks must have all.

    A model with batch norm takes means over the examples that it sees, and those of a rank are only
    its own. So for such a model the one process goes through the ranks' shares one by one, from
    the same buffers, and adds up the gradients; buffers are compared with those after the rank's
    own share, and the next step begins with rank 0's. So it does for a model that draws random
    numbers, such as dropout's: each rank begins each step with numbers of its own, and the one
    process goes through its share with the same ones.

    Limits: the one process does not run `step`: if that draws random numbers, or takes the share in
    parts through a model with dropout, the two differ. On a GPU they draw others. All ranks begin
    with equal weights, so it is not seen that a strategy does not broadcast them.

    Returns a `Parity`. Raises ParityError that names the first tensor that differs, by how much, at
    which step and on which rank; ValueError and TypeError for arguments that make no sense.
    Lesson: distributed_data_parallel.
    """
    world_size = ranks.world_size if ranks else world_size
    batch_size = 16 * world_size if batch_size is None else batch_size
    tolerance = TOLERANCES[dtype] if tolerance is None else tolerance
    if isinstance(model, nn.Module):
        raise TypeError("model must be a function that makes a module, not a module")
    if min(steps, batch_size, world_size) < 1 or batch_size % world_size:
        raise ValueError(
            f"parity.check trains 1 step or more, with a batch that {world_size} ranks can share "
            f"evenly, not {steps} steps of {batch_size} examples"
        )
    job = Job(strategy, model, optimizer, loss_fn, step, weights, clip, dtype)
    images, labels = md.zoo.digits(dtype) if data is None else data
    picks = [torch.arange(s * batch_size, (s + 1) * batch_size) % len(images) for s in range(steps)]
    images = images.to(dtype) if images.is_floating_point() else images
    batches = [(images[pick], labels[pick]) for pick in picks]
    alone = list(job.alone(batches, world_size))
    arguments = job.on_a_rank, batches, alone
    reports = ranks(*arguments) if ranks else md.launch(*arguments, world_size=world_size)
    return _verdict(reports, alone, tolerance)


def _verdict(reports: list[list[Found]], alone: list[Step], tolerance: float) -> Parity:
    largest = 0.0
    for number, (expected, *ranks) in enumerate(zip(alone, *reports, strict=True), start=1):
        told = [each for found in ranks for each in found.differences]
        losses = torch.tensor([found.loss for found in ranks], dtype=torch.float64)
        told.append(differs("the mean loss", relative_difference(losses.mean(), expected.loss)))
        largest = max(largest, *(difference for _, difference in told))
        problems = [words for words, difference in told if not difference <= tolerance]
        if not problems and ranks[0].pieces is not None:
            problems = missing(expected.state, [key for found in ranks for key in found.pieces])
        if problems:
            raise ParityError(f"step {number}, {problems[0]} ({tolerance:g} is allowed)")
    return Parity(len(reports), len(alone), len(reports[0][0].differences), tolerance, largest)
