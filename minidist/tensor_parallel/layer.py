"""What all layers of tensor parallel training are: shards of a dense layer, made of it, and joined
to it again. Lesson: feature_splitting
"""

from collections.abc import Iterator
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from minidist.common.dtensor import parameter_like
from minidist.common.groups import require_group
from minidist.common.tensors_in import local_of
from minidist.common.wrapper import copy_sharing, has_hooks
from minidist.tensor_parallel.operators import Group, all_gather


class OfGroup(nn.Module):
    """A module that the ranks of a group share. A deep copy is shared by the same ranks."""

    process_group: Group

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy_sharing(self, memo, self.process_group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.process_group is not None:
            raise TypeError(
                f"a {type(self).__name__} of a mesh or a group cannot be saved: it has one rank's "
                "shards. Save the full_state_dict of the model"
            )
        return super().__reduce_ex__(protocol)


class ParallelLayer(OfGroup):
    """A layer of torch whose weights are split over the ranks of a group.

    Its parameters have the names of the dense layer's, and so has its `state_dict`; their shapes
    are those of the shards. `from_dense` and `to_dense` lead from the one to the other.

    A layer that is made anew holds its shard of what the dense layer would hold: with one seed on
    all ranks, that is one dense layer, and torch's generator goes on as after making it. For that
    the dense layer is made first, and for a moment needs its memory.
    Lesson: feature_splitting.
    """

    dense: ClassVar[type[nn.Module]]  # the class of torch's of which this is a shard
    split: ClassVar[str]  # the size that says how many rows (or columns) are split
    sharded: ClassVar[dict[str, int]]  # of each parameter that is split: along which dimension
    uneven: ClassVar[bool] = False  # whether the last ranks may have fewer

    def __init__(
        self, process_group: Group, sequence_parallel: bool, device: Any, dtype: Any, **sizes: Any
    ) -> None:
        """sizes: the arguments of the dense class. Raises ValueError if the ranks cannot share
        the layer."""
        super().__init__()
        require_group(process_group, type(self).__name__)
        self.process_group = process_group  # None stays None: it can be saved
        self.sequence_parallel, self.sizes = sequence_parallel, sizes
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        self.require_split()
        self.take(self.make_dense(device, dtype))

    def require_split(self) -> None:
        """Raises ValueError, with the sizes, if the ranks cannot share the layer."""
        total, ranks = self.sizes[self.split], self.world_size
        if not len(indices_of(total, ranks - 1, ranks)) or (total % ranks and not self.uneven):
            raise ValueError(
                f"{type(self).__name__}: {ranks} ranks cannot share {self.split}={total}"
                + ("" if self.uneven else f", which is not a multiple of {ranks}")
            )

    def indices(self, rank: int) -> torch.Tensor:
        """Which rows of the dense weight (or columns, where these are split) a rank holds."""
        return indices_of(self.sizes[self.split], rank, self.world_size)

    def placement(self, name: str) -> Placement:
        """What DTensor calls this. Raises ValueError if it has no word."""
        return Shard(self.sharded[name]) if name in self.sharded else Replicate()

    def make_dense(self, device: Any, dtype: Any) -> nn.Module:
        """A layer of torch like the one of which this is a shard, with new weights."""
        return self.dense(**self.sizes, device=device, dtype=dtype)

    @staticmethod
    def sizes_of(layer: Any) -> dict[str, Any]:
        """The `sizes` for a shard of this layer of torch."""
        raise NotImplementedError

    @classmethod
    def from_dense(cls, layer: Any, process_group: Group = None, **options: Any) -> Self:
        """This rank's shard of `layer`, which must be the same on every rank (`check_replicas`
        looks). `options` are those of the constructor."""
        options |= dict(process_group=process_group, device="meta")
        own = cls(**cls.sizes_of(layer), **options)
        own.take(layer)
        return own

    def take(self, dense: nn.Module) -> None:
        """Hold this rank's shards of the parameters of `dense`, with their attributes."""
        hooked = [f"the {type(dense).__name__}"] if has_hooks(dense) else []
        hooked += [
            f"its {name}"
            for name, p in dense.named_parameters()
            if p._backward_hooks or p._post_accumulate_grad_hooks
        ]
        if hooked:
            words = "which its shard would not have: register it after the split"
            raise ValueError(f"{hooked[0]} has a hook, {words}")
        for name in dense._parameters:
            self.register_parameter(name, None)  # in their order; and a bias that is None
        for name, whole, shard in self.shards_of(dense):
            setattr(self, name, parameter_like(whole, shard))

    def shards_of(self, dense: nn.Module) -> Iterator[tuple[str, nn.Parameter, torch.Tensor]]:
        """The name of each parameter here, that of `dense` of which it is a shard, and the shard,
        as a copy."""
        for name, whole in dense.named_parameters():
            here = local_of(whole.detach())
            if here.shape != whole.shape:
                raise TypeError(f"its {name} is sharded already. Split a model by features first")
            if name in self.sharded:
                index = self.indices(self.rank).to(here.device)
                yield name, whole, here.index_select(self.sharded[name], index)
            else:
                yield name, whole, here.clone()

    @torch.no_grad()
    def to_dense(self) -> Any:
        """The whole layer, as one of torch, on every rank. All ranks must call it."""
        layer = self.make_dense("meta", None)
        for name, like in layer.named_parameters():
            parameter = getattr(self, name)
            own = local_of(parameter)
            whole = own.new_empty(like.shape)
            setattr(layer, name, nn.Parameter(whole, parameter.requires_grad))
            if name not in self.sharded:
                whole.copy_(own)
                continue
            dim = self.sharded[name]
            places = [self.indices(rank).to(whole.device) for rank in range(self.world_size)]
            sizes = [len(index) for index in places]
            shards = gather_shards(own, dim, sizes, self.process_group)
            for index, piece in zip(places, shards, strict=True):
                whole.index_copy_(dim, index, piece)
        return layer

    def extra_repr(self) -> str:
        sizes = [f"{name}={size}" for name, size in self.sizes.items()]
        return ", ".join([*sizes, f"rank {self.rank} of {self.world_size}"])


def gather_shards(
    piece: torch.Tensor, dim: int, sizes: list[int], group: Group
) -> list[torch.Tensor]:
    """The shards of all ranks, of so many indices along `dim`. They travel as long as the
    longest."""
    shape = list(piece.shape)
    shape[dim] = max(sizes)
    own = piece.new_zeros(shape)
    own.narrow(dim, 0, piece.shape[dim]).copy_(piece)
    padded = all_gather(own, dim, group).split(max(sizes), dim)
    return [each.narrow(dim, 0, size) for each, size in zip(padded, sizes, strict=True)]


def indices_of(total: int, rank: int, world_size: int) -> torch.Tensor:
    """The indices that a rank holds of `total`, as DTensor's Shard has it: all ranks hold as many,
    but where `world_size` does not divide the last ones hold fewer."""
    each = -(-total // world_size)
    return torch.arange(total)[rank * each : (rank + 1) * each]


def require_multiple(total: int, of: int, what: str) -> None:
    """Raises ValueError, with the sizes, if `total` is no multiple of `of`."""
    if total % of:
        raise ValueError(f"{what}: {total} is not a multiple of {of}")
