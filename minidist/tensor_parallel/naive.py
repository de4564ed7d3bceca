"""The idea, in thirty lines: two linear layers, of which each rank computes its share.

    y = act(x A^T) B^T  =  sum over ranks r of  act(x A_r^T) B_r^T

Rank r has A_r, its rows of A, and B_r, its columns of B: N-th parts. Forward needs one all_reduce,
of y. In backward each rank knows only what its own features did to x, so the gradient of x needs
one as well. What the other files add: messages that travel while backward computes, attention,
vocabulary, dropout, any model by a plan. Lesson: feature_splitting.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class NaiveTensorParallelMLP(nn.Module):
    """This rank's share of `down(act(up(x)))`. x and the output are the same on every rank."""

    def __init__(self, up: nn.Linear, down: nn.Linear, act: nn.Module) -> None:
        super().__init__()
        rank, ranks, self.act = dist.get_rank(), dist.get_world_size(), act
        self.up, self.up_bias, self.down = (
            nn.Parameter(whole.detach().chunk(ranks, dim)[rank].clone())
            for whole, dim in ((up.weight, 0), (up.bias, 0), (down.weight, 1))
        )
        self.bias = nn.Parameter(down.bias.detach().clone())  # replicated, and added once

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.act(F.linear(Enter.apply(x), self.up, self.up_bias))
        return Leave.apply(F.linear(hidden, self.down)) + self.bias


class Enter(torch.autograd.Function):
    """x as it is; in backward, the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return Leave.apply(grad)


class Leave(torch.autograd.Function):
    """The sum of the ranks' y; in backward, the gradient as it is."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        total = y.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad
