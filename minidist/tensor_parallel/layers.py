"""Layers that the ranks of a group share: each rank holds a shard of the weights.

    column      W = [W_0; ...; W_(t-1)]    y_r = x W_r^T                  x Replicate, y Shard(-1)
    row         W = [W_0, ..., W_(t-1)]    y = sum over r of x_r W_r^T    x Shard(-1), y Replicate
    embedding   W = [W_0; ...; W_(t-1)]    y = sum over r of W_r[x]       x, y Replicate

(torch keeps the transpose of the paper's matrix: what is a column there is a row of `weight`.) A
column layer followed by a row layer needs no message in between. Shoeybi et al., "Megatron-LM"
(arXiv 1909.08053), section 3. Lessons: feature_splitting, sequence_parallel.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.profiler import record_function

from minidist.common.dtensor import parameter_like
from minidist.common.groups import require_group
from minidist.common.tensors_in import local_of
from minidist.common.wrapper import copy_sharing
from minidist.tensor_parallel.operators import (
    ColumnLinear,
    Group,
    all_gather,
    copy_to_group,
    reduce_from_group,
    reduce_scatter_to_sequence,
)


class ParallelLayer(nn.Module):
    """A layer of torch whose weights are split over the ranks of a group.

    It takes the arguments of torch's layer, for the whole layer. That is made first, and cut then:
    so with one seed on all ranks, they have the shards of one layer. `from_dense` cuts a layer that
    is there already. The parameters have the names of the dense layer's.

    process_group: the ranks that share the layer; None is the default group.
    sequence_parallel: what is replicated outside is sharded instead, along the sequence of
        (B, T, C).

    Raises ValueError, with the sizes, if the ranks cannot share the layer.
    Lesson: feature_splitting.
    """

    dense: ClassVar[type[nn.Module]]  # the class of torch's of which this is a shard
    split: ClassVar[str]  # the size that says how many rows (or columns) are split
    sharded: ClassVar[dict[str, int]]  # of each parameter that is split: along which dimension
    uneven: ClassVar[bool] = False  # whether the last ranks may have fewer
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        *sizes: Any,
        process_group: Group = None,
        sequence_parallel: bool = False,
        **more_sizes: Any,
    ) -> None:
        dense = self.dense(*sizes, **more_sizes)
        self.take(dense, process_group, sequence_parallel=sequence_parallel)

    @classmethod
    def from_dense(cls, dense: nn.Module, process_group: Group = None, **options: Any) -> Self:
        """This rank's shard of `dense`, which must be the same on every rank (`check_replicas`
        looks). Hooks of the layer are left behind."""
        own = cls.__new__(cls)
        own.take(dense, process_group, **options)
        return own

    def take(
        self, dense: Any, process_group: Group = None, *, sequence_parallel: bool = False
    ) -> None:
        """Hold this rank's shards of the parameters of `dense`, with their attributes."""
        super().__init__()
        require_group(process_group, type(self).__name__)
        self.process_group, self.sequence_parallel = process_group, sequence_parallel
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        for name in dense.__constants__:  # such as in_features
            setattr(self, name, getattr(dense, name))
        self.require_split()
        for name, whole in dense._parameters.items():
            own = None
            if whole is not None:
                here = local_of(whole)  # of a DTensor that is replicated, all of it
                if here.shape != whole.shape:
                    raise TypeError(f"its {name} is sharded already. Split by features first")
                own = parameter_like(whole, self.shard_of(name, here))
            self.register_parameter(name, own)
        self.train(dense.training)

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        with record_function(f"tensor_parallel.{type(self).__name__}"):
            return super().__call__(*inputs, **kwargs)

    def require_split(self) -> None:
        """Raises ValueError if the ranks cannot share the layer."""
        total, ranks = getattr(self, self.split), self.world_size
        if not len(indices_of(total, ranks - 1, ranks)) or (total % ranks and not self.uneven):
            raise ValueError(
                f"{type(self).__name__}: {ranks} ranks cannot share {self.split}={total}"
                + ("" if self.uneven else f", which is not a multiple of {ranks}")
            )

    def indices(self, rank: int) -> torch.Tensor:
        """Which rows of the dense weight (or columns, where these are split) a rank holds."""
        return indices_of(getattr(self, self.split), rank, self.world_size)

    def placement(self, name: str) -> Placement:
        """What DTensor calls this. Raises ValueError if it has no word."""
        return Shard(self.sharded[name]) if name in self.sharded else Replicate()

    def whole_shape(self, name: str) -> torch.Size:
        """The shape of a parameter of the dense layer."""
        shape = list(getattr(self, name).shape)
        if name in self.sharded:
            shape[self.sharded[name]] = getattr(self, self.split)
        return torch.Size(shape)

    def shard_of(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a parameter of the dense layer, as a copy."""
        if name not in self.sharded:
            return whole.detach().clone()
        return whole.detach().index_select(
            self.sharded[name], self.indices(self.rank).to(whole.device)
        )

    def joined(self, name: str) -> torch.Tensor:
        """A parameter of the dense layer, on every rank, as a copy. All ranks must call it."""
        own = getattr(self, name).detach()
        if isinstance(own, DTensor):  # of this layer; or of FSDP, which has cut this rank's shard
            own = own.to_local() if own.shape == self.whole_shape(name) else own.full_tensor()
        dim = self.sharded[name]
        places = [self.indices(rank) for rank in range(self.world_size)]
        shards = gather_shards(own, dim, list(map(len, places)), self.process_group)
        order = torch.cat(places).argsort().to(own.device)
        return torch.cat(shards, dim).index_select(dim, order)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy_sharing(self, memo, self.process_group)

    def extra_repr(self) -> str:
        sizes: Any = self.dense.extra_repr
        return f"{sizes(self)}, rank {self.rank} of {self.world_size}"


class ColumnParallelLinear(ParallelLayer):
    """A linear layer of which each rank computes a part of the output features.

        hidden = md.ColumnParallelLinear(C, 4 * C)(x)       # (B, T, C) to (B, T, 4C / t)
        y = md.RowParallelLinear(4 * C, C)(F.gelu(hidden))  # and back to (B, T, C)

    The input (*, in_features) is replicated, the output (*, out_features / t) sharded: rank r has
    the r-th part of the features. In backward, the gradient of the input is summed over the ranks,
    while that of the weight is computed.

    With `sequence_parallel` the input is (B, T / t, in_features). It is gathered, not kept, and
    gathered again in backward.

    Raises ValueError if `out_features` is not a multiple of the number of ranks: a step takes as
    long as its slowest rank, and attention cannot cut a head. There are no gradients of gradients;
    `F.linear` between the operators of this lesson has them.
    Lesson: feature_splitting.
    """

    dense, split, sharded = nn.Linear, "out_features", {"weight": 0, "bias": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = local(self.weight), local(self.bias)
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = bias if bias is None else bias.to(dtype)
        return ColumnLinear.apply(x, weight, bias, self.process_group, self.sequence_parallel)


class RowParallelLinear(ParallelLayer):
    """A linear layer of which each rank takes a part of the input features.

    The input (*, in_features / t) is sharded, as a `ColumnParallelLinear` leaves it; the output
    (*, out_features) is the sum over the ranks, replicated. The bias is replicated, and added once.
    Backward needs no message.

    With `sequence_parallel` the output is (B, T / t, out_features), and its gradient is gathered.
    The bias sees a part of the tokens; its gradient is summed over the ranks.

    Raises ValueError if `in_features` is not a multiple of the number of ranks.
    Lesson: feature_splitting.
    """

    dense, split, sharded = nn.Linear, "in_features", {"weight": 1}  # the bias is replicated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        partial = F.linear(x, local(self.weight))  # (*, out_features)
        bias: torch.Tensor | None = local(self.bias)
        if not self.sequence_parallel:
            y = reduce_from_group(partial, self.process_group)
        else:
            y = reduce_scatter_to_sequence(partial, -2, self.process_group)
            bias = bias if bias is None else copy_to_group(bias, self.process_group)
        return y if bias is None else y + bias.to(y.dtype)  # autocast: as nn.Linear has it


class VocabParallelEmbedding(ParallelLayer):
    """An embedding of which each rank holds the rows of its own tokens. Lesson: sequence_parallel.

    The input (*) is replicated. A rank looks up its own tokens and has zeros for the others; the
    sum over the ranks is the embedding (*, embedding_dim), replicated. With `sequence_parallel` the
    output is (B, T / t, embedding_dim).

    Raises ValueError if a rank would have no token, and for an embedding with `padding_idx` or
    `max_norm`; `forward`, IndexError for a token that is not in the vocabulary.
    """

    dense, split, sharded, uneven = nn.Embedding, "num_embeddings", {"weight": 0}, True
    num_embeddings: int

    padding_idx: int | None
    max_norm: float | None

    def require_split(self) -> None:
        super().require_split()
        if self.padding_idx is not None or self.max_norm is not None:
            raise ValueError("a VocabParallelEmbedding has no padding_idx and no max_norm")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if tokens.numel() and not 0 <= tokens.min() <= tokens.max() < self.num_embeddings:
            raise IndexError(
                f"tokens from {int(tokens.min())} to {int(tokens.max())} are not all in a "
                f"vocabulary of {self.num_embeddings}"
            )
        weight = local(self.weight)
        own = tokens - self.rank * -(-self.num_embeddings // self.world_size)
        elsewhere = (own < 0) | (own >= len(weight))
        partial = F.embedding(own.clamp(0, len(weight) - 1), weight)  # (*, C)
        partial = partial.masked_fill(elsewhere.unsqueeze(-1), 0)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence(partial, -2, self.process_group)
        return reduce_from_group(partial, self.process_group)


class VocabParallelLinear(ColumnParallelLinear):
    """The output layer of a language model: (*, C) to the logits of this rank's tokens.

    A `ColumnParallelLinear` that splits its outputs as `VocabParallelEmbedding` does, so that the
    two can share one weight. `vocab_parallel_cross_entropy` takes its output.

    Raises ValueError if a rank would have no token.
    Lesson: sequence_parallel.
    """

    uneven = True


class QKVParallelLinear(ColumnParallelLinear):
    """Queries, keys and values of a rank's heads: (B, T, C) to (B, T, q + k + v). By `from_dense`.

    The dense layer is an `nn.Linear` whose outputs are all queries, then all keys, then all values;
    here each rank has all three of its own heads.

    heads, kv_heads: how many there are in the whole layer. Fewer key-value heads than query heads
        are grouped-query attention; None means `heads`.

    Raises ValueError unless both are multiples of the number of ranks.
    Lesson: feature_splitting.
    """

    def take(  # type: ignore[override]
        self,
        dense: Any,
        process_group: Group = None,
        *,
        heads: int,
        kv_heads: int | None = None,
        **options: Any,
    ) -> None:
        self.heads, self.kv_heads = heads, kv_heads or heads
        super().take(dense, process_group, **options)

    def require_split(self) -> None:
        ranks = self.world_size
        require_multiple(self.heads, ranks, f"heads over {ranks} ranks")
        require_multiple(self.kv_heads, ranks, f"key-value heads over {ranks} ranks")
        total: Any = self.out_features
        require_multiple(total, self.heads + 2 * self.kv_heads, "out_features over heads")

    def indices(self, rank: int) -> torch.Tensor:
        keys = self.heads + indices_of(self.kv_heads, rank, self.world_size)
        queries = indices_of(self.heads, rank, self.world_size)
        mine = torch.cat([queries, keys, self.kv_heads + keys])  # all heads lie in a row
        total: Any = self.out_features
        size = total // (self.heads + 2 * self.kv_heads)
        return (mine.unsqueeze(1) * size + torch.arange(size)).flatten()

    def placement(self, name: str) -> Placement:
        if self.kv_heads < self.heads:
            raise ValueError(
                "DTensor has no word for the shards of one layer of queries and fewer keys and "
                "values: make three layers of it"
            )
        return _StridedShard(0, split_factor=3)


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


def local(parameter: Any) -> Any:
    """What this rank has of a parameter, or None. The gradient of a DTensor is one as well."""
    return _Local.apply(parameter) if isinstance(parameter, DTensor) else parameter


class _Local(torch.autograd.Function):
    """`to_local`, in a quarter of its time: the gradient lies as the parameter does."""

    @staticmethod
    def forward(ctx: Any, parameter: Any) -> torch.Tensor:
        ctx.set_materialize_grads(False)  # what has no gradient keeps none
        ctx.spec, own = parameter._spec, parameter._local_tensor
        return own.view_as(own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        if grad is None:
            return None
        # Others may have the same tensor as their gradient, which autograd cannot see in a DTensor.
        # That of a shard is its layer's alone.
        own = grad.clone() if ctx.spec.is_replicated() else grad
        # Operations on a gradient may change its spec: that of the parameter stays as it is.
        return DTensor(own.contiguous(), copy.copy(ctx.spec), requires_grad=False)


@contextmanager
def fork_rng(group: Group = None) -> Iterator[None]:
    """Within this block each rank of the group draws random numbers of its own.

        torch.manual_seed(0)                    # the same on every rank
        x = F.dropout(x)                        # replicated: drops the same on every rank
        with fork_rng():
            y = F.dropout(y)                    # sharded: every rank drops its own

    The block's seed is drawn from torch's generator, and the rank is added. So it is another block
    each time, a run can be repeated, there is nothing to store in a checkpoint, and afterwards the
    generators of the ranks are in step, however much each has drawn. They must be so before.
    Lesson: sequence_parallel.
    """
    seed = int(torch.randint(2**62, ()))
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed + dist.get_rank(group))
        yield
