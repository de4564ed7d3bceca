"""Stage 2: gradients that stay with their owner.

As in DistributedDataParallel they leave in buckets while backward still computes, and each rank
adds its own. But a rank gets back its shard of the mean alone, and the memory of the bucket ends
there: one bucket fills while another travels, and the whole gradient is never in memory at once.
Lesson: zero.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minidist import backend
from minidist.distributed_data_parallel.buckets import Bucket
from minidist.distributed_data_parallel.reducer import on_any_rank
from minidist.distributed_data_parallel.watch import GradientWatch
from minidist.zero.gradient_in_shards import GradientInShards
from minidist.zero.messages import reduce_scatter
from minidist.zero.partition import FlatParameters, Piece


class PassingBucket(Bucket):
    """The gradients of `FlatParameters`, with the same padding. Its memory is there from the first
    gradient until the bucket has travelled."""

    def __init__(
        self, index: int, flat: FlatParameters, last: bool, group: dist.ProcessGroup
    ) -> None:
        super().__init__(index, flat.parameters, last, group)
        self.flat_parameters = flat

    def allocate(self) -> torch.Tensor:
        """(N S,)"""
        like = self.flat_parameters.flat
        flat = backend.scratch(len(like), dtype=like.dtype, device=like.device, group=self._group)
        flat[self._size :] = 0
        return flat

    def free(self) -> None:
        """Forget the gradients."""
        for parameter in self._parameters:
            parameter.grad = None
        del self._flat, self._views
        self.empty()


class ShardReducer(GradientWatch):
    """Gives each rank of `group` its shard of the mean gradients of `parameters`, by name, in the
    `.grad` of the pieces of `flats`. The parameters' own `.grad` then stands for those of all
    ranks: `GradientInShards`."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        flats: Iterable[FlatParameters],
        group: dist.ProcessGroup,
    ) -> None:
        self._flats, self._group = list(flats), group
        self._pieces = {piece.whole: piece for flat in self._flats for piece in flat.pieces}
        self._scale = 1 / dist.get_world_size(group)
        self._make_buckets()
        super().__init__(parameters, allow_unused=True)

    def _make_buckets(self) -> None:
        last = len(self._flats) - 1
        self._buckets = [
            PassingBucket(i, flat, i == last, self._group) for i, flat in enumerate(self._flats)
        ]
        self._places = {
            parameter: (bucket, slot)
            for bucket in self._buckets
            for slot, parameter in enumerate(bucket.parameters())
        }
        self._sent = 0  # buckets, in this pass
        self._travelling: tuple[PassingBucket, Callable[[], torch.Tensor]] | None = None
        self._shards: list[torch.Tensor] = []  # of the mean: (S,) of each bucket that has arrived

    def add(self, parameter: nn.Parameter) -> None:
        bucket, slot = self._places[parameter]
        bucket.add(slot, self._scale)
        while self._sent < len(self._buckets) and self._buckets[self._sent].full:
            self._receive()  # so that no more than one travels
            full = self._buckets[self._sent]
            self._travelling = full, reduce_scatter(full.buffer(), self._group)
            self._sent += 1

    def _receive(self) -> None:
        if self._travelling is not None:
            bucket, wait = self._travelling
            self._shards.append(wait())
            bucket.free()
            self._travelling = None

    def _register_hooks(self) -> None:
        super()._register_hooks()

        pieces = self._pieces

        def make_room(parameter: nn.Parameter, *_: Any) -> None:
            # What is in shards stays there. Autograd would add to it what comes now.
            _forget_removed(parameter, pieces)
            if isinstance(parameter.grad, GradientInShards):
                parameter.grad = None

        # These go with the nodes.
        for parameter, node in zip(self.parameters, self._nodes, strict=True):
            node.register_prehook(partial(make_room, parameter))

    def keep(self, parameter: nn.Parameter) -> None:
        bucket, slot = self._places[parameter]
        bucket.hold(slot)

    def finish(self, unused: list[nn.Parameter]) -> None:
        before = {p for p in unused if isinstance(p.grad, GradientInShards)}
        for parameter in before:
            parameter.grad = None
        # In this pass, or in those before it that were not averaged.
        used = [p in self.arrived or p.grad is not None for p in self.parameters]
        for parameter in unused:
            if parameter not in before:
                _forget_removed(parameter, self._pieces)
            self.add(parameter)
        self._receive()
        used = on_any_rank(used, self._group, self.parameters[0].device)
        for flat, shard in zip(self._flats, self._shards, strict=True):
            for piece in flat.pieces:
                # A gradient that no rank has stays None, and the optimizer passes over it.
                if used[self.positions[piece.whole]]:
                    if piece.own.grad is None:
                        piece.own.grad = shard[piece.place]
                    else:
                        piece.own.grad += shard[piece.place]
        for parameter, is_used in zip(self.parameters, used, strict=True):
            if is_used or parameter in before:
                mine = self._pieces.get(parameter)
                parameter.grad = GradientInShards(parameter, mine, self._group)
        self._sent, self._shards = 0, []

    def forget(self) -> None:
        if self._sent:  # it failed. What still travels will write into these buckets.
            self._make_buckets()
        for bucket in self._buckets:
            bucket.empty()


def _forget_removed(parameter: nn.Parameter, pieces: dict[nn.Parameter, Piece]) -> None:
    """A parameter without a `.grad` has none in shards: the user has set it to None."""
    if parameter.grad is None and parameter in pieces:
        pieces[parameter].own.grad = None
