"""DiLoCo: what the ranks have come to is a gradient, for a second optimizer
(lesson: beyond_gradients)."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from minidist.averaging.averaging_optimizer import AveragingOptimizer
from minidist.averaging.flat_mean import average
from minidist.common.replicas import broadcast_state


def nesterov(anchors: list[nn.Parameter]) -> Optimizer:
    """The outer optimizer of the paper: SGD with Nesterov's momentum, η = 0.7, μ = 0.9."""
    return torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True)


class DiLoCo(AveragingOptimizer):
    """Every `period` steps, the mean difference from where the ranks set out is the gradient of an
    outer step. Every rank takes that step with the anchors, and sets out from there again.

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer = md.averaging.DiLoCo(optimizer, period=50)

    outer: makes the anchors' optimizer. Plain SGD with a learning rate of 1 gives `LocalSGD`: the
        anchor less the mean difference is the mean.

    The ranks set out from rank 0's parameters at the first step, or from the anchors of a loaded
    state.

    It holds 8 bytes more for each parameter of float32: the anchor and its momentum. See
    `AveragingOptimizer` for the rest. Douillard et al. 2023, "DiLoCo: Distributed Low-Communication
    Training of Language Models", arXiv 2311.08105, algorithm 1. Lesson: beyond_gradients.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        period: int,
        outer: Callable[[list[nn.Parameter]], Optimizer] = nesterov,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(optimizer, period, process_group)
        self.anchors = [nn.Parameter(p.detach().clone()) for p in self.parameters]
        self.outer = outer(self.anchors)

    def before_step(self) -> None:
        """Before the first step the ranks set out: weights may be loaded until then."""
        if self.steps == 0:
            for anchor, parameter in zip(self.anchors, self.parameters, strict=True):
                anchor.copy_(parameter)
            broadcast_state(self.anchors, self.process_group)  # apart, they would stay so

    def after_step(self) -> None:
        """At the end of a period: the meeting."""
        if self.steps % self.period:
            return
        differences = [a - p for a, p in zip(self.anchors, self.parameters, strict=True)]
        average(differences, self.process_group)
        for anchor, difference in zip(self.anchors, differences, strict=True):
            anchor.grad = difference
        self.outer.step()
        self.outer.zero_grad()
        for parameter, anchor in zip(self.parameters, self.anchors, strict=True):
            parameter.copy_(anchor)

    def own_state(self) -> dict[str, Any]:
        """The anchors, and the state of their optimizer."""
        anchors = [anchor.detach() for anchor in self.anchors]
        return {"anchors": anchors, "outer": self.outer.state_dict()}

    @torch.no_grad()
    def load_own_state(self, state: dict[str, Any]) -> None:
        """Take them. Where there are none, the ranks set out anew at the next step."""
        if not state:
            self.steps = 0
            self.outer.state.clear()
            return
        for anchor, value in zip(self.anchors, state["anchors"], strict=True):
            anchor.copy_(value)
        self.outer.load_state_dict(state["outer"])
