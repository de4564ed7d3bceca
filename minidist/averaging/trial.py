"""What a way to average learns, and what it sends: replicas that train on a task, and one process
that trains with the batches of all of them (lesson: beyond_gradients)."""

from collections.abc import Callable, Collection, Iterable
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from minidist.averaging.flat_mean import average, drift
from minidist.instruments.link import Link

BATCH = 16  # examples of a rank in a step


class Task(NamedTuple):
    """model: makes it. owner: of each example, the rank that has it."""

    model: Callable[[], nn.Module]
    inputs: torch.Tensor
    targets: torch.Tensor
    owner: torch.Tensor

    def batch(self, ranks: Iterable[int], step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The examples that these ranks train on in a step, from 1 on."""
        owned = [(self.owner == rank).nonzero().flatten() for rank in ranks]
        picks = torch.arange(BATCH * (step - 1), BATCH * step)
        rows = torch.cat([own[picks % len(own)] for own in owned])
        return self.inputs[rows], self.targets[rows]

    def backward(self, model: nn.Module, ranks: Iterable[int], step: int) -> None:
        inputs, targets = self.batch(ranks, step)
        F.cross_entropy(model(inputs), targets).backward()

    @torch.no_grad()
    def loss(self, model: nn.Module) -> float:
        """Of the first 2,000 examples, whoever has them."""
        return F.cross_entropy(model(self.inputs[:2000]), self.targets[:2000]).item()


class Trained(NamedTuple):
    """Of `steps` steps: kilobytes a step on the cable of rank 0, ms a step, the loss of the mean of
    the replicas, and that of rank 0's own. By watched step: the loss of the mean, and the drift."""

    kilobytes: float
    ms: float
    loss: float
    own: float
    losses: dict[int, float]
    drift: dict[int, float]


def replicas(
    wrap: Callable[[nn.Module], tuple[nn.Module, Any]],
    task: Task,
    steps: int,
    watch: Collection[int] = (),
) -> Trained:
    """Call it on every rank, each in a node of its own. wrap: makes the model that trains and its
    optimizer, from a bare model. Lesson: beyond_gradients."""
    rank, bare = dist.get_rank(), task.model()
    (model, optimizer), seen = wrap(bare), dict[int, torch.Tensor]()
    dist.barrier()
    before, start = Link.sent_by_node(rank), perf_counter()
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        task.backward(model, [rank], step)
        optimizer.step()
        if step in watch:
            seen[step] = nn.utils.parameters_to_vector(bare.parameters()).detach()
    seconds = (perf_counter() - start) / steps
    dist.barrier()
    nbytes, own = (Link.sent_by_node(rank) - before) / steps, task.loss(bare)
    seen[steps] = nn.utils.parameters_to_vector(bare.parameters()).detach()
    apart, losses = dict[int, float](), dict[int, float]()
    for step, weights in seen.items():
        apart[step] = drift([weights])
        average([weights])
        nn.utils.vector_to_parameters(weights, bare.parameters())
        losses[step] = task.loss(bare)
    return Trained(nbytes / 1e3, 1e3 * seconds, losses[steps], own, losses, apart)


def one_process(
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
    task: Task,
    steps: int,
    ranks: Collection[int],
) -> dict[int, float]:
    """The loss of one process after each fourth step, with the batches of these ranks together: of
    all, that is DistributedDataParallel. Lesson: beyond_gradients."""
    model = task.model()
    stepper, losses = optimizer(model.parameters()), {0: task.loss(model)}
    for step in range(1, steps + 1):
        stepper.zero_grad()
        task.backward(model, ranks, step)
        stepper.step()
        if step % 4 == 0:
            losses[step] = task.loss(model)
    return losses
