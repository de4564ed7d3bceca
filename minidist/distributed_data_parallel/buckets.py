"""Gradients travel in buckets: few messages, the first of them early.

A bucket is one flat tensor. The gradients of its parameters are views into it: packing costs no
copy of its own, and the mean arrives where the optimizer reads it. Li et al., "PyTorch Distributed:
Experiences on Accelerating Data Parallel Training" (arXiv 2006.15704), section 3.2.3.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn

from minidist import backend

FIRST_BUCKET = 2**20  # bytes: small, so that the first message leaves early


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
        *self._offsets, self._size = accumulate((p.numel() for p in parameters), initial=0)
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
    def _views(self) -> list[torch.Tensor]:
        return [
            # With the strides of the parameter, or each step would pay for the difference.
            self._flat.as_strided(parameter.shape, dense_strides(parameter), offset)
            for parameter, offset in zip(self._parameters, self._offsets, strict=True)
        ]

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
        return self._views

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of their gradients."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Whether no bucket travels after it."""
        return self._last

    # What DistributedDataParallel calls.

    @property
    def full(self) -> bool:
        """Whether all gradients of this backward pass have arrived."""
        return self._missing == 0

    def empty(self) -> None:
        """Wait for all gradients again."""
        self._missing = len(self._parameters)

    def hold(self, slot: int, scale: float = 1) -> None:
        """Make the gradient of a parameter, times `scale`, a view of ours. Without a gradient, our
        part of the bucket is zero."""
        parameter, view = self._parameters[slot], self._views[slot]
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

    def add(self, slot: int, scale: float) -> None:
        """The same, and it may travel."""
        self.hold(slot, scale)
        self._missing -= 1


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
