"""What keeps experts evenly busy, and how uneven they are. Lesson: experts."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minidist.experts.router import Router


def imbalance(counts: Tensor, ranks: int | None = None) -> float:
    """The rows of the fullest expert over their mean: 1 is even. ranks: of the fullest of so many
    ranks, of which each has as many experts."""
    loads = counts.view(ranks or len(counts), -1).sum(1).double()
    return float(loads.max() / loads.mean())


def switch_loss(scores: Tensor, counts: Tensor) -> Tensor:
    """E times the sum over the experts of f P: the fraction of all rows that an expert gets, and
    its mean probability. It is 1 if either is even, and at most E / k. Only P has a gradient.

    scores (N, E); sigmoids are divided by their sum. counts (E,): the rows of each expert, which
    may be those of more tokens than these N. Fedus et al. (arXiv 2101.03961), equations 4 to 6,
    with f divided by k."""
    probabilities = scores / scores.sum(-1, keepdim=True)
    fractions = counts.to(scores.dtype) / counts.sum()
    return len(counts) * (fractions * probabilities.mean(0)).sum()


class Inject(torch.autograd.Function):
    """y as it is. Backward adds the gradient of `loss`, so a layer deep in a model need not return
    it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor) -> Tensor:
        ctx.one = torch.ones_like(loss)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, ctx.one


@torch.no_grad()
def update_bias(model: nn.Module, rate: float) -> None:
    """After a step of the optimizer: experts that had more rows than the mean become less likely,
    the others more, by `rate`. It counts the rows of all ranks in all forward passes in training
    mode since the last call, or those of this process, without `parallelize`. One all_reduce, which
    all ranks must call. Wang et al. (arXiv 2408.15664), as in DeepSeek-V3."""
    routers = [each for each in model.modules() if isinstance(each, Router)]
    if not routers:  # a stage of a pipeline may have none
        return
    counts = torch.cat([each.seen for each in routers])
    if routers[0].batch_group is not None:
        dist.all_reduce(counts, group=routers[0].batch_group)
    for router, rows in zip(routers, counts.split([len(r.bias) for r in routers]), strict=True):
        if router.bias.itemsize < 4:
            raise TypeError("in 16 bits steps are lost: router.bias = router.bias.float()")
        loads = rows.double()
        router.bias += rate * (loads.mean() - loads).sign().to(router.bias.dtype)
        router.seen = torch.zeros_like(rows)
