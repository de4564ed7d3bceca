"""Averaging gradients while backward still computes (lesson 4).

Autograd finishes the gradients of the last layers first. As soon as a bucket has all of its
gradients it leaves, by an asynchronous all_reduce, and travels while autograd goes on to the
layers before. Buckets leave in the same order on every rank, or rank 0's third would be added to
rank 1's second. After Li et al., "PyTorch Distributed" (arXiv 2006.15704), sections 3.2 and 4.2.
"""

import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from minidist.distributed_data_parallel.buckets import Bucket, assign

CommHook = Callable[[Any, Any], "torch.futures.Future[torch.Tensor]"]


class Reducer:
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
        self._names, self._parameters = list(parameters), list(parameters.values())
        self._positions = {parameter: i for i, parameter in enumerate(self._parameters)}
        self._group, self._cap, self._find_unused = group, cap, find_unused_parameters
        self._order: list[int] | None = None  # in which gradients arrived, until it is made use of
        self._ordered = find_unused_parameters  # else every pass may have an order of its own
        self._lock = threading.RLock()  # autograd has a thread for each device
        self._awaited = False  # whether a backward pass that is to be averaged has yet to come
        self._buckets: list[Bucket] = []
        self._travelling: list[tuple[Bucket, Any]] = []
        self._fill(self._parameters[::-1])  # backward comes to the last layer first
        self.expect(sync=False, contributors=1)
        self._watch()

    # ---- between two backward passes -------------------------------------------------------

    def expect(self, sync: bool, contributors: int) -> None:
        """Prepare for backward passes, averaged over so many ranks if `sync`."""
        # Not less than before: the backward pass may be for several forward passes.
        self._sync = self._awaited = sync or self._awaited
        self._scale = 1 / contributors
        self._reset()

    def _reset(self) -> None:
        """Forget a backward pass: it has ended, or failed on its way."""
        self._pass: weakref.ref[Callable[[], None]] | None = None
        self._arrived: dict[nn.Parameter, None] = {}  # in this order
        if self._travelling:  # it failed. What still travels will write into these buckets.
            self._travelling = []
            self._make([bucket.parameters() for bucket in self._buckets])
        for bucket in self._buckets:
            bucket.empty()

    @property
    def begun(self) -> bool:
        """Whether a backward pass has come to what `watch` was given, and has not ended."""
        return self._pass is not None

    @property
    def may_rebuild(self) -> bool:
        """Whether the order in which gradients arrive has just become known."""
        return self._order is not None

    def rebuild(self, source: int) -> None:
        """Make the buckets anew, in the order in which gradients arrived on rank `source`."""
        order = torch.tensor(self._order or range(len(self._parameters)))
        order = order.to(self._parameters[0].device)
        dist.broadcast(order, group=self._group, group_src=source)
        self._fill([self._parameters[i] for i in order.tolist()])
        self._order, self._ordered = None, True

    def _fill(self, order: list[nn.Parameter]) -> None:
        plan = assign(order, self._cap)
        if _ids(plan) != _ids(bucket.parameters() for bucket in self._buckets):
            self._make(plan)

    def _make(self, plan: Sequence[Sequence[Any]]) -> None:
        self._buckets, self._places = [], {}  # first, so that no memory is needed for both
        for index, parameters in enumerate(plan):
            bucket = Bucket(index, parameters, index == len(plan) - 1, self._group)
            self._buckets.append(bucket)
            for slot, parameter in enumerate(parameters):
                self._places[parameter] = bucket, slot
                bucket.hold(slot)  # a gradient that is there already

    # ---- during a backward pass ------------------------------------------------------------

    def _watch(self) -> None:
        """Have each gradient announced. These hooks hold us weakly, and go when we go."""
        me = weakref.ref(self)

        def arrive(parameter: torch.Tensor) -> None:
            if (reducer := me()) is not None:
                reducer._arrive(parameter)

        hooks = [p.register_post_accumulate_grad_hook(arrive) for p in self._parameters]
        weakref.finalize(self, lambda: [hook.remove() for hook in hooks])

    def watch(self, output: Any) -> None:
        """Have it announced that a backward pass comes to these tensors (nested as they may be).
        These hooks hold us: who drops the wrapper before `backward()` gets averages still."""
        for tensor in tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda _: self._begin())

    def _begin(self) -> None:
        # Not later: a hook may run in a backward pass within this one, which ends before it.
        with self._lock:
            if self._pass is None:

                def finish() -> None:
                    self._finish()

                # If the pass fails, autograd drops `finish` instead of calling it.
                self._pass = weakref.ref(finish, lambda _: self._reset())
                Variable._execution_engine.queue_callback(finish)

    def _arrive(self, parameter: Any) -> None:
        """`parameter.grad` is complete on this rank: send what has become full."""
        with self._lock:
            if self._awaited or (self.begun and self._sync):
                self._average(parameter)
            elif self.begun and not torch.is_grad_enabled():
                bucket, slot = self._places[parameter]
                bucket.hold(slot)
            # Else nobody has asked us: another wrapper of the module has, or nobody.

    def _average(self, parameter: nn.Parameter) -> None:
        name = self._names[self._positions[parameter]]
        if torch.is_grad_enabled():
            raise RuntimeError("gradients of gradients are not averaged: create_graph=True")
        if parameter in self._arrived:
            raise RuntimeError(
                f"the gradient of {name} arrived twice in one backward pass. Parts of a model "
                "that are recomputed one by one must not share parameters."
            )
        self._begin()
        self._add(parameter)
        self._arrived[parameter] = None
        self._send_full_buckets()

    def _add(self, parameter: nn.Parameter) -> None:
        # A hook divides by itself, as torch has it.
        bucket, slot = self._places[parameter]
        bucket.add(slot, 1 if self.comm_hook else self._scale)

    def _send_full_buckets(self) -> None:
        for bucket in self._buckets[len(self._travelling) :]:
            if not bucket.full:
                return
            self._travelling.append((bucket, self._send(bucket)))

    def _send(self, bucket: Bucket) -> Any:
        if self.comm_hook is None:
            return dist.all_reduce(bucket.buffer(), group=self._group, async_op=True)
        hook, state = self.comm_hook
        return hook(state, bucket)

    # ---- at its end, before `backward()` returns -------------------------------------------

    def _finish(self) -> None:
        try:
            # Without an arrival it is torch.autograd.grad, which wants none of our gradients.
            if self._sync and (self._arrived or self._find_unused):
                self._average_the_rest()
        finally:
            self._reset()

    def _average_the_rest(self) -> None:
        self._awaited = False
        lacking = [p for p in self._parameters if p not in self._arrived]
        if lacking and not self._find_unused:
            raise RuntimeError(self._complaint(lacking))
        if not self._ordered:
            self._order = [self._positions[parameter] for parameter in self._arrived]
        # In this pass, or in those before it that were not averaged.
        used = [p in self._arrived or p.grad is not None for p in self._parameters]
        for parameter in lacking:
            self._add(parameter)
        self._send_full_buckets()
        self._deliver(lacking, self._wait(used))

    def _deliver(self, lacking: list[nn.Parameter], anywhere: list[bool]) -> None:
        for parameter in lacking:
            if anywhere[self._positions[parameter]]:  # then this rank takes the step too
                bucket, slot = self._places[parameter]
                parameter.grad = bucket.gradients()[slot]

    def _complaint(self, lacking: list[nn.Parameter]) -> str:
        names = [self._names[self._positions[parameter]] for parameter in lacking]
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        return (
            f"this backward pass gave no gradient to {', '.join(names[:5])}{more}, for which the "
            "other ranks wait. Was a part of the model not used, or has it been frozen or replaced "
            "since it was wrapped? With find_unused_parameters=True a parameter may be left out."
        )

    def _wait(self, used: list[bool]) -> list[bool]:
        """Until all buckets have come back. Returns which parameters any rank has `used`."""
        if self._find_unused:
            used = self._anywhere(used)
        for bucket, handle in self._travelling:
            average = handle.wait()
            if self.comm_hook:
                bucket.set_buffer(average)
        self._travelling = []
        return used

    def _anywhere(self, used: list[bool]) -> list[bool]:
        """What is true on any rank."""
        flags = torch.tensor(used, dtype=torch.uint8).to(self._parameters[0].device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, self._group)
        anywhere: list[bool] = flags.bool().tolist()
        return anywhere

    def answer(self) -> None:
        """Take part in the others' averaging without a backward pass, adding zeros."""
        for bucket in self._buckets:
            bucket.buffer().zero_()
            self._travelling.append((bucket, self._send(bucket)))
        self._wait([False] * len(self._parameters))
        self._reset()


def tensors(output: Any) -> Iterator[torch.Tensor]:
    """All tensors in it, nested in lists, dicts and dataclasses."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])


def _ids(plan: Iterable[Sequence[torch.Tensor]]) -> list[list[int]]:
    return [list(map(id, bucket)) for bucket in plan]
