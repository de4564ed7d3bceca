"""The idea, in two short loops: no gradient is sent.

Every rank begins with the same parameters, trains on its own share of the data as one process does,
and calls one of these after each of its steps:

    optimizer.step()
    local_sgd(model, step, period=8)

Local SGD replaces the parameters by their mean over the ranks. (Stich 2018, "Local SGD Converges
Fast and Communicates Little", arXiv 1805.09767.)

DiLoCo looks at how far the mean is from the *anchor*, where all ranks set out after the last
meeting. It takes that for a gradient of the anchor, and gives it to a second optimizer: SGD with
Nesterov's momentum. (Douillard et al. 2023, arXiv 2311.08105, algorithm 1.)
Lesson: beyond_gradients.
"""

import torch
import torch.distributed as dist
from torch import nn


@torch.no_grad()
def local_sgd(model: nn.Module, step: int, period: int) -> None:
    """After step 1, 2, …: every `period` steps the replicas become their mean."""
    if step % period == 0:
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.div_(dist.get_world_size())


class NaiveDiLoCo:
    """The same, with an anchor and an optimizer of its own for it."""

    def __init__(self, model: nn.Module, period: int) -> None:
        self.parameters, self.period = list(model.parameters()), period
        self.anchors = [nn.Parameter(p.detach().clone()) for p in self.parameters]
        self.outer = torch.optim.SGD(self.anchors, lr=0.7, momentum=0.9, nesterov=True)

    @torch.no_grad()
    def after(self, step: int) -> None:
        """After step 1, 2, …."""
        if step % self.period:
            return
        for parameter, anchor in zip(self.parameters, self.anchors, strict=True):
            anchor.grad = (anchor - parameter) / dist.get_world_size()
            dist.all_reduce(anchor.grad)
        self.outer.step()
        for parameter, anchor in zip(self.parameters, self.anchors, strict=True):
            parameter.copy_(anchor)
