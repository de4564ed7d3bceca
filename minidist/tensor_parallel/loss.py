"""The loss of logits that are split by vocabulary. Lesson: sequence_parallel.

In a small model with a large vocabulary, the logits (B, T, V) are the largest activation. Here no
rank ever has all of them. Shoeybi et al., "Megatron-LM" (arXiv 1909.08053), section 3.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from minidist.tensor_parallel.operators import Group


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    process_group: Group = None,
) -> torch.Tensor:
    """The mean of `F.cross_entropy`, of logits that are split by classes and never gathered.

    logits: (*, V_r), the classes of this rank; those of rank 0 come first, and so on. The ranks may
        have different numbers of classes.
    targets: (*), from 0 to V - 1, the same on every rank of the group; those that are
        -100 do not count.

    The loss is the same on every rank. What travels, for N targets on t ranks, are two all_reduces
    of N + t + 2 and of 2 N numbers, instead of N V. Half precision is computed in float32, and
    under autocast the loss stays so, as torch has it. Backward turns the kept probabilities into
    the gradient in place, and so works once. If every target is ignored, the loss is nan and its
    gradient 0, as torch has it.

    Raises ValueError for shapes that do not match; on every rank, ValueError if the ranks have
    different targets, as those along another axis of a mesh do, and IndexError for a target that is
    no class.
    Lesson: sequence_parallel.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} need targets of shape "
            f"{tuple(logits.shape[:-1])}, not {tuple(targets.shape)}"
        )
    counted = targets.flatten() != -100  # (N,)
    wide = torch.promote_types(logits.dtype, torch.float32)
    dtype = wide if torch.is_autocast_enabled(logits.device.type) else logits.dtype
    rows = logits.reshape(-1, logits.shape[-1]).to(wide)
    losses = _CrossEntropy.apply(rows, targets.flatten(), counted, process_group)
    return (losses.sum() / counted.sum()).to(dtype)


class _CrossEntropy(torch.autograd.Function):
    """The losses (N,) of logits x (N, V_r), with y the target:

        loss = log(sum over v of exp x_v) - x_y
        dloss / dx_v = softmax(x)_v - [v = y]

    Every sum over the classes is a sum over this rank's classes, and then one over the ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, counted: torch.Tensor, group: Group
    ) -> torch.Tensor:
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        # The largest logit, so that no exp overflows; with it the ranks tell their V_r, and the
        # largest and the smallest of their digests, which are less than 2^23: float32 is exact.
        widths = logits.new_zeros(world_size)
        widths[rank] = logits.shape[1]
        weights = torch.arange(1, len(targets) + 1, device=targets.device) * 2654435761
        weights ^= weights >> 15  # as if drawn at random
        digest = ((targets * weights).sum() % 8388593).to(logits.dtype)  # a prime
        message = torch.cat([logits.amax(1), widths, torch.stack([digest, -digest])])
        dist.all_reduce(message, dist.ReduceOp.MAX, group)  # (N + t + 2,)
        largest, widths, digests = message.tensor_split([len(logits), -2])
        if digests.sum().any():
            raise ValueError(
                "the ranks of this group have different targets: it must be the group of those "
                'that share the vocabulary, such as mesh.get_group("tensor")'
            )
        first, classes = int(widths[:rank].sum()), int(widths.sum())
        if ((targets < 0) | (targets >= classes))[counted].any():
            raise IndexError(f"a target is not among the {classes} classes")

        own = targets - first
        here = counted & (own >= 0) & (own < logits.shape[1])
        rows, columns = here.nonzero().squeeze(1), own[here]  # where this rank has the target
        shifted = logits - largest.unsqueeze(1)  # (N, V_r)
        sums = logits.new_zeros(2, len(logits))
        sums[1, rows] = shifted[rows, columns]
        probabilities = shifted.exp_()
        sums[0] = probabilities.sum(1)
        dist.all_reduce(sums, group=group)
        probabilities /= sums[0].unsqueeze(1)
        ctx.save_for_backward(probabilities, rows, columns, counted)
        return (sums[0].log() - sums[1]).masked_fill_(~counted, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        gradient, rows, columns, counted = ctx.saved_tensors
        gradient[rows, columns] -= 1
        # Not `grad * counted`: the mean of no losses has the gradient inf.
        gradient *= grad.masked_fill(~counted, 0).unsqueeze(1)
        return gradient, None, None, None
