"""Gradients that travel together: one flat tensor, of which they are views. So packing costs no
copy of its own, and the mean arrives where the optimizer reads it.

Buckets leave in the same order on every rank, or rank 0's third would be added to rank 1's second.
Li et al., "PyTorch Distributed" (arXiv 2006.15704), section 3.2. Lesson: distributed_data_parallel
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from minidist.machine import backend

CommHook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]  # (state, bucket), as torch's

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
        self._index, self._last, self._parameters = index, last, list(parameters)
        *offsets, size = accumulate((p.numel() for p in parameters), initial=0)
        first = parameters[0]
        # Where ranks share memory, in that memory: all_reduce then has nothing to copy.
        flat = backend.empty(size, dtype=first.dtype, device=first.device, group=group)
        self._flat, self.missing = flat, set(parameters)
        # Laid out as the parameters, or each step would pay for the difference. Detached: no views
        # to autograd, so that users may call `detach_()` on a gradient.
        self._views = {
            p: flat.as_strided(p.shape, dense_strides(p), offset).detach()
            for p, offset in zip(parameters, offsets, strict=True)
        }

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

    def hold(self, parameter: nn.Parameter, scale: float = 1) -> None:
        """Make the gradient of a parameter, times `scale`, a view of ours. Without a gradient, our
        part of the bucket is zero."""
        view = self._views[parameter]
        if parameter.grad is view:
            if scale != 1:
                view.mul_(scale)
        elif parameter.grad is None:
            view.zero_()
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

    def __init__(self, plan: Sequence[Sequence[nn.Parameter]], group: dist.ProcessGroup) -> None:
        self._group, self.scale = group, 1 / dist.get_world_size(group)
        self.comm_hook: tuple[CommHook, Any] | None = None  # and its state
        self._sent = 0  # of the buckets, in this backward pass
        self._travelling: list[tuple[Bucket, Any]] = []  # and what waits for it
        self._buckets: list[Bucket] = []
        self.arrange(plan)

    def arrange(self, plan: Sequence[Sequence[nn.Parameter]]) -> None:
        """Make the buckets of this plan, unless they are there."""
        if [[*map(id, b._parameters)] for b in self._buckets] == [[*map(id, b)] for b in plan]:
            return
        self.plan, self._buckets, self._bucket_of = plan, [], {}  # frees the old ones
        for index, parameters in enumerate(plan):
            last = index == len(plan) - 1
            self._buckets.append(Bucket(index, parameters, last, self._group))
            for parameter in parameters:  # a gradient that is there moves, and frees its old bucket
                self._buckets[-1].hold(parameter)
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters()}

    # In a backward pass.

    def reset(self) -> None:
        """A new pass: every gradient is missing."""
        if self._travelling:  # this one has failed. What still travels will write into its buckets
            self._travelling, self._buckets = [], []
            self.arrange(self.plan)
        self._sent = 0
        for bucket in self._buckets:
            bucket.missing = set(bucket._parameters)

    def hold(self, parameter: nn.Parameter) -> None:
        """Its gradient waits for a later pass, in its bucket."""
        self._bucket_of[parameter].hold(parameter)

    def add(self, parameter: nn.Parameter) -> None:
        """Its gradient is complete, or it has none, which counts as zero. The full buckets leave,
        each after all before it."""
        bucket = self._bucket_of[parameter]
        bucket.hold(parameter, 1 if self.comm_hook else self.scale)  # a hook divides itself
        bucket.missing.discard(parameter)
        while self._sent < len(self._buckets) and not self._buckets[self._sent].missing:
            with record_function(f"ddp.reduce {self._sent}"):
                self._send(self._buckets[self._sent])
            self._sent += 1

    def _send(self, bucket: Bucket) -> None:
        if self.comm_hook is None:
            handle: Any = dist.all_reduce(bucket.buffer(), group=self._group, async_op=True)
        else:
            if self._travelling:  # a hook may communicate in callbacks: one bucket at a time
                self._travelling[-1][1].wait()
            hook, state = self.comm_hook
            handle = hook(state, bucket)
        self._travelling.append((bucket, handle))

    def wait(self) -> None:
        """Until all have come back."""
        for bucket, handle in self._travelling:
            with record_function(f"ddp.wait {bucket.index()}"):
                average = handle.wait()
            if self.comm_hook:
                bucket.set_buffer(average)
        self._travelling = []

    def give(self, used: Iterable[nn.Parameter]) -> None:
        """These have a gradient on one rank at least: its mean becomes their `.grad`."""
        for parameter in used:
            if parameter.grad is None:  # then this rank takes the step too
                self._bucket_of[parameter].give(parameter)


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
