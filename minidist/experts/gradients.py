"""Which gradients are summed over which ranks, and divided by what.

p ranks share a batch. The loss is the mean of their losses, each of which is a mean over the rank's
own tokens. So a gradient is the sum of what the ranks' losses give, divided by p. Data parallelism
sees to that for what all ranks have. An expert is on one of e ranks, and has p / e replicas. The
tokens of e ranks have come to it, and backward has summed over them. What is left is the sum over
the replicas, and the division by p. Who takes the mean over the replicas divides by p / e, and the
gradient is e times too large. Adam divides it by its usual size, so a curve of losses hides it.

Lesson: experts.
"""

from typing import Any

import torch
import torch.distributed as dist

from minidist.experts.exchange import Group
from minidist.tensor_parallel.layers import local


def averaged(weight: Any, ranks: int, replicas: Group) -> torch.Tensor:
    """An expert's weights, as this rank has them. Their gradient is divided by `ranks` and summed
    over the `replicas`.

    In autograd and not in a hook: so it is right in any wrapper, and for several backward passes a
    step. Each of them sends a message, and waits for it."""
    own: torch.Tensor = local(weight)
    return own if ranks == 1 else _Averaged.apply(own, ranks, replicas)


class _Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, ranks: int, replicas: Group) -> torch.Tensor:
        ctx.ranks, ctx.replicas = ranks, replicas
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gradient = gradient / ctx.ranks
        if ctx.replicas is not None:
            dist.all_reduce(gradient, group=ctx.replicas)
        return gradient, None, None
