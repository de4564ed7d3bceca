"""Averaging gradients while backward still computes.

Autograd finishes the gradients of the last layers first. As soon as a bucket has all of its
gradients it leaves, by an asynchronous all_reduce, and travels while autograd goes on to the
layers before. Buckets leave in the same order on every rank, or rank 0's third would be added to
rank 1's second. After Li et al., "PyTorch Distributed" (arXiv 2006.15704), sections 3.2 and 4.2.
Lesson: distributed_data_parallel.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minidist.distributed_data_parallel.buckets import Bucket, assign
from minidist.distributed_data_parallel.watch import GradientWatch

CommHook = Callable[[Any, Any], "torch.futures.Future[torch.Tensor]"]


class Reducer(GradientWatch):
    """Averages the gradients of `parameters` (by name, in the order of registration) over the ranks
    of `group`, in buckets of `cap` bytes."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        group: dist.ProcessGroup,
        cap: int,
        find_unused_parameters: bool,
    ) -> None:
        self.comm_hook: tuple[CommHook, Any] | None = None
        self._group, self._cap, self._find_unused = group, cap, find_unused_parameters
        self._order: list[int] | None = None  # in which gradients arrived, until the next rebuild
        self._ordered = find_unused_parameters  # known, or of no use: each pass may have another
        self._scale = 1.0
        self._buckets: list[Bucket] = []
        self._travelling: list[tuple[Bucket, Any]] = []
        super().__init__(parameters, find_unused_parameters)
        self._fill(self.parameters[::-1])  # backward comes to the last layer first

    # ---- buckets, in the order of backward -------------------------------------------------

    @property
    def may_rebuild(self) -> bool:
        """Whether the order in which gradients arrive has just become known."""
        return self._order is not None

    def rebuild(self, source: int) -> None:
        """Make the buckets anew, in the order in which gradients arrived on rank `source`."""
        order = torch.tensor(self._order or range(len(self.parameters)))
        order = order.to(self.parameters[0].device)
        dist.broadcast(order, group=self._group, group_src=source)
        self._fill([self.parameters[i] for i in order.tolist()])
        self._order, self._ordered = None, True

    def _fill(self, order: list[nn.Parameter]) -> None:
        plan = assign(order, self._cap)
        now = [bucket.parameters() for bucket in self._buckets]
        if [list(map(id, each)) for each in plan] != [list(map(id, each)) for each in now]:
            self._make(plan)

    def _make(self, plan: Sequence[Sequence[Any]]) -> None:
        self._buckets, self._places = [], {}  # first, so that no memory is needed for both
        for index, parameters in enumerate(plan):
            bucket = Bucket(index, parameters, index == len(plan) - 1, self._group)
            self._buckets.append(bucket)
            for slot, parameter in enumerate(parameters):
                self._places[parameter] = bucket, slot
                bucket.hold(slot)  # a gradient that is there already

    # ---- a backward pass -------------------------------------------------------------------

    def expect_from(self, contributors: int, sync: bool) -> None:
        """A forward pass begins, after which to average over so many ranks, if `sync`."""
        self._scale = 1 / contributors
        self.expect(sync)

    def add(self, parameter: nn.Parameter) -> None:
        self._put(parameter)
        self._send_full_buckets()

    def keep(self, parameter: nn.Parameter) -> None:
        bucket, slot = self._places[parameter]
        bucket.hold(slot)

    def finish(self, unused: list[nn.Parameter]) -> None:
        if not self._ordered:
            self._order = [self.positions[parameter] for parameter in self.arrived]
        # In this pass, or in those before it that were not averaged.
        used = [p in self.arrived or p.grad is not None for p in self.parameters]
        for parameter in unused:
            self._put(parameter)
        self._send_full_buckets()
        if self._find_unused:
            used = on_any_rank(used, self._group, self.parameters[0].device)
        self._wait()
        for parameter in unused:
            if used[self.positions[parameter]]:  # then this rank takes the step too
                bucket, slot = self._places[parameter]
                parameter.grad = bucket.gradients()[slot]

    def forget(self) -> None:
        if self._travelling:  # it failed. What still travels will write into these buckets.
            self._travelling = []
            self._make([bucket.parameters() for bucket in self._buckets])
        for bucket in self._buckets:
            bucket.empty()

    def answer(self) -> None:
        """Take part in the others' averaging without a backward pass, adding zeros."""
        for bucket in self._buckets:
            bucket.buffer().zero_()
            self._send(bucket)
        if self._find_unused:
            on_any_rank([False] * len(self.parameters), self._group, self.parameters[0].device)
        self._wait()
        self.forget()

    def _put(self, parameter: nn.Parameter) -> None:
        bucket, slot = self._places[parameter]
        bucket.add(slot, 1 if self.comm_hook else self._scale)  # in torch, a hook divides by itself

    def _send_full_buckets(self) -> None:
        for bucket in self._buckets[len(self._travelling) :]:
            if not bucket.full:
                return
            self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        if self.comm_hook is None:
            handle: Any = dist.all_reduce(bucket.buffer(), group=self._group, async_op=True)
        else:
            hook, state = self.comm_hook
            handle = hook(state, bucket)
        self._travelling.append((bucket, handle))

    def _wait(self) -> None:
        """Until all buckets have come back."""
        for bucket, handle in self._travelling:
            average = handle.wait()
            if self.comm_hook:
                bucket.set_buffer(average)
        self._travelling = []


def on_any_rank(
    true_here: list[bool], group: dist.ProcessGroup, device: torch.device
) -> list[bool]:
    """What is true on one rank of the group at least."""
    flags = torch.tensor(true_here, dtype=torch.uint8).to(device)
    dist.all_reduce(flags, dist.ReduceOp.MAX, group)
    found: list[bool] = flags.bool().tolist()
    return found
