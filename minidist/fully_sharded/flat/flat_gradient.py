"""The gradient of a flat parameter: first whole on every rank, then a shard of the mean.

full (N S,), of this rank  --reduce_scatter-->  mean (S,), this rank's shard

Lesson: fully_sharded
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from minidist import backend
from minidist.fully_sharded.flat.shard_gradient import CHANGED, ShardGradient
from minidist.zero.messages import reduce_scatter

if TYPE_CHECKING:
    from minidist.fully_sharded.flat.flat_parameter import FlatParameter


class FlatGradient:
    """What backward passes have made of it, and what is in flight."""

    def __init__(self) -> None:
        self.full: torch.Tensor | None = None  # (N S,), not reduced yet
        self.touched: set[int] = set()  # the numbers of the parameters that have a gradient
        self.pending = False  # a pass has come to it, and it is still to be reduced
        self.mean: torch.Tensor | None = None  # (S,)
        self._arrive: Callable[[], torch.Tensor] | None = None  # waits for what is in flight
        self._left: list[Any] = []  # what `leave` gave to each parameter

    def add(self, flat: "FlatParameter", gradients: Sequence[torch.Tensor | None]) -> None:
        """Add gradients of the parameters, divided by the number of ranks. None counts as zero."""
        scale, fresh = (
            1 / math.prod(map(dist.get_world_size, flat.options.groups)),
            self.full is None,
        )
        if self.full is None:
            dtype, device = flat.shard.dtype, flat.device
            self.full = backend.scratch(
                len(flat.full), dtype=dtype, device=device, group=flat.group
            )
            self.full[flat.used :] = 0
        for number, (view, g) in enumerate(zip(flat.views(self.full), gradients, strict=True)):
            if g is None:
                if fresh:
                    view.zero_()
                continue
            if g.layout is not torch.strided:
                raise RuntimeError("a sparse gradient cannot be cut into shards: sparse=True")
            self.touched.add(number)
            if fresh:
                torch.mul(g, scale, out=view)
            else:
                view.add_(g, alpha=scale)

    def reduce(self, flat: "FlatParameter") -> None:
        """Begin to add up the ranks' gradients. A rank that has none adds zeros."""
        self.wait(flat)
        if self.full is None:
            self.add(flat, [None] * len(flat.parameters))
        assert self.full is not None
        full, self.full, self.pending = self.full, None, False
        self._arrive = reduce_scatter(full.to(flat.reduce_dtype), flat.group)

    def wait(self, flat: "FlatParameter") -> None:
        """Until this rank's shard of the mean is there, if it is in flight."""
        if self._arrive is None:
            return
        arrive, self._arrive = self._arrive, None
        mean = arrive()
        for replicas in flat.options.groups[1:]:
            dist.all_reduce(mean, group=replicas)
        mean = mean.to(flat.shard)
        self.mean = mean if self.mean is None else self.mean.add_(mean)

    def deliver(self, flat: "FlatParameter", anywhere: list[bool]) -> None:
        """To the `.grad` of each parameter that has a gradient on any rank."""
        mean, self.mean = self.mean, None
        self.touched.clear()
        shared = flat.group, flat.device
        for each, there in zip(flat.parameters, anywhere, strict=True):
            local = each.local
            if mean is None or not there or not local.requires_grad:
                continue
            gradient = ShardGradient.of(mean[each.in_shard].view_as(local), shared)
            if local.grad is None:
                local.grad = gradient
            else:
                local.grad += gradient

    # Within no_sync() the gradient stays as it is, (N S,). The user must be able to zero it by any
    # optimizer's `zero_grad`: so each parameter gets its own part of it as a `.grad`.

    def leave(self, flat: "FlatParameter") -> None:
        """Keep the gradient for a later pass."""
        if self.full is None:
            return
        part = flat.own_shard(self.full)
        for number, each in enumerate(flat.parameters):
            local, before = each.local, each.local.grad
            if number not in self.touched:
                self._left.append(None)
                continue
            copy = part[each.in_shard].view_as(local).to(local.device, copy=True)
            gradient = ShardGradient.of(copy, None)
            local.grad = gradient
            self._left.append((gradient, gradient._version, before))

    def resume(self, flat: "FlatParameter") -> None:
        """Forget what has been zeroed since; the next pass adds to the rest. Raises RuntimeError
        for a `.grad` that was changed: the other ranks' parts of that gradient were not."""
        left, self._left = self._left, []
        views = flat.views(self.full) if left else []
        for number, (view, given) in enumerate(zip(views, left, strict=True)):
            if given is None:
                continue
            each, (was, version, before) = flat.parameters[number], given
            local = each.local
            if was._version == version and local.grad is was:
                local.grad = before
            elif local.grad is None or (local.grad is was and not was.any()):
                view.zero_()
                self.touched.discard(number)
            else:
                raise RuntimeError(f"the .grad of {each.names[0]} {CHANGED}")
