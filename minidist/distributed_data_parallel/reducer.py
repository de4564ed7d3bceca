"""Averaging gradients while backward still computes.

Autograd finishes the gradients of the last layers first. As soon as a bucket has all of its
gradients it leaves, and travels while autograd goes on to the layers before.

After Li et al., "PyTorch Distributed" (arXiv 2006.15704), sections 3.2 and 4.2.
Lesson: distributed_data_parallel.
"""

import weakref
from collections.abc import Callable
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

from minidist.common.agree import on_any_rank


class Reducer:
    """Averages the gradients of `parameters` (by name, in the order of registration) over the ranks
    of `group`, in `buckets`: whole, or in shards.

    In the order of time: `expect` at each forward pass; `_begin` when backward comes to what that
    has given; `_arrive` for each gradient, as it is complete; `_end` when backward has ended.
    find_unused_parameters: whether some gradients may be missing then.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        group: dist.ProcessGroup,
        buckets: Any,
        find_unused_parameters: bool,
    ) -> None:
        self.parameters, self._names = list(parameters.values()), list(parameters)
        self._group, self.buckets, self._find_unused = group, buckets, find_unused_parameters
        self._sync = False  # whether to average the backward passes after the last forward pass
        self._begun = False  # such a pass is on its way
        self._arrived: dict[nn.Parameter, None] = {}  # in this pass, in this order
        self.order: list[nn.Parameter] | None = None  # that of the first pass, until it is used
        self._ordered = find_unused_parameters  # it has been; or each pass may have another
        # A model may outlive its wrapper, and get another one.
        own = weakref.ref(self)
        hooks = [p.register_post_accumulate_grad_hook(_hook(own)) for p in self.parameters]
        weakref.finalize(self, remove, hooks)

    def expect(self, sync: bool) -> None:
        """A forward pass begins. `sync`: whether to average what backward finds after it."""
        self._sync = sync
        self._reset()

    def watch(self, output: torch.Tensor) -> None:
        """Learn when backward comes to what a forward pass has given. It holds us, too: gradients
        are averaged if the wrapper is dropped before."""
        if output.grad_fn is not None:
            output.register_hook(lambda _: self._begin())

    def _begin(self) -> None:
        if self._sync and not self._begun:
            self._begun = True
            Variable._execution_engine.queue_callback(self._end)

    def _arrive(self, parameter: nn.Parameter) -> None:
        """Its gradient is complete."""
        if parameter.grad is None:
            return  # another hook has taken it, or there was none: `_end` names it
        if not self._sync:
            if not torch.is_grad_enabled():
                self.buckets.hold(parameter)
            return
        if torch.is_grad_enabled():
            raise RuntimeError("gradients of gradients are not averaged: create_graph=True")
        if parameter in self._arrived:
            raise RuntimeError(
                f"the gradient of {self._name(parameter)} arrived twice in one backward pass. "
                "Parts of a model that are recomputed one by one must not share parameters"
            )
        self._begin()
        self._arrived[parameter] = None
        self.buckets.add(parameter)

    def _end(self) -> None:
        try:
            # Without an arrival it is torch.autograd.grad, which wants none of our gradients.
            if self._arrived or self._find_unused:
                unused = [p for p in self.parameters if p not in self._arrived]
                if unused and not self._find_unused:
                    raise RuntimeError(self._complaint(unused))
                if not self._ordered:
                    self.order, self._ordered = list(self._arrived), True
                self.average(unused)
        finally:
            self._reset()

    def average(self, unused: list[nn.Parameter]) -> None:
        """Send the rest: what this pass has not given, and zeros. Then wait for all."""
        # In this pass, or in those before it that were not averaged.
        used = [p in self._arrived or p.grad is not None for p in self.parameters]
        for parameter in unused:
            self.buckets.add(parameter)
        if self._find_unused:
            used = on_any_rank(used, self._group)
        self.buckets.wait()
        self.buckets.give(compress(self.parameters, used))

    def _reset(self) -> None:
        self._begun, self._arrived = False, {}
        self.buckets.empty()

    @property
    def may_rebuild(self) -> bool:
        """Whether the order in which gradients arrive has just become known."""
        return self.order is not None

    def order_on(self, source: int) -> list[nn.Parameter]:
        """The parameters in the order in which their gradients arrived on rank `source`, for all
        ranks to make buckets by it."""
        position = {parameter: i for i, parameter in enumerate(self.parameters)}
        order = torch.tensor([position[each] for each in self.order or self.parameters])
        order = order.to(self.parameters[0].device)
        dist.broadcast(order, group=self._group, group_src=source)
        self.order, self._ordered = None, True
        return [self.parameters[i] for i in order.tolist()]

    def _name(self, parameter: nn.Parameter) -> str:
        return next(n for n, p in zip(self._names, self.parameters, strict=True) if p is parameter)

    def _complaint(self, unused: list[nn.Parameter]) -> str:
        more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
        return (
            f"this backward pass gave no gradient to {', '.join(map(self._name, unused[:5]))}{more}"
            ", for which the other ranks wait. Was a part of the model not used, or frozen since "
            "it was wrapped, or has a hook taken its gradient away? With "
            "find_unused_parameters=True a parameter may be left out."
        )


def _hook(own: weakref.ref[Reducer]) -> Callable[[nn.Parameter], None]:
    def arrive(parameter: nn.Parameter) -> None:
        if (reducer := own()) is not None:
            reducer._arrive(parameter)

    return arrive


def remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
