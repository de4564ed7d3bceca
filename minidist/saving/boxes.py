"""Boxes: which parts of a tensor a rank has (lesson: scaling_out).

A box is `offsets` and `sizes` along every dimension; torch's checkpoints are made of them. Rows of
a matrix are one box. A shard that begins and ends within a row is three: the end of its first row,
the whole rows, the beginning of its last row. Features that are not neighbours are a box each.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from minidist.distributed_data_parallel.buckets import dense_strides

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A box of a whole tensor, and where it is in what this rank has."""

    offsets: Sizes
    sizes: Sizes
    view: Callable[[torch.Tensor], torch.Tensor]  # of this rank's tensor: (*sizes)


def whole_box(shape: Sequence[int]) -> list[Box]:
    """All of a tensor."""
    return [Box((0,) * len(shape), tuple(shape), lambda own: own)]


def dtensor_boxes(tensor: DTensor) -> list[Box]:
    """What this rank has of a DTensor, in its local tensor: rows, mostly, of which the last ranks
    may have none."""
    if not tensor.numel():
        return whole_box(tensor.shape)
    sizes, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return [Box(tuple(offsets), tuple(sizes), lambda own: own)] if prod(sizes) else []


def span_boxes(like: torch.Tensor, span: slice) -> list[Box]:
    """The elements of a tensor in `span`, in the order in which they lie in memory. The rank has
    them as (n,), or with more dimensions of 1."""
    if not like.numel():  # no rank has an element, and yet it is in the checkpoint
        return [Box((0,) * like.ndim, tuple(like.shape), lambda own: own.view(like.shape))]
    return _span_boxes(tuple(like.shape), tuple(dense_strides(like)), span.start, span.stop)


@lru_cache(maxsize=10_000)  # for every save the same
def _span_boxes(shape: Sizes, strides: Sizes, start: int, stop: int) -> list[Box]:
    order = sorted(range(len(shape)), key=lambda dim: (-strides[dim], dim))  # outermost first
    back = [order.index(dim) for dim in range(len(shape))]
    found, begin = [], 0
    for offsets, sizes in _rows([shape[dim] for dim in order], start, stop):

        def view(own: torch.Tensor, begin: int = begin, sizes: Sizes = sizes) -> torch.Tensor:
            return own.view(-1)[begin : begin + prod(sizes)].view(sizes).permute(back)

        found.append(Box(_at(offsets, back), _at(sizes, back), view))
        begin += prod(sizes)
    return found


def spread(boxes: Sequence[Box], dim: int, indices: torch.Tensor) -> list[Box]:
    """Of boxes of a shard, which has these `indices` of the whole along `dim`: the boxes of the
    whole."""
    found = []
    for box in boxes:
        own = indices[box.offsets[dim] : box.offsets[dim] + box.sizes[dim]]
        ends = (own.diff() != 1).nonzero().flatten() + 1
        for run in own.tensor_split(ends):
            if not len(run):
                continue
            skipped = int((own == run[0]).nonzero())

            def view(
                tensor: torch.Tensor, box: Box = box, skipped: int = skipped, count: int = len(run)
            ) -> torch.Tensor:
                return box.view(tensor).narrow(dim, skipped, count)

            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[dim], sizes[dim] = int(run[0]), len(run)
            found.append(Box(tuple(offsets), tuple(sizes), view))
    return found


def _rows(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Sizes, Sizes]]:
    """The boxes of the elements from `start` to `stop` of a tensor whose rows lie one after
    another, in their order: offsets and sizes."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row, rest = prod(shape[1:]), tuple(shape[1:])
    first, last = -(-start // row), stop // row  # the rows that are whole
    if first > last:  # all is in the middle of one row
        yield from _within(last, rest, start - last * row, stop - last * row)
        return
    yield from _within(first - 1, rest, start - (first - 1) * row, row if start % row else 0)
    if first < last:
        yield (first, *[0] * len(rest)), (last - first, *rest)
    yield from _within(last, rest, 0, stop - last * row)


def _within(row: int, rest: Sizes, start: int, stop: int) -> Iterator[tuple[Sizes, Sizes]]:
    for offsets, sizes in _rows(rest, start, stop):
        yield (row, *offsets), (1, *sizes)


def _at(values: Sizes, dims: Sequence[int]) -> Sizes:
    return tuple(values[dim] for dim in dims)


class Boxed:
    """This rank's boxes of a tensor of that shape, in `own`, as torch's planners take them.

    same: whether every rank that has a box has the same values in it.
    """

    def __init__(
        self, own: torch.Tensor, shape: Sequence[int], boxes: Sequence[Box], same: bool = True
    ) -> None:
        self.own, self.shape, self.boxes = own.detach(), torch.Size(shape), boxes
        self._type = WriteItemType.SHARD if same else WriteItemType.TENSOR

    def size(self) -> torch.Size:
        """Of the whole tensor."""
        return self.shape

    def view(self, offsets: Sequence[int] | None) -> torch.Tensor:
        """The box that begins there: this rank's own memory."""
        box = next(box for box in self.boxes if box.offsets == tuple(offsets or ()))
        return box.view(self.own)

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.own.dtype)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                self._type,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            for box in self.boxes
        ]
