"""DiLoCo: what the ranks have come to is a gradient, for a second optimizer
(lesson: beyond_gradients)."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from minidist.averaging.averaging_optimizer import AveragingOptimizer
from minidist.averaging.fragment import Fragment, Outer
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
        outer: Outer = nesterov,
        process_group: dist.ProcessGroup | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(optimizer, period, process_group, **arguments)
        parts = self.parts()
        self.fragments = [Fragment(part, outer, self.process_group) for part in parts]
        self._has_set_out = False  # weights may be loaded until the first step

    def parts(self) -> list[list[nn.Parameter]]:
        """The parameters of each fragment: all of them in one."""
        return [self.parameters]

    def before_step(self) -> None:
        """Before the first step the ranks set out."""
        if not self._has_set_out:
            self._take_parameters()
            anchors = [anchor for fragment in self.fragments for anchor in fragment.anchors]
            broadcast_state(anchors, self.process_group)
        self._has_set_out = True

    def _take_parameters(self) -> None:
        for fragment in self.fragments:
            fragment.take_parameters()

    def after_step(self) -> None:
        """At the end of a period: the meeting."""
        if self.steps % self.period == 0:
            for fragment in self.fragments:
                fragment.send()
                fragment.receive()

    def own_state(self) -> dict[str, Any]:
        """Of each fragment: anchors, states of its optimizer, and what is in flight."""
        if not self._has_set_out:
            self._take_parameters()
        return {"fragments": [fragment.state() for fragment in self.fragments]}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Raises ValueError for another number of fragments."""
        states = state.get("fragments", [None] * len(self.fragments))
        if len(states) != len(self.fragments):
            raise ValueError(
                f"the state_dict is of {len(states)} fragments, and there are {len(self.fragments)}"
            )
        for fragment, each in zip(self.fragments, states, strict=True):
            fragment.load(each)
        self._has_set_out = True
