"""Who owns what (lesson: zero): parameters laid end to end, and cut into N shards of one size.

A cut goes through the middle of a parameter where it has to. So each rank owns the N-th part of
every bucket whatever the parameters' sizes, even if one embedding is half of the model: Ψ/N
elements, but for the padding that makes each bucket a multiple of N.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn

from minidist import backend
from minidist.distributed_data_parallel.buckets import assign, dense_strides

BUCKET_CAP_MB = 25.0  # as in DistributedDataParallel


@dataclass(frozen=True)
class Piece:
    """What a rank owns of one parameter."""

    whole: nn.Parameter
    span: slice  # which elements of it, in the order in which they lie in memory
    own: nn.Parameter  # these elements (n,), in the same memory: the rank's optimizer trains them
    place: slice  # where they are in the rank's shard of the bucket


class FlatParameters:
    """Parameters of one dtype and device, in one flat tensor that the ranks own in equal shards.

    From now on the parameters are views of it: what a rank sends is already together, and what it
    receives arrives where the model reads it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self.parameters = list(parameters)
        *offsets, used = accumulate((p.numel() for p in parameters), initial=0)
        self.shard = -(-used // size)  # elements
        first = parameters[0]
        # (N S,), where ranks share memory in that: all_gather then has nothing to stage.
        self.flat = backend.empty(
            self.shard * size, dtype=first.dtype, device=first.device, group=group
        )
        self.flat[used:] = 0
        self.pieces: list[Piece] = []
        mine = range(rank * self.shard, (rank + 1) * self.shard)
        for parameter, offset in zip(parameters, offsets, strict=True):
            view = self.flat.as_strided(parameter.shape, dense_strides(parameter), offset)
            parameter.data = view.copy_(parameter.data)
            start = max(mine.start, offset)
            stop = min(mine.stop, offset + parameter.numel())
            if stop - start >= min(1, parameter.numel()):
                self.pieces.append(
                    Piece(
                        parameter,
                        slice(start - offset, stop - offset),
                        nn.Parameter(
                            self.flat[start:stop], first.is_floating_point() or first.is_complex()
                        ),
                        slice(start - mine.start, stop - mine.start),
                    )
                )
        self._addresses = [parameter.data_ptr() for parameter in parameters]

    def moved(self) -> bool:
        """Whether a parameter is no longer a view of the flat tensor."""
        there = [parameter.data_ptr() for parameter in self.parameters]
        return there != self._addresses


def partition(
    parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, cap: int
) -> list[FlatParameters]:
    """Buckets of `cap` bytes, in the order in which backward comes to them: last layers first."""
    return [FlatParameters(bucket, group) for bucket in assign(parameters[::-1], cap)]


def in_memory_order(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor that belongs to a parameter and has its shape, as they lie in the
    parameter's memory: (n,). A view, if the tensor is laid out as the parameter is."""
    strides = dense_strides(parameter)
    if tensor.stride() != strides:
        tensor = tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))
