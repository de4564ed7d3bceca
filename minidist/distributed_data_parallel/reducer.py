"""Averaging gradients while backward still computes.

Autograd finishes the gradients of the last layers first. As soon as a bucket has all of its
gradients it leaves, and travels while autograd goes on to the layers before.

After Li et al., "PyTorch Distributed" (arXiv 2006.15704), sections 3.2 and 4.2.
Lesson: distributed_data_parallel.
"""

import weakref
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

from minidist.common.agree import on_any_rank
from minidist.common.groups import message_device


class Reducer:
    """Averages the gradients of `parameters` (by name, in the order of registration) over the ranks
    of `group`, in `buckets`: whole, or in shards.

    In the order of time: `expect` and `watch` at each forward pass; `_begin` when backward comes to
    what that has given; `_arrive` for each gradient, as it is complete; `_end` after backward.
    find_unused_parameters: whether some gradients may be missing then.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        group: dist.ProcessGroup,
        buckets: Any,
        find_unused_parameters: bool,
    ) -> None:
        self.parameters = list(parameters.values())
        self._names = {p: name for name, p in parameters.items()}
        self._group, self.buckets, self._find_unused = group, buckets, find_unused_parameters
        self._awaited = False  # whether to average the next pass that gives a gradient
        self._begun = False  # a pass that is averaged is on its way
        self._arrived: dict[nn.Parameter, None] = {}  # in this pass, in this order
        self.order: list[nn.Parameter] | None = None  # that of the first pass, until it is used
        self._ordered = find_unused_parameters  # it has been; or each pass may have another
        for parameter in self.parameters:  # an older wrapper's, or both would divide
            hooks: Any = parameter._post_accumulate_grad_hooks or {}
            for key in [key for key, hook in hooks.items() if isinstance(hook, GradientHook)]:
                del hooks[key]
        hook = GradientHook(self)
        handles = [p.register_post_accumulate_grad_hook(hook) for p in self.parameters]
        weakref.finalize(self, remove, handles)

    def bucket_names(self) -> list[list[str]]:
        """The names of the parameters in each bucket."""
        return [[self._names[p] for p in bucket] for bucket in self.buckets.plan]

    def expect(self, sync: bool) -> None:
        """A forward pass begins. `sync`: whether to average what backward finds after it."""
        self._awaited = sync
        self._reset()

    def watch(self, output: torch.Tensor) -> None:
        """Average all backward passes that come to what the forward pass has given. The tensor
        holds us: the wrapper may be gone by then."""
        if output.grad_fn is not None:
            output.register_hook(lambda _: self._begin())

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            Variable._execution_engine.queue_callback(self._end)

    def _arrive(self, parameter: nn.Parameter) -> None:
        """Its gradient is complete."""
        if self._awaited:
            self._begin()
        if parameter.grad is None:
            if self._begun and len(parameter._post_accumulate_grad_hooks) > 1:
                raise RuntimeError(f"another hook took the gradient of {self._names[parameter]}")
            return  # a Function of the user's gave none
        if not self._begun:
            if not torch.is_grad_enabled():  # it would have a graph
                self.buckets.hold(parameter)
            return
        if torch.is_grad_enabled():
            raise RuntimeError("gradients of gradients are not averaged: create_graph=True")
        if parameter in self._arrived:
            raise RuntimeError(
                f"the gradient of {self._names[parameter]} arrived twice in one backward pass. "
                "Parts of a model that are recomputed one by one must not share parameters"
            )
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
                self._average(unused)
        finally:
            self._awaited = self._awaited and not self._arrived
            self._reset()

    def _average(self, unused: list[nn.Parameter]) -> None:
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
        self.buckets.reset()

    @property
    def may_rebuild(self) -> bool:
        """Whether the order in which gradients arrive has just become known."""
        return self.order is not None

    def order_on_rank_0(self) -> list[nn.Parameter]:
        """The parameters in the order in which their gradients arrived on the group's first rank,
        for all ranks to make buckets by it."""
        position = {parameter: i for i, parameter in enumerate(self.parameters)}
        order = torch.tensor([position[each] for each in self.order or ()])
        order = order.to(message_device(self._group))
        dist.broadcast(order, group=self._group, group_src=0)
        self.order = None
        return [self.parameters[i] for i in order.tolist()]

    def _complaint(self, unused: list[nn.Parameter]) -> str:
        names = ", ".join(self._names[p] for p in unused[:5])
        more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
        return (
            f"this backward pass gave no gradient to {names}{more}"
            ", for which the other ranks wait. Was a part of the model not used, or frozen since "
            "it was wrapped? With find_unused_parameters=True a parameter may be left out."
        )


class GradientHook:
    """Of a parameter, which may outlive its wrapper: so it holds the reducer weakly."""

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = weakref.ref(reducer)

    def __call__(self, parameter: nn.Parameter) -> None:
        if (reducer := self.reducer()) is not None:
            reducer._arrive(parameter)


def remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
