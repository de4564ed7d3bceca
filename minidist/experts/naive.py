"""The idea, in one short file: experts on different ranks, and tokens that travel to them.

    y = sum over the k chosen experts e of  p_e(x) FFN_e(x)

Each of p ranks has E / p experts. A row of x goes to each expert that it has chosen, and the result
comes back the same way. Who gets how many rows is known only now, so the counts travel first. The
other files add routers, fewer messages, faster products, balance, whole models. Shazeer et al.,
"Outrageously Large Neural Networks" (arXiv 1701.06538). Lesson: experts.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class NaiveExperts(nn.Module):
    """This rank's experts. x: the rank's own tokens (N, C), as many as it has."""

    def __init__(self, router: nn.Linear, experts: nn.ModuleList, k: int) -> None:
        super().__init__()
        n = len(experts) // dist.get_world_size()
        self.router, self.k, self.n = router, k, n  # the router is the same on every rank
        self.experts = experts[dist.get_rank() * n : (dist.get_rank() + 1) * n]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(self.k)  # (N, k)
        order = chosen.flatten().argsort(stable=True)  # the N k rows by expert, and so by rank
        counts = chosen.flatten().bincount(minlength=self.n * dist.get_world_size())
        counts = counts.view(-1, self.n)  # (p, E / p): my rows for each expert of each rank
        theirs = torch.empty_like(counts)  # (p, E / p): each rank's rows for each of my experts
        dist.all_to_all_single(theirs, counts)
        sends, receives = counts.sum(1).tolist(), theirs.sum(1).tolist()
        arrived = Exchange.apply(x[order // self.k], sends, receives)
        pieces = arrived.split(theirs.flatten().tolist())  # by sender, and then by expert
        done = [self.experts[i % self.n](piece) for i, piece in enumerate(pieces)]
        back = Exchange.apply(torch.cat(done), receives, sends)
        weighted = back * weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, order // self.k, weighted)


class Exchange(torch.autograd.Function):
    """sends[r] rows go to rank r, and receives[r] come from it. Backward, gradients go back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sends: list[int], receives: list[int]) -> torch.Tensor:
        ctx.back = receives, sends
        arrived = x.new_empty(sum(receives), *x.shape[1:])
        dist.all_to_all_single(arrived, x.contiguous(), receives, sends)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return Exchange.apply(gradient, *ctx.back), None, None


def scale_gradients(experts: nn.Module) -> None:
    """After backward: an expert's gradient is the sum over the tokens of all p ranks by now, and
    each rank's loss is a mean over its own. So it is divided by p, and nothing is sent."""
    for parameter in experts.parameters():
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()
