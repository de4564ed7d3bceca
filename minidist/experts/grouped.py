"""All experts of a rank at once, in three ways. Lesson: experts."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.experts.dispatch import Group
from minidist.experts.gradients import averaged


class Experts(nn.Module):
    """E networks, stacked: up (E, C, H), down (E, H, C), without biases, with a GELU between. Cut
    over ranks they are DTensors, of which a rank has some experts.

    compute: how; `loop`, `padded`, `grouped_mm`, or the `fastest` of them."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter((torch.rand(experts, width, hidden) * 2 - 1) / width**0.5)
        self.down = nn.Parameter((torch.rand(experts, hidden, width) * 2 - 1) / hidden**0.5)
        self.compute: Callable[..., Tensor] = fastest
        self.divisor = 1  # of gradients: how many ranks share a batch
        self.replicas: Group = None  # the ranks with the same experts as this one, if it has others

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """rows (R, C), sorted by expert, of which `counts[e]` are for this rank's expert e."""
        up, down = (averaged(each, self.divisor, self.replicas) for each in (self.up, self.down))
        return self.compute(rows, counts, up.to(rows.dtype), down.to(rows.dtype))


def loop(rows: Tensor, counts: Sequence[int], up: Tensor, down: Tensor) -> Tensor:
    """Two products an expert, one expert after another. An expert without rows takes part, too:
    its gradient is zero, and not missing."""
    parts = zip(rows.split(list(counts)), up, down, strict=True)
    return torch.cat([F.gelu(x @ u) @ d for x, u, d in parts])


def padded(rows: Tensor, counts: Sequence[int], up: Tensor, down: Tensor) -> Tensor:
    """Two batched products, (E, most rows, C) @ (E, C, H): the fullest expert sets the work."""
    parts = list(rows.split(list(counts)))
    batch = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
    done = F.gelu(batch @ up) @ down
    return torch.cat([each[:count] for each, count in zip(done, counts, strict=True)])


def grouped_mm(rows: Tensor, counts: Sequence[int], up: Tensor, down: Tensor) -> Tensor:
    """Two of torch's grouped products, without padding. Gale et al., "MegaBlocks" (arXiv
    2211.15841)."""
    ends = torch.tensor(counts, device=rows.device).cumsum(0).int()
    hidden = F.gelu(F.grouped_mm(rows.contiguous(), up, offs=ends))
    # A gradient of stride 0, such as that of a sum, is refused by torch 2.13.
    return F.grouped_mm(hidden, down, offs=ends) * 1


KNOWN = ("cpu", torch.float32), ("cpu", torch.bfloat16), ("cuda", torch.bfloat16)


def fastest(rows: Tensor, counts: Sequence[int], up: Tensor, down: Tensor) -> Tensor:
    """The grouped product where torch has it for these (rows of whole 16 bytes), else the loop."""
    known = (rows.device.type, rows.dtype) in KNOWN and hasattr(F, "grouped_mm")
    known = known and not torch.is_autocast_enabled(rows.device.type)
    known = known and all(size * rows.itemsize % 16 == 0 for size in up.shape[1:])
    known = known and not torch.compiler.is_compiling()  # torch 2.13 refuses float32 there
    return (grouped_mm if known else loop)(rows, counts, up, down)
