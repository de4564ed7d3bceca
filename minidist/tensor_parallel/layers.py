"""Layers that the ranks of a group share: each rank holds a shard of the weights.

    column      W = [W_0; ...; W_(t-1)]    y_r = x W_r^T                  x Replicate, y Shard(-1)
    row         W = [W_0, ..., W_(t-1)]    y = sum over r of x_r W_r^T    x Shard(-1), y Replicate
    embedding   W = [W_0; ...; W_(t-1)]    y = sum over r of W_r[x]       x, y Replicate

(torch keeps the transpose of the paper's matrix: what is a column there is a row of `weight`.) A
column layer followed by a row layer needs no message in between. Shoeybi et al., "Megatron-LM"
(arXiv 1909.08053), section 3. Lessons: feature_splitting, sequence_parallel.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from minidist.tensor_parallel.layer import ParallelLayer, require_multiple
from minidist.tensor_parallel.operators import (
    ColumnLinear,
    Group,
    copy_to_group,
    gather_from_group,
    local,
    reduce_from_group,
    reduce_scatter_to_sequence,
)


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
        sizes = dict(in_features=in_features, out_features=out_features, bias=bias)
        super().__init__(process_group, sequence_parallel, device, dtype, **sizes)
        self.in_features, self.out_features = in_features, out_features

    @staticmethod
    def sizes_of(layer: nn.Linear) -> dict[str, Any]:
        bias = layer.bias is not None
        return dict(in_features=layer.in_features, out_features=layer.out_features, bias=bias)


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
        weight, bias = self.own("weight"), self.own("bias")
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = bias if bias is None else bias.to(dtype)
        y = ColumnLinear.apply(x, weight, bias, self.process_group, self.sequence_parallel)
        return gather_from_group(y, -1, self.process_group) if self.gather_output else y

    def own(self, name: str) -> Any:
        """What this rank computes with: of a parameter, or None."""
        return local(getattr(self, name))


class RowParallelLinear(_ParallelLinear):
    """A linear layer of which each rank takes a part of the input features.

    The input (*, in_features / t) is sharded, as a `ColumnParallelLinear` leaves it; the output
    (*, out_features) is the sum over the ranks, replicated. The bias is replicated, and added once.
    Backward needs no message, but for what the options below ask for.

    in_features, out_features, bias, process_group, device, dtype: as in `ColumnParallelLinear`.
    sequence_parallel: the output is sharded along the sequence, (B, T / t, out_features), and its
        gradient is gathered. The bias sees a part of the tokens; its gradient is summed over the
        ranks.

    Raises ValueError if `in_features` is not a multiple of the number of ranks.
    Lesson: feature_splitting.
    """

    split = "in_features"
    sharded = {"weight": 1}  # the bias is replicated

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
        sizes = dict(num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        super().__init__(process_group, sequence_parallel, device, dtype, **sizes)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.first = self.rank * -(-num_embeddings // self.world_size)  # of this rank's tokens

    @staticmethod
    def sizes_of(layer: nn.Embedding) -> dict[str, Any]:
        for name in ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(layer, name) is not None and getattr(layer, name) is not False:
                raise ValueError(f"a VocabParallelEmbedding has no {name}")
        return dict(num_embeddings=layer.num_embeddings, embedding_dim=layer.embedding_dim)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if tokens.numel() and not 0 <= tokens.min() <= tokens.max() < self.num_embeddings:
            raise IndexError(
                f"tokens from {int(tokens.min())} to {int(tokens.max())} are not all in a "
                f"vocabulary of {self.num_embeddings}"
            )
        weight = local(self.weight)
        own = tokens - self.first
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
