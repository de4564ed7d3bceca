"""One linear layer for queries, keys and values: split by heads. Lesson: feature_splitting."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Placement
from torch.distributed.tensor.placement_types import _StridedShard

from minidist.tensor_parallel.layer import indices_of, require_multiple
from minidist.tensor_parallel.layers import ColumnParallelLinear
from minidist.tensor_parallel.operators import Group, copy_to_group


class QKVParallelLinear(ColumnParallelLinear):
    """Queries, keys and values of a rank's heads: (B, T, C) to (B, T, q + k + v).

    The dense layer is an `nn.Linear` whose outputs are all queries, then all keys, then all values;
    here each rank has all three of its own heads. With fewer key-value heads than query heads
    (grouped-query attention), several query heads share one.

    Fewer key-value heads than ranks cannot be split. Every rank then holds those weights whole, as
    `kv_weight` and `kv_bias`, uses the head that its queries need, and in backward their gradient
    is summed over the ranks.

    heads, kv_heads: how many there are in the whole layer; None means `heads`. The other arguments
        are those of `ColumnParallelLinear`, but for `gather_output`: attention takes this rank's
        heads.

    Raises ValueError for `gather_output=True`, and unless `heads` is a multiple of the number of
    ranks and of `kv_heads`, and one of `kv_heads` and the number of ranks a multiple of the other.
    Lesson: feature_splitting.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        process_group: Group = None,
        *,
        heads: int,
        kv_heads: int | None = None,
        **options: Any,
    ) -> None:
        if options.get("gather_output"):
            raise ValueError(
                "gather_output: a QKVParallelLinear leaves queries, keys and values with the rank "
                "that has their heads. Gather what attention makes of them, or its inputs"
            )
        self.heads, self.kv_heads = heads, kv_heads or heads
        require_multiple(out_features, self.heads + 2 * self.kv_heads, "out_features over heads")
        self.head_dim = out_features // (self.heads + 2 * self.kv_heads)
        super().__init__(in_features, out_features, bias, process_group, **options)

    def require_split(self) -> None:
        ranks = self.world_size
        require_multiple(self.heads, ranks, f"heads over {ranks} ranks")
        require_multiple(self.heads, self.kv_heads, "heads over key-value heads")
        self.kv_is_split = self.kv_heads % ranks == 0
        if not self.kv_is_split:
            require_multiple(ranks, self.kv_heads, "ranks over key-value heads")

    def indices(self, rank: int) -> torch.Tensor:
        heads = indices_of(self.heads, rank, self.world_size)
        if self.kv_is_split:
            keys = self.heads + indices_of(self.kv_heads, rank, self.world_size)
            heads = torch.cat([heads, keys, self.kv_heads + keys])
        return self._rows(heads)

    def placement(self, name: str) -> Placement:
        if self.kv_heads < self.heads:
            raise ValueError(
                "DTensor has no word for the shards of one layer of queries and fewer keys and "
                "values: make three layers of it"
            )
        return _StridedShard(0, split_factor=3)

    def _rows(self, heads: torch.Tensor) -> torch.Tensor:
        """The rows of `weight` for these heads. All heads lie one after the other."""
        return (heads.unsqueeze(1) * self.head_dim + torch.arange(self.head_dim)).flatten()

    def shards_of(self, dense: nn.Module) -> Iterator[tuple[str, nn.Parameter, torch.Tensor]]:
        yield from super().shards_of(dense)
        if not self.kv_is_split:
            for name, whole in dense.named_parameters():
                kv = whole.detach()[self.heads * self.head_dim :]
                yield f"kv_{name}", whole, kv.clone()

    @torch.no_grad()
    def to_dense(self) -> nn.Linear:
        layer = super().to_dense()
        if not self.kv_is_split:
            for name, whole in layer.named_parameters():
                whole[self.heads * self.head_dim :] = getattr(self, f"kv_{name}")
        return layer

    def own(self, name: str) -> Any:
        own = super().own(name)
        if self.kv_is_split or own is None:
            return own
        head = self.rank * self.kv_heads // self.world_size  # that of this rank's queries
        rows = self._rows(torch.tensor([head, self.kv_heads + head]))
        whole = copy_to_group(getattr(self, f"kv_{name}"), self.process_group)
        return torch.cat([own, whole[rows.to(whole.device)]])
