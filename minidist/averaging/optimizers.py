"""Optimizers whose ranks step on their own, and meet now and then (lesson: beyond_gradients)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from minidist.averaging.flat_mean import average
from minidist.common.agree import require_same
from minidist.common.groups import require_group
from minidist.common.replicas import broadcast_state, require_same_lines, words


class AveragingOptimizer(Optimizer):
    """What `LocalSGD` and `DiLoCo` have in common.

    optimizer: of torch's interface, of this rank's model. It takes the steps, with the rank's own
        gradients, so the model is not wrapped in DistributedDataParallel.
    period: steps from one meeting of the ranks to the next. process_group: the ranks that meet;
        None is the default group.

    At construction every rank takes rank 0's parameters. All ranks must take the same number of
    steps; `steps` is how many they took. `param_groups` and `state` are those of `optimizer`, so
    learning-rate schedulers take either. Between two meetings replicas differ: each rank saves its
    own model and `state_dict()`.

    Raises RuntimeError without a process group; ValueError, on every rank, if the ranks have
    different models or arguments.

    Limits: buffers, such as those of batch norm, stay each rank's own. Lesson: beyond_gradients.
    """

    # Asked for each time: when `optimizer` loads a state, it makes new groups.
    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)

    def __init__(
        self, optimizer: Optimizer, period: int, process_group: dist.ProcessGroup | None = None
    ) -> None:
        name = type(self).__name__
        self.process_group = require_group(process_group, name)
        require_same(self.process_group, {"the kind of averaging": name, "period": period})
        self.optimizer, self.period, self.steps = optimizer, period, 0
        everything = [p for group in optimizer.param_groups for p in group["params"]]
        named = [words("parameter", str(i), p) for i, p in enumerate(everything)]
        require_same_lines(named, self.process_group)
        broadcast_state(everything, self.process_group)
        self.parameters = [p for p in everything if p.requires_grad]
        super().__setstate__({})  # as torch's constructor, but without groups of its own

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of this rank; after the last one of a period, the meeting."""
        everything = [p for group in self.param_groups for p in group["params"]]
        if sum(p.requires_grad for p in everything) > len(self.parameters):
            raise RuntimeError("a parameter was unfrozen since: make the averaging optimizer anew")
        loss = self.optimizer.step(closure)
        self.steps += 1
        if self.steps % self.period == 0:
            with torch.no_grad():
                self.meet()
        return loss

    def meet(self) -> None:
        """What all ranks do together."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """That of `optimizer`, and an entry "averaging"."""
        return {**self.optimizer.state_dict(), "averaging": {"steps": self.steps}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it. Load the model's first."""
        bare = {key: value for key, value in state_dict.items() if key != "averaging"}
        self.optimizer.load_state_dict(bare)
        self.steps = state_dict["averaging"]["steps"]


class LocalSGD(AveragingOptimizer):
    """Every `period` steps the parameters become their mean over the ranks: one all_reduce of all
    of them. Between, nothing is sent.

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = md.averaging.LocalSGD(optimizer, period=8)

    With period 1 and SGD without momentum, training is that of DistributedDataParallel: the mean
    of x - η gᵣ is x - η times the mean of gᵣ. An optimizer's states are never averaged. See
    `AveragingOptimizer` for the rest. Stich 2018, "Local SGD Converges Fast and Communicates
    Little", arXiv 1805.09767. Lesson: beyond_gradients.
    """

    def meet(self) -> None:
        """The mean of the parameters."""
        average(self.parameters, self.process_group)


def nesterov(anchors: list[nn.Parameter]) -> Optimizer:
    """The outer optimizer of DiLoCo's paper: SGD with Nesterov's momentum, η = 0.7, μ = 0.9."""
    return torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True)


def copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Each into the one at its place."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


class DiLoCo(AveragingOptimizer):
    """Every `period` steps, the mean difference from where the ranks set out is the gradient of an
    outer step. Every rank takes that step with the anchors, and sets out from there again.

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer = md.averaging.DiLoCo(optimizer, period=50)

    outer: makes the anchors' optimizer. Plain SGD with a learning rate of 1 gives `LocalSGD`: the
        anchor less the mean difference is the mean.

    The ranks set out from the parameters that rank 0 has at the first step. It holds 8 bytes more
    for each parameter of float32: the anchor and its momentum. Douillard et al. 2023, "DiLoCo:
    Distributed Low-Communication Training of Language Models", arXiv 2311.08105, algorithm 1.
    Lesson: beyond_gradients.
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

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As `AveragingOptimizer.step`. At the first one the ranks set out."""
        if self.steps == 0:  # weights may have been loaded until now
            with torch.no_grad():
                copy(self.parameters, self.anchors)
                broadcast_state(self.anchors, self.process_group)  # apart, they would stay so
        return super().step(closure)

    def meet(self) -> None:
        """The outer step."""
        differences = [a - p for a, p in zip(self.anchors, self.parameters, strict=True)]
        average(differences, self.process_group)
        for anchor, difference in zip(self.anchors, differences, strict=True):
            anchor.grad = difference
        self.outer.step()
        self.outer.zero_grad()
        copy(self.anchors, self.parameters)

    def state_dict(self) -> dict[str, Any]:
        """That of `optimizer`, and "averaging": the anchors and the state of theirs, too."""
        state = super().state_dict()
        anchors = [anchor.detach() for anchor in self.anchors]
        state["averaging"] |= {"anchors": anchors, "outer": self.outer.state_dict()}
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it. Load the model's first."""
        super().load_state_dict(state_dict)
        copy(state_dict["averaging"]["anchors"], self.anchors)
        self.outer.load_state_dict(state_dict["averaging"]["outer"])
