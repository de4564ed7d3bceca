"""Which part of which whole tensor a rank has, by every strategy (lesson: surviving_failures).

    strategy                        what a rank has of a parameter
    bare, DDP, ZeRO 1 and 2         all of it
    fully sharded                   rows: a DTensor, which says which
    tensor parallel                 features, as their layer says
    pipeline                        all, or nothing
    mixed                           rows of features, or nothing

Of an optimizer's states it has the same, and with ZeRO rows. `Part` says it to torch's planners,
which then find out who writes what, and what a rank of another strategy reads.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from minidist.common.tensors_in import local_of
from minidist.tensor_parallel.layers import ParallelLayer

Offsets = tuple[int, ...]
Cut = tuple[int, ParallelLayer]  # along which dimension, and who knows which indices are here


class Part(torch.Tensor):
    """A whole tensor, of which this rank has `pieces`, its own memory, by where they begin. As
    torch's planners take it, who ask a DTensor the same.

    same: whether all ranks that have a piece have the same values in it.
    """

    pieces: dict[Offsets, torch.Tensor]
    same: bool

    @staticmethod
    def __new__(
        cls, shape: torch.Size, dtype: torch.dtype, pieces: dict[Offsets, torch.Tensor], same: bool
    ) -> "Part":
        part: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        part.pieces, part.same = pieces, same
        return part

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any) -> Any:
        raise TypeError(f"{function} needs the whole tensor, and here is a part")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), x.shape) for at, x in self.pieces.items()]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        kind = WriteItemType.SHARD if self.same else WriteItemType.TENSOR
        of, size = TensorProperties(dtype=self.dtype), self.shape
        chunks = [(each, TensorWriteData(each, of, size)) for each in self.__create_chunk_list__()]
        return [
            WriteItem(MetadataIndex(name, chunk.offsets), kind, tensor_data=data)
            for chunk, data in chunks
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.pieces[tuple(index.offset or ())]


def part_of(tensor: torch.Tensor, cut: Cut | None = None, same: bool = True) -> Part:
    """What this rank has of a parameter, buffer or state. cut: of what its layer holds, if that is
    a part."""
    own, shape, offsets = local_of(tensor).detach(), list(tensor.shape), [0] * tensor.ndim
    if cut is not None:
        dim, layer = cut
        shape[dim] = sum(len(layer.indices(rank)) for rank in range(layer.world_size))
    # A DTensor is the whole already, which `parallelize_module` has made, or a layer's features.
    if isinstance(tensor, DTensor) and (cut is None or shape != list(tensor.shape)):
        offsets = list(_offsets(tensor.shape, tensor.device_mesh, tensor.placements))
    pieces = [(offsets, own)]
    if cut is not None:  # features that are not neighbours are a piece each
        indices = layer.indices(layer.rank)[offsets[dim] : offsets[dim] + own.shape[dim]]
        runs = indices.tensor_split((indices.diff() != 1).nonzero().flatten() + 1)
        places = [[*offsets[:dim], int(run[0]), *offsets[dim + 1 :]] for run in runs if len(run)]
        pieces = list(zip(places, own.split([len(run) for run in runs], dim), strict=False))
    whole = torch.Size(shape)
    # A tensor without elements is in the checkpoint, too.
    kept = {tuple(at): x for at, x in pieces if x.numel() or not whole.numel()}
    return Part(whole, tensor.dtype, kept, same)


@lru_cache(maxsize=10_000)  # for every save the same
def _offsets(shape: torch.Size, mesh: Any, placements: Any) -> Offsets:
    return tuple(compute_local_shape_and_global_offset(shape, mesh, placements)[1])


def cuts_of(model: nn.Module) -> Iterator[tuple[torch.Tensor, Cut]]:
    """The parameters of which layers hold features."""
    for layer in model.modules():
        if isinstance(layer, ParallelLayer):
            for name, dim in layer.sharded.items():
                if (own := layer._parameters.get(name)) is not None:
                    yield own, (dim, layer)
