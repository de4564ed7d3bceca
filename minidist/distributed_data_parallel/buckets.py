"""Gradients that travel together: one flat tensor, of which they are views. So packing costs no
copy of its own, and the mean arrives where the optimizer reads it.

Buckets leave in the same order on every rank, or rank 0's third would be added to rank 1's second.
Li et al., "PyTorch Distributed" (arXiv 2006.15704), section 3.2. Lesson: distributed_data_parallel
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minidist import backend
from minidist.distributed_data_parallel.hooks import CommHook

FIRST_BUCKET = 2**20  # bytes: small, so that the first message leaves early
BUCKET_CAP_MB = 25  # MiB of all others, unless the user names another size: as in torch


class Bucket:
    """The gradients of some parameters, of one dtype on one device, in one flat tensor.

    It has the methods of `torch.distributed.GradBucket`, so torch's communication hooks take it.
    """

    def __init__(
        self,
        index: int,
        parameters: Sequence[nn.Parameter],
        last: bool,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._index, self._last, self._group = index, last, group
        self._parameters = list(parameters)
        *offsets, self._size = accumulate((p.numel() for p in parameters), initial=0)
        self._offsets = dict(zip(parameters, offsets, strict=True))
        # Those of the parameters, or each step would pay for the difference.
        self._strides = {parameter: dense_strides(parameter) for parameter in parameters}
        self.empty()

    @cached_property
    def _flat(self) -> torch.Tensor:
        return self.allocate()

    def allocate(self) -> torch.Tensor:
        """The memory of all gradients, (n,)."""
        first = self._parameters[0]
        # Where ranks share memory, in that memory: all_reduce then has nothing to copy.
        return backend.empty(self._size, dtype=first.dtype, device=first.device, group=self._group)

    @cached_property
    def _views(self) -> dict[nn.Parameter, torch.Tensor]:
        return {parameter: self._view(parameter) for parameter in self._parameters}

    def _view(self, parameter: nn.Parameter) -> torch.Tensor:
        place = parameter.shape, self._strides[parameter], self._offsets[parameter]
        # Detached: no view to autograd, so that users may call `detach_()` on a gradient.
        return self._flat.as_strided(*place).detach()

    # What torch's hooks call.

    def index(self) -> int:
        """Its place in the order in which the buckets travel."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """All gradients, as one tensor of shape (n,)."""
        return self._flat

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replace the values of all gradients."""
        if tensor.data_ptr() != self._flat.data_ptr():
            self._flat.copy_(tensor)

    def gradients(self) -> list[torch.Tensor]:
        """The gradient of each parameter: views of the buffer."""
        return list(self._views.values())

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of their gradients."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Whether no bucket travels after it."""
        return self._last

    # What a strategy calls.

    def empty(self) -> None:
        """Wait for all gradients of a backward pass."""
        self.missing = len(self._parameters)

    def hold(self, parameter: nn.Parameter, scale: float = 1) -> None:
        """Make the gradient of a parameter, times `scale`, a view of ours. Without a gradient, our
        part of the bucket is zero."""
        view = self._views[parameter]
        place = self._flat.data_ptr() + self._offsets[parameter] * self._flat.element_size()
        if view.data_ptr() != place:  # Module.to has given it other memory, as it does with .grad
            view = self._views[parameter] = self._view(parameter)
        if parameter.grad is view:
            if scale != 1:
                view.mul_(scale)
        elif parameter.grad is None:
            view.zero_()
        elif parameter.grad.layout is not torch.strided:
            raise RuntimeError("a sparse gradient has no place in a bucket: sparse=True")
        else:
            torch.mul(parameter.grad.detach(), scale, out=view)  # copied and scaled in one go
            parameter.grad = view

    def give(self, parameter: nn.Parameter) -> None:
        """To a parameter without gradient: the one that is here."""
        parameter.grad = self._views[parameter]


class Buckets:
    """The gradients of parameters, on their way to their mean over the ranks of `group`.

    plan: the parameters of each bucket, in the order in which the buckets will be full. As soon as
        one is, and all before it have left, it leaves by an asynchronous all_reduce.
    """

    def __init__(self, plan: Sequence[Any], group: dist.ProcessGroup) -> None:
        self._group, self.scale = group, 1 / dist.get_world_size(group)
        self.comm_hook: tuple[CommHook, Any] | None = None  # and its state
        self._sent = 0  # of the buckets, in this backward pass
        self._travelling: list[tuple[Any, Any]] = []  # each bucket, and what waits for it
        self._make(plan)

    def _make(self, plan: Sequence[Any]) -> None:
        self._plan = plan
        self._buckets: list[Any] = []  # first, so that no memory is needed for both
        self._bucket_of: dict[torch.Tensor, Any] = {}
        for index in range(len(plan)):
            bucket = self._make_bucket(index)
            self._buckets.append(bucket)
            self._bucket_of |= dict.fromkeys(bucket.parameters(), bucket)

    def _make_bucket(self, index: int) -> Bucket:
        bucket = Bucket(index, self._plan[index], index == len(self._plan) - 1, self._group)
        for parameter in self._plan[index]:
            if parameter.grad is None or parameter.grad.layout is torch.strided:
                bucket.hold(parameter)  # a gradient that is there already
        return bucket

    def arrange(self, plan: Sequence[Sequence[nn.Parameter]]) -> None:
        """The same parameters, by another plan from now on."""
        if [list(map(id, each)) for each in plan] != [list(map(id, each)) for each in self._plan]:
            self._make(plan)

    # In a backward pass.

    def stay(self, parameter: nn.Parameter) -> None:
        """Its gradient stays where it is, and is not averaged: nothing to do here."""

    def hold(self, parameter: nn.Parameter) -> None:
        """Its gradient waits for a later pass, in its bucket."""
        self._bucket_of[parameter].hold(parameter)

    def add(self, parameter: nn.Parameter) -> None:
        """Its gradient is complete, or it has none, which counts as zero. The full buckets leave,
        each after all before it."""
        bucket = self._bucket_of[parameter]
        bucket.hold(parameter, 1 if self.comm_hook else self.scale)  # a hook divides itself
        bucket.missing -= 1
        while self._sent < len(self._buckets) and not self._buckets[self._sent].missing:
            self._send(self._buckets[self._sent])
            self._sent += 1

    def _send(self, bucket: Any) -> None:
        if self.comm_hook is None:
            handle: Any = dist.all_reduce(bucket.buffer(), group=self._group, async_op=True)
        else:
            hook, state = self.comm_hook
            handle = hook(state, bucket)
        self._travelling.append((bucket, handle))

    def wait(self) -> None:
        """Until all have come back."""
        for bucket, handle in self._travelling:
            average = handle.wait()
            if self.comm_hook:
                bucket.set_buffer(average)
        self._travelling = []

    def give(self, used: Iterable[nn.Parameter]) -> None:
        """These have a gradient on one rank at least: its mean becomes their `.grad`."""
        for parameter in used:
            if parameter.grad is None:  # then this rank takes the step too
                self._bucket_of[parameter].give(parameter)

    def empty(self) -> None:
        """Wait for all gradients of the next backward pass."""
        if self._travelling:  # this one has failed. What still travels will write into its buckets
            self._travelling = []
            self._make(self._plan)
        self._sent = 0
        for bucket in self._buckets:
            bucket.empty()


def assign(parameters: Sequence[nn.Parameter], cap: int) -> list[list[nn.Parameter]]:
    """Parameters, in the order in which their gradients are expected, put into buckets.

    A bucket is full when it holds `cap` bytes or more, or, the first one of each dtype and device,
    1 MiB. Buckets come in the order in which they will be complete.
    """
    full: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    room: dict[tuple[torch.dtype, torch.device], int] = {}
    for position, parameter in enumerate(parameters):
        kind = parameter.dtype, parameter.device
        filling.setdefault(kind, []).append(position)
        room[kind] = room.get(kind, min(FIRST_BUCKET, cap)) - parameter.nbytes
        if room[kind] <= 0:
            full.append(filling.pop(kind))
            room[kind] = cap
    full += filling.values()
    return [[parameters[i] for i in bucket] for bucket in sorted(full, key=lambda b: b[-1])]


def dense_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """The strides of a tensor that is laid out like this one, without gaps."""
    return torch.empty_like(parameter, device="meta").stride()
