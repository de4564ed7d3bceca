"""A vocabulary that is split over the ranks: embedding, output layer, and loss.

In a small model with a large vocabulary these hold most of the weights, and the logits (B, T, V)
are the largest activation. Here each rank has the weights of its own tokens, and no rank ever has
all logits. Shoeybi et al., "Megatron-LM" (arXiv 1909.08053), section 3.

A vocabulary is split as evenly as can be, without padding: V tokens over t ranks are V // t each,
and one more on each of the first V % t ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from minidist.tensor_parallel.layer import ParallelLayer
from minidist.tensor_parallel.linear import ColumnParallelLinear
from minidist.tensor_parallel.operators import (
    Group,
    reduce_from_group,
    reduce_scatter_to_sequence,
)


class VocabParallelEmbedding(ParallelLayer):
    """An embedding of which each rank holds the rows of its own tokens. Lesson: sequence_parallel.

    The input (*) is replicated. A rank looks up its own tokens and has zeros for the others; the
    sum over the ranks is the embedding (*, embedding_dim), replicated.

    num_embeddings, embedding_dim, device, dtype: those of `nn.Embedding`, for the whole layer.
    process_group: the ranks that share the layer; None is the default group.
    sequence_parallel: the output is sharded along the sequence, (B, T / t, embedding_dim).

    Raises ValueError if there are fewer tokens than ranks; `forward`, IndexError for a token that
    is not in the vocabulary; `from_dense`, ValueError for an embedding with `padding_idx`,
    `max_norm`, `scale_grad_by_freq` or `sparse`.
    """

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
        super().__init__(process_group)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.sequence_parallel = sequence_parallel
        self.require_split()
        self.take(self.make_dense(device, dtype))

    def make_dense(self, device: Any, dtype: Any) -> nn.Embedding:
        return nn.Embedding(self.num_embeddings, self.embedding_dim, device=device, dtype=dtype)

    @staticmethod
    def arguments(layer: nn.Embedding) -> tuple[Any, ...]:
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
        first, count = int(self.indices(self.rank)[0]), len(self.weight)
        own = tokens - first
        elsewhere = (own < 0) | (own >= count)
        partial = F.embedding(own.clamp(0, count - 1), self.weight)  # (*, C)
        partial = partial.masked_fill(elsewhere.unsqueeze(-1), 0)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence(partial, -2, self.process_group)
        return reduce_from_group(partial, self.process_group)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, rank {self.rank} of {self.world_size}"


class VocabParallelLinear(ColumnParallelLinear):
    """The output layer of a language model: (*, C) to the logits of this rank's tokens.

    A `ColumnParallelLinear` that splits its outputs as `VocabParallelEmbedding` does, so that the
    two can share one weight. `vocab_parallel_cross_entropy` takes its output.

    Raises ValueError if there are fewer tokens than ranks.
    Lesson: sequence_parallel.
    """

    uneven = True


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    process_group: Group = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """`F.cross_entropy` of logits that are split by classes, which are never gathered.

    logits: (*, V_r), the classes of this rank; those of rank 0 come first, and so on. The ranks may
        have different numbers of classes.
    targets: (*), from 0 to V - 1, the same on every rank.
    ignore_index, reduction, label_smoothing: those of `F.cross_entropy`.

    The loss is the same on every rank. What travels, for N targets on t ranks, are two all_reduces
    of N + t and of 2 N numbers (3 N with label smoothing), instead of N V. Half precision is
    computed in float32. Backward turns the kept probabilities into the gradient in place, and so
    works once. If every target is ignored, the mean is nan and its gradient 0, as torch has it.

    Raises ValueError for shapes that do not match and an unknown reduction; IndexError, on every
    rank, for a target that is no class.
    Lesson: sequence_parallel.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} need targets of shape "
            f"{tuple(logits.shape[:-1])}, not {tuple(targets.shape)}"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction is "mean", "sum" or "none", not {reduction!r}')
    counted = targets.flatten() != ignore_index  # (N,)
    wide = torch.promote_types(logits.dtype, torch.float32)
    losses = _CrossEntropy.apply(
        logits.reshape(-1, logits.shape[-1]).to(wide),
        targets.flatten(),
        counted,
        process_group,
        label_smoothing,
    )
    if reduction == "none":
        return losses.view(targets.shape).to(logits.dtype)
    total = losses.sum()
    return (total / counted.sum() if reduction == "mean" else total).to(logits.dtype)


class _CrossEntropy(torch.autograd.Function):
    """The losses (N,) of logits x (N, V_r), with y the target and e the label smoothing:

        loss = log(sum over v of exp x_v) - (1 - e) x_y - e mean over v of x_v
        dloss / dx_v = softmax(x)_v - (1 - e) [v = y] - e / V

    Every sum over the classes is a sum over this rank's classes, and then one over the ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        counted: torch.Tensor,
        group: Group,
        smoothing: float,
    ) -> torch.Tensor:
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        # The largest logit, so that no exp overflows; with it the ranks tell their V_r.
        widths = logits.new_zeros(world_size)
        widths[rank] = logits.shape[1]
        message = torch.cat([logits.amax(1), widths])  # (N + t,)
        dist.all_reduce(message, dist.ReduceOp.MAX, group)
        largest, widths = message.tensor_split([len(logits)])
        first, classes = int(widths[:rank].sum()), int(widths.sum())
        if ((targets < 0) | (targets >= classes))[counted].any():
            raise IndexError(f"a target is not among the {classes} classes")

        own = targets - first
        here = counted & (own >= 0) & (own < logits.shape[1])
        rows, columns = here.nonzero().squeeze(1), own[here]  # where this rank has the target
        shifted = logits - largest.unsqueeze(1)  # (N, V_r)
        sums = logits.new_zeros(3 if smoothing else 2, len(logits))
        sums[1, rows] = shifted[rows, columns]
        if smoothing:
            sums[2] = shifted.sum(1)
        probabilities = shifted.exp_()
        sums[0] = probabilities.sum(1)
        dist.all_reduce(sums, group=group)
        probabilities /= sums[0].unsqueeze(1)

        losses = sums[0].log() - (1 - smoothing) * sums[1]
        if smoothing:
            losses -= smoothing / classes * sums[2]
        ctx.save_for_backward(probabilities, rows, columns, counted)
        ctx.smoothing, ctx.classes = smoothing, classes
        return losses.masked_fill_(~counted, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        gradient, rows, columns, counted = ctx.saved_tensors
        gradient -= ctx.smoothing / ctx.classes
        gradient[rows, columns] -= 1 - ctx.smoothing
        # Not `grad * counted`: the mean of no losses has the gradient inf.
        gradient *= grad.masked_fill(~counted, 0).unsqueeze(1)
        return gradient, None, None, None, None
