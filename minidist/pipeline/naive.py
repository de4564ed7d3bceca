"""The idea in one function: GPipe by plain sends and receives.

Every rank has a stage of the model. All micro-batches go forward through the stages, one behind the
other, so that all ranks soon have work; then their gradients come back. Everything else in this
room is about who does what when (`schedules`), and about what stages send each other (`executor`).
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn


def train_step(
    stage: nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    microbatches: int,
    shape: Sequence[int],
) -> torch.Tensor:
    """Forward and backward for one batch: adds to the `.grad` of this rank's stage. Returns the
    batch's loss on the last rank, and 0 on the others. Lesson: layer_splitting.

    inputs, targets: (rows, …), a multiple of `microbatches`. The first rank uses the inputs, and
        the last the targets. loss_fn returns a mean over its rows.
    shape: of one row of the activation that comes from the rank before. The first ignores it.
    """
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    dtype = next(stage.parameters()).dtype
    total = torch.zeros((), dtype=dtype)
    entered, left = [], []
    for x, target in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
        if rank > 0:
            x = torch.empty(len(x), *shape, dtype=dtype)
            dist.recv(x, rank - 1)
            x.requires_grad_()  # autograd's graph begins here, and the gradient ends here
        y = stage(x)
        if rank < last:
            dist.send(y.detach(), rank + 1)
        else:
            y = loss_fn(y, target) / microbatches
            total += y.detach()
        entered.append(x)
        left.append(y)
    for x, y in zip(entered, left, strict=True):
        gradient = None  # a loss's own is 1
        if rank < last:
            gradient = torch.empty_like(y)
            dist.recv(gradient, rank + 1)
        y.backward(gradient)
        if x.grad is not None:
            dist.send(x.grad, rank - 1)
    return total
