"""Which gradients are summed over which ranks, and divided by what.

p ranks share a batch, and the loss is the mean of their losses. So a gradient is the sum of what
these give, divided by p. Data parallelism sees to that for what all ranks have. An expert is on one
of e ranks, and has p / e replicas. The tokens of e ranks have come to it, and backward has summed
over them. What is left is the sum over the replicas, and the division by p. Who takes the mean over
the replicas divides by p / e: the gradient is e times too large, and no losses of Adam's show it.

Lesson: experts.
"""

from typing import Any

import torch
import torch.distributed as dist

from minidist.experts.dispatch import Group
from minidist.tensor_parallel.layers import local


def averaged(weight: Any, divisor: int, replicas: Group) -> torch.Tensor:
    """An expert's weights, as this rank has them. Their gradient is divided by `divisor` and summed
    over the `replicas`: in autograd, so in any wrapper, and in each of several backward passes."""
    own: torch.Tensor = local(weight)
    return own if divisor == 1 else _Averaged.apply(own, divisor, replicas)


class _Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, divisor: int, replicas: Group) -> torch.Tensor:
        ctx.divisor, ctx.replicas = divisor, replicas
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gradient = gradient / ctx.divisor
        if ctx.replicas is not None:
            dist.all_reduce(gradient, group=ctx.replicas)
        return gradient, None, None
