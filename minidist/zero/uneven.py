"""Ranks with different numbers of batches, by torch's `Join([ddp, optimizer])`.

A rank whose batches are used up has a shard that the others need, so it goes on with their steps.
Its model has no backward pass, and what the others do to their gradients before a step, such as
clipping, it does not see: it takes gradients and options from a rank that trains.
Lesson: ddp_in_practice.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import JoinHook

from minidist.common.replicas import broadcast_state
from minidist.distributed_data_parallel.join import Uneven
from minidist.distributed_data_parallel.reducer import reducers_of


class UnevenSteps(Uneven):
    """What `Join` asks of an optimizer whose states are shared out."""

    param_groups: list[dict[str, Any]]
    _parameters: Callable[[], list[nn.Parameter]]
    _is_out = False  # this rank has no batches, and takes the others' step

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For torch's `Join`."""
        return _Stepping(self)

    def _take_from_one_that_trains(self) -> None:
        """Within `Join`, before a step: ranks without batches take gradients and options from the
        first rank that has some. Raises RuntimeError if the optimizer comes before its model."""
        if self._join_config.is_first_joinable:
            raise RuntimeError("Join([ddp, optimizer]): the model comes before its optimizer")
        group, parameters = self.process_group, self._parameters()
        there, _ = self._vote(not self._is_out)
        if len(there) == dist.get_world_size(group):
            return
        source = there[0]
        numbers = bool | int | float | tuple | torch.Tensor
        message: list[Any] = [
            [p.grad is not None for p in parameters],
            [{k: v for k, v in g.items() if isinstance(v, numbers)} for g in self.param_groups],
        ]
        dist.broadcast_object_list(message, group=group, group_src=source)
        used, options = message
        if self._is_out:
            for mine, theirs in zip(self.param_groups, options, strict=True):
                for name, value in theirs.items():
                    if isinstance(mine[name], torch.Tensor):  # maybe of a captured graph
                        mine[name].copy_(value)
                    else:
                        mine[name] = value
            for p, is_used in zip(parameters, used, strict=True):
                p.grad = torch.empty_like(p) if is_used else None
        gradients = [
            torch.empty_like(p) if p.grad is None else p.grad
            for p, is_used in zip(parameters, used, strict=True)
            if is_used
        ]
        broadcast_state(gradients, group, source)


class _Stepping(JoinHook):
    """What a rank without batches does with each forward pass of the others. Its own gradients stay
    as they are."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        parameters = self._optimizer._parameters()
        reducers = [reducer for p in parameters for reducer in reducers_of(p)]
        if reducers and not any(reducer.answered for reducer in reducers):
            return  # it was an evaluation, or a pass within no_sync: no step follows
        before = [p.grad for p in parameters]
        self._optimizer._is_out = True
        try:
            self._optimizer.step()
        finally:
            self._optimizer._is_out = False
            for p, gradient in zip(parameters, before, strict=True):
                p.grad = gradient
