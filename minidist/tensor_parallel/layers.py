"""Layers that the ranks of a group share: each rank holds a shard of the weights.

    column      W = [W_0; ...; W_(t-1)]    y_r = x W_r^T                  x Replicate, y Shard(-1)
    row         W = [W_0, ..., W_(t-1)]    y = sum over r of x_r W_r^T    x Shard(-1), y Replicate
    embedding   W = [W_0; ...; W_(t-1)]    y = sum over r of W_r[x]       x, y Replicate

(torch keeps the transpose of the paper's matrix: what is a column there is a row of `weight`.) A
column layer followed by a row layer needs no message in between. Shoeybi et al., "Megatron-LM"
(arXiv 1909.08053), section 3. Lessons: feature_splitting, sequence_parallel.
"""

from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from minidist.common.groups import require_group
from minidist.common.tensors_in import local_of
from minidist.common.wrapper import copy_on_ranks
from minidist.tensor_parallel.operators import (
    Group,
    all_gather,
    begin_all_gather,
    begin_reduce_scatter,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    reduce_scatter_to_sequence,
    scatter_to_group,
)


class OfGroup(nn.Module):
    """A module that the ranks of a group share. A deep copy is shared by the same ranks."""

    process_group: Group

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy_on_ranks(self, memo, self.process_group)

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
    split: ClassVar[str]  # the attribute that says how many rows (or columns) are split
    sharded: ClassVar[dict[str, int]]  # of each parameter that is split: along which dimension
    uneven: ClassVar[bool] = False  # whether the last ranks may have fewer

    def __init__(self, process_group: Group, sequence_parallel: bool, *sizes: Any) -> None:
        """sizes: the first arguments of the dense class."""
        super().__init__()
        require_group(process_group, type(self).__name__)
        self.process_group = process_group  # None stays None: it can be saved
        self.sequence_parallel, self.sizes = sequence_parallel, sizes
        self.rank, self.world_size = (
            dist.get_rank(process_group),
            dist.get_world_size(process_group),
        )

    def require_split(self) -> None:
        """Raises ValueError, with the sizes, if the ranks cannot share the layer."""
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

    def make_dense(self, device: Any, dtype: Any) -> nn.Module:
        """A layer of torch like the one of which this is a shard, with new weights."""
        return self.dense(*self.sizes, device=device, dtype=dtype)

    @staticmethod
    def sizes_of(layer: Any) -> tuple[Any, ...]:
        """The `sizes` for a shard of this layer of torch."""
        return layer.in_features, layer.out_features, layer.bias is not None

    @classmethod
    def from_dense(cls, layer: Any, process_group: Group = None, **options: Any) -> Self:
        """This rank's shard of `layer`, which must be the same on every rank (`check_replicas`
        looks). `options` are those of the constructor."""
        make: Any = cls
        own: Self = make(
            *cls.sizes_of(layer), process_group=process_group, device="meta", **options
        )
        own.take(layer)
        return own

    def shard_of(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a parameter of the dense layer, as a copy."""
        whole = local_of(whole.detach())
        if name not in self.sharded:
            return whole.clone()
        return whole.index_select(self.sharded[name], self.indices(self.rank).to(whole.device))

    def take(self, dense: nn.Module) -> None:
        """Hold this rank's shard of the parameters of `dense`, as a copy."""
        for name, whole in dense.named_parameters():
            setattr(self, name, nn.Parameter(self.shard_of(name, whole), whole.requires_grad))

    @torch.no_grad()
    def to_dense(self) -> Any:
        """The whole layer, as one of torch, on every rank. All ranks must call it."""
        own = dict(self.named_parameters())
        first = next(iter(own.values()))
        layer = self.make_dense("meta", first.dtype).to_empty(device=first.device)
        for name, whole in layer.named_parameters():
            whole.requires_grad_(own[name].requires_grad)
            if name not in self.sharded:
                whole.copy_(local_of(own[name]))
                continue
            dim = self.sharded[name]
            places = [self.indices(rank).to(whole.device) for rank in range(self.world_size)]
            sizes = [len(index) for index in places]
            shards = gather_shards(local_of(own[name]), dim, sizes, self.process_group)
            for index, piece in zip(places, shards, strict=True):
                whole.index_copy_(dim, index, piece)
        return layer

    def extra_repr(self) -> str:
        return ", ".join([*map(str, self.sizes), f"rank {self.rank} of {self.world_size}"])


def local(parameter: Any) -> Any:
    """What this rank has of a parameter, or None. The gradient of a DTensor is one as well."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def gather_shards(
    piece: torch.Tensor, dim: int, sizes: list[int], group: Group
) -> list[torch.Tensor]:
    """The shards of all ranks, of so many indices along `dim`. They travel as long as the
    longest."""
    shape = list(piece.shape)
    shape[dim] = max(sizes)
    own = piece.new_zeros(shape)
    own.narrow(dim, 0, piece.shape[dim]).copy_(piece)
    padded, work = begin_all_gather(own, group)
    work.wait()
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


# ---- linear layers ----------------------------------------------------------------------------


class _ParallelLinear(ParallelLayer):
    """What the two have in common: they are a shard of an `nn.Linear`."""

    dense = nn.Linear
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        process_group: Group = None,
        *,
        sequence_parallel: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(process_group, sequence_parallel, in_features, out_features, bias)
        self.in_features, self.out_features = in_features, out_features
        self.require_split()
        self.register_parameter("weight", None)  # in the order of nn.Linear's
        self.register_parameter("bias", None)
        self.take(self.make_dense(device, dtype))

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.sizes[2]}, rank {self.rank} of {self.world_size}"
        )


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer of which each rank computes a part of the output features.

        hidden = md.ColumnParallelLinear(C, 4 * C)(x)       # (B, T, C) to (B, T, 4C / t)
        y = md.RowParallelLinear(4 * C, C)(F.gelu(hidden))  # and back to (B, T, C)

    The input (*, in_features) is replicated, the output (*, out_features / t) sharded: rank r has
    the r-th part of the features. In backward, the gradient of the input is summed over the ranks,
    while that of the weight is computed.

    in_features, out_features, bias, device, dtype: those of `nn.Linear`, for the whole layer.
    process_group: the ranks that share the layer; None is the default group.
    gather_output: every rank gets the whole output, (*, out_features).
    sequence_parallel: the input is sharded too, along the sequence: (B, T / t, in_features). It is
        gathered, not kept, and gathered again in backward.

    Raises ValueError if `out_features` is not a multiple of the number of ranks: a step takes as
    long as its slowest rank, and attention cannot cut a head. There are no gradients of gradients;
    `F.linear` between the operators of this lesson has them.
    Lesson: feature_splitting.
    """

    split = "out_features"
    sharded = {"weight": 0, "bias": 0}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        process_group: Group = None,
        *,
        gather_output: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, process_group, **options)
        self.gather_output = gather_output
        if gather_output:  # also for a VocabParallelLinear: only equal parts can be joined
            require_multiple(out_features, self.world_size, "out_features to gather")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x, local(self.weight), local(self.bias))
        return gather_from_group(y, -1, self.process_group) if self.gather_output else y

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """F.linear of a Replicate x, or of one that is Shard along the sequence."""
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = bias if bias is None else bias.to(dtype)
        function = _GatherLinear if self.sequence_parallel else _CopyLinear
        return function.apply(x, weight, bias, self.process_group)


class RowParallelLinear(_ParallelLinear):
    """A linear layer of which each rank takes a part of the input features.

    The input (*, in_features / t) is sharded, as a `ColumnParallelLinear` leaves it; the output
    (*, out_features) is the sum over the ranks, replicated. The bias is replicated, and added once.
    Backward needs no message, but for what the options below ask for.

    in_features, out_features, bias, process_group, device, dtype: as in `ColumnParallelLinear`.
    input_is_parallel: False for a replicated input (*, in_features), which each rank then cuts.
    sequence_parallel: the output is sharded along the sequence, (B, T / t, out_features), and its
        gradient is gathered. The bias sees a part of the tokens; its gradient is summed over the
        ranks.

    Raises ValueError if `in_features` is not a multiple of the number of ranks.
    Lesson: feature_splitting.
    """

    split = "in_features"
    sharded = {"weight": 1}  # the bias is replicated

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        process_group: Group = None,
        *,
        input_is_parallel: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, process_group, **options)
        self.input_is_parallel = input_is_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.input_is_parallel:
            x = scatter_to_group(x, -1, self.process_group)
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
    sum over the ranks is the embedding (*, embedding_dim), replicated.

    num_embeddings, embedding_dim, device, dtype: those of `nn.Embedding`, for the whole layer.
    process_group: the ranks that share the layer; None is the default group.
    sequence_parallel: the output is sharded along the sequence, (B, T / t, embedding_dim).

    Raises ValueError if a rank would have no token; `forward`, IndexError for a token that
    is not in the vocabulary; `from_dense`, ValueError for an embedding with `padding_idx`,
    `max_norm`, `scale_grad_by_freq` or `sparse`.
    """

    dense = nn.Embedding
    split = "num_embeddings"
    sharded = {"weight": 0}
    uneven = True
    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        process_group: Group = None,
        *,
        sequence_parallel: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(process_group, sequence_parallel, num_embeddings, embedding_dim)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.require_split()
        self.take(self.make_dense(device, dtype))

    @staticmethod
    def sizes_of(layer: nn.Embedding) -> tuple[Any, ...]:
        for name in ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(layer, name) is not None and getattr(layer, name) is not False:
                raise ValueError(f"a VocabParallelEmbedding has no {name}")
        return layer.num_embeddings, layer.embedding_dim

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if tokens.numel() and not 0 <= tokens.min() <= tokens.max() < self.num_embeddings:
            raise IndexError(
                f"tokens from {int(tokens.min())} to {int(tokens.max())} are not all in a "
                f"vocabulary of {self.num_embeddings}"
            )
        weight = local(self.weight)
        own = tokens - int(self.indices(self.rank)[0])
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

    Raises ValueError unless `heads` is a multiple of the number of ranks and of `kv_heads`, and one
    of `kv_heads` and the number of ranks a multiple of the other.
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

    def take(self, dense: nn.Module) -> None:
        super().take(dense)
        if not self.kv_is_split:
            for name, whole in dense.named_parameters():
                value = whole.detach()[self.heads * self.head_dim :].clone()
                setattr(self, f"kv_{name}", nn.Parameter(value, whole.requires_grad))

    @torch.no_grad()
    def to_dense(self) -> nn.Linear:
        layer = super().to_dense()
        if not self.kv_is_split:
            for name, whole in layer.named_parameters():
                whole[self.heads * self.head_dim :] = getattr(self, f"kv_{name}")
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x, self._with_kv("weight"), self._with_kv("bias"))

    def _with_kv(self, name: str) -> Any:
        own = local(getattr(self, name))
        if self.kv_is_split or own is None:
            return own
        head = self.rank * self.kv_heads // self.world_size  # that of this rank's queries
        rows = self._rows(torch.tensor([head, self.kv_heads + head]))
        whole = copy_to_group(getattr(self, f"kv_{name}"), self.process_group)
        return torch.cat([own, whole[rows.to(whole.device)]])


# ---- what two messages at once need -----------------------------------------------------------


class _CopyLinear(torch.autograd.Function):
    """`F.linear(copy_to_group(x), weight, bias)`, whose backward does two things at once:

    grad_x = sum over ranks of grad W        all_reduce: on its way, while
    grad_W = grad^T x                        is computed
    """

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, group: Group) -> torch.Tensor:
        ctx.group = group
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad_x = work = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight
            work = dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        grads = _parameter_grads(ctx, grad, x)
        if work is not None:
            work.wait()
        return grad_x, *grads, None


class _GatherLinear(torch.autograd.Function):
    """`F.linear(gather_from_sequence(x), weight, bias)`, that keeps x only as this rank's part:
    backward gathers it again, while it computes what needs no x."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, group: Group) -> torch.Tensor:
        ctx.group = group
        ctx.save_for_backward(x, weight)
        return F.linear(all_gather(x, -2, group), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad_x = work = None
        whole, gathering = begin_all_gather(x, ctx.group)
        if ctx.needs_input_grad[0]:
            grad_x, work = begin_reduce_scatter(grad @ weight, -2, ctx.group)
        gathering.wait()
        grads = _parameter_grads(ctx, grad, torch.cat(whole, -2))
        if work is not None:
            work.wait()
        return grad_x, *grads, None


def _parameter_grads(
    ctx: Any, grad: torch.Tensor, x: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of weight and bias, as far as they are asked for."""
    rows = grad.reshape(-1, grad.shape[-1])  # (N, F / t)
    _, weight, bias, _ = ctx.needs_input_grad
    return (
        rows.T @ x.reshape(-1, x.shape[-1]) if weight else None,
        rows.sum(0) if bias else None,
    )
