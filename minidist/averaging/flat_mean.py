"""Means of parameters over the ranks, in few messages (lesson: beyond_gradients)."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist


class Mean:
    """The mean over the ranks of each of these tensors, on its way from now on.

    All tensors of one dtype and device are one message. The tensors may change meanwhile. Raises
    TypeError for whole numbers, such as a batch norm's count of batches.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> None:
        for tensor in tensors:
            if not (tensor.is_floating_point() or tensor.is_complex()):
                raise TypeError(f"a tensor of {tensor.dtype} has no mean: leave it out")
        self._like = tensors
        self._flats, self._works = pack(tensors), []
        for flat in self._flats:
            flat /= dist.get_world_size(group)  # before the sum, which 16 bits could not hold
            self._works.append(dist.all_reduce(flat, group=group, async_op=True))

    def wait(self) -> list[torch.Tensor]:
        """The means, as soon as they are there, in memory of their own."""
        for work in self._works:
            if work is not None:
                work.wait()
        return unpack(self._flats, self._like)


def _kind(tensor: torch.Tensor) -> tuple[torch.dtype, torch.device]:
    return tensor.dtype, tensor.device


def pack(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of the tensors, end to end: one vector (n,) for each dtype and device."""
    together: dict[object, list[torch.Tensor]] = {}
    for tensor in tensors:
        together.setdefault(_kind(tensor), []).append(tensor.detach().flatten())
    return [torch.cat(pieces) for pieces in together.values()]


def unpack(flats: list[torch.Tensor], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of the vectors, with the shapes of the tensors that were packed."""
    rest = {_kind(flat): flat for flat in flats}
    found = []
    for tensor in like:
        flat = rest[_kind(tensor)]
        found.append(flat[: tensor.numel()].view(tensor.shape))
        rest[_kind(tensor)] = flat[tensor.numel() :]
    return found


@torch.no_grad()
def average(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Replace each tensor by its mean over the ranks: one all_reduce for each dtype and device. All
    ranks call it, such as with `model.parameters()` before an evaluation.
    Lesson: beyond_gradients."""
    tensors = list(tensors)
    for tensor, mean in zip(tensors, Mean(tensors, group).wait(), strict=True):
        tensor.copy_(mean)


@torch.no_grad()
def drift(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None) -> float:
    """How far the ranks' tensors are apart: the root of the mean over the ranks of |x - x̄|²,
    relative to the length of their mean x̄. Equal replicas are 0 apart, but for the rounding of
    float64. All ranks call it, and have the same answer; it costs an all_reduce of all tensors, as
    float64: 16 bits would round the mean by more than replicas differ. Lesson: beyond_gradients."""
    own = [tensor.double() for tensor in tensors]
    means = Mean(own, group).wait()
    apart = sum((x - mean).square().sum() for x, mean in zip(own, means, strict=True))
    total = torch.as_tensor(apart, dtype=torch.float64) / dist.get_world_size(group)
    dist.all_reduce(total, group=group)
    length = sum(mean.square().sum() for mean in means)
    return (total / length).sqrt().item() if total else 0.0
