"""Means of parameters over the ranks, in few messages (lesson: beyond_gradients)."""

from collections.abc import Iterable

import torch
import torch.distributed as dist


@torch.no_grad()
def average(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Replace each tensor by its mean over the ranks: one all_reduce for each dtype and device. All
    ranks call it, such as with `model.parameters()` before an evaluation.
    Lesson: beyond_gradients."""
    kinds: dict[object, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for together in kinds.values():
        flat = torch.cat([tensor.flatten() for tensor in together])  # (n,)
        flat /= dist.get_world_size(group)  # before the sum, which 16 bits could not hold
        dist.all_reduce(flat, group=group)
        pieces = flat.split([tensor.numel() for tensor in together])
        for tensor, piece in zip(together, pieces, strict=True):
            tensor.copy_(piece.view(tensor.shape))


@torch.no_grad()
def drift(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None) -> float:
    """How far the ranks' tensors are apart: the root of the mean over the ranks of |x - x̄|²,
    relative to the length of their mean x̄. All ranks call it, and have the same answer. It costs an
    all_reduce in float64: 16 bits would round the mean by more than replicas differ."""
    own = torch.cat([tensor.double().flatten() for tensor in tensors])  # (n,)
    mean = own.clone()
    average([mean], group)
    apart = (own - mean).square().sum()
    average([apart], group)
    return (apart.sqrt() / mean.norm()).item() if apart else 0.0
