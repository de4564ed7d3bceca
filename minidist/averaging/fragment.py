"""A part of the model, and its meeting (lesson: beyond_gradients)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from minidist.averaging.flat_mean import Mean, average

Outer = Callable[[list[nn.Parameter]], Optimizer]


class Fragment:
    """Some parameters, their anchors, from which all ranks set out, and the anchors' optimizer.

    A meeting has two halves: `send` this rank's differences, `receive` their mean. Between them
    training may go on.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], outer: Outer, group: dist.ProcessGroup
    ) -> None:
        self.parameters, self._group = list(parameters), group
        self.anchors = [nn.Parameter(p.detach().clone()) for p in self.parameters]
        self.outer = outer(self.anchors)
        self._mean: Mean | None = None
        self._arrived: list[torch.Tensor] | None = None

    @torch.no_grad()
    def take_parameters(self) -> None:
        """As they are now: the anchors."""
        for anchor, parameter in zip(self.anchors, self.parameters, strict=True):
            anchor.copy_(parameter)

    @property
    def travelling(self) -> bool:
        """Whether differences have been sent, and not been received."""
        return self._mean is not None or self._arrived is not None

    def send(self) -> None:
        """Begin to average how far the ranks have come, as a gradient: anchor - parameter."""
        differences = [a.detach() - p for a, p in zip(self.anchors, self.parameters, strict=True)]
        self._mean = Mean(differences, self._group)

    def _arrive(self) -> None:
        if self._mean is not None:
            self._arrived, self._mean = self._mean.wait(), None

    @torch.no_grad()
    def receive(self, mix: float = 0.0) -> None:
        """Wait for the mean, and step with the anchors. Each parameter keeps `mix` of what it has
        become here; the rest is the anchor."""
        self._arrive()
        assert self._arrived is not None
        for anchor, mean in zip(self.anchors, self._arrived, strict=True):
            anchor.grad = mean
        self._arrived = None
        self.outer.step()
        self.outer.zero_grad()
        for parameter, anchor in zip(self.parameters, self.anchors, strict=True):
            parameter.lerp_(anchor, 1 - mix)

    def state(self) -> dict[str, Any]:
        """Anchors, their optimizer's states, and what was sent and not yet received (which has to
        arrive first)."""
        self._arrive()
        anchors = [anchor.detach() for anchor in self.anchors]
        return {"anchors": anchors, "outer": self.outer.state_dict(), "arrived": self._arrived}

    @torch.no_grad()
    def load(self, state: dict[str, Any] | None) -> None:
        """Take them. None begins anew, with the mean of the ranks' parameters: all ranks call it
        then."""
        self._arrive()
        self._arrived = None
        if state is None:
            self.take_parameters()
            average(self.anchors, self._group)  # replicas that set out apart would stay apart
            self.outer.state.clear()
            return
        for anchor, value in zip(self.anchors, state["anchors"], strict=True):
            anchor.copy_(value)
        self.outer.load_state_dict(state["outer"])
        if state["arrived"] is not None:
            pairs = zip(state["arrived"], self.anchors, strict=True)
            self._arrived = [mean.to(anchor, copy=True) for mean, anchor in pairs]
