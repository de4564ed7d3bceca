"""Gradients that stay with their owner (lesson 8, stage 2).

As in lesson 4 they leave in buckets while backward still computes, and each rank adds its own. But
a rank gets back its shard of the mean alone, and the memory of the bucket ends there: one bucket
fills while another travels, and the whole gradient is never in memory at once.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minidist import backend
from minidist.distributed_data_parallel.buckets import Bucket
from minidist.distributed_data_parallel.reducer import Reducer
from minidist.zero.messages import reduce_scatter
from minidist.zero.partition import FlatParameters


class PassingBucket(Bucket):
    """The gradients of `FlatParameters`, with the same padding. Its memory is there from the first
    gradient until the bucket has travelled."""

    def __init__(
        self,
        index: int,
        parameters: Sequence[nn.Parameter],
        last: bool,
        group: dist.ProcessGroup,
        size: int,
    ) -> None:
        super().__init__(index, parameters, last, group)
        self._used, self._size = self._size, size

    @functools.cached_property
    def _flat(self) -> torch.Tensor:
        """(N S,)"""
        first = self._parameters[0]
        flat = backend.scratch(
            self._size, dtype=first.dtype, device=first.device, group=self._group
        )
        flat[self._used :] = 0
        return flat

    def free(self) -> None:
        """Forget the gradients."""
        for parameter in self._parameters:
            parameter.grad = None
        del self._flat, self._views


class Journey:
    """A bucket that travels. Its end is known to `arrive`, which waits for it."""

    def __init__(self, bucket: PassingBucket, arrive: Callable[[], torch.Tensor]) -> None:
        self._open: Any = bucket, arrive
        self._shard: Any = None

    def end(self) -> torch.Tensor:
        """This rank's shard of the mean: (S,). The memory of the bucket is free then."""
        if self._open:
            (bucket, arrive), self._open = self._open, None
            self._shard = arrive()
            bucket.free()
        shard: torch.Tensor = self._shard
        return shard


class ShardingReducer(Reducer):
    """Gives each rank of `group` its shard of the mean gradients of `parameters`, by name, in the
    `.grad` of the pieces of `flats`. The parameters' own `.grad` is then None."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        flats: list[FlatParameters],
        group: dist.ProcessGroup,
    ) -> None:
        self._flats = list(flats)
        super().__init__(parameters, group, cap=0, find_unused_parameters=True)

    def _fill(self, _: Any) -> None:
        self._make([flat.parameters for flat in self._flats])  # where the shards are

    def _make(self, plan: Sequence[Sequence[Any]]) -> None:
        self._buckets, self._places = [], {}
        for index, (flat, parameters) in enumerate(zip(self._flats, plan, strict=True)):
            last = index == len(plan) - 1
            bucket = PassingBucket(index, parameters, last, self._group, flat.flat.numel())
            self._buckets.append(bucket)
            self._places |= {p: (bucket, slot) for slot, p in enumerate(parameters)}

    def _send(self, bucket: Any) -> Journey:
        if self._travelling:
            self._travelling[-1][1].end()  # so that no more than one travels
        if self.comm_hook is None:
            return Journey(bucket, reduce_scatter(bucket.buffer(), self._group))
        hook, state = self.comm_hook
        future, size = hook(state, bucket), dist.get_world_size(self._group)

        def arrive() -> torch.Tensor:
            return future.wait().chunk(size)[dist.get_rank(self._group)].clone()

        return Journey(bucket, arrive)

    def _wait(self, used: list[bool]) -> list[bool]:
        for _, journey in self._travelling:
            journey.end()
        return self._anywhere(used)

    def _deliver(self, _: Any, anywhere: list[bool]) -> None:
        """A gradient that no rank has stays None, and the optimizer passes over it."""
        for flat, (_, journey) in zip(self._flats, self._travelling, strict=True):
            shard = journey.end()
            for piece in flat.pieces:
                gradient = shard[piece.place]
                if not anywhere[self._positions[piece.whole]]:
                    continue
                if piece.own.grad is None:
                    piece.own.grad = gradient
                else:
                    piece.own.grad += gradient
        self._travelling = []
