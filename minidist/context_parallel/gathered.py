"""Keys and values of all tokens on every rank, as in Llama 3 (arXiv 2407.21783, section 3.3.2).

Nothing is merged, and any mask would do. With few heads of keys, what is gathered is small beside
what is computed. But autograd keeps all keys and values until backward (one could gather them
again), attention begins only when all have come, and its mask is given whole: a kernel for CPUs
takes twice as long. Forward is an all_gather, backward a reduce_scatter. Lesson: long_sequences.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.functional import scaled_dot_product_attention as whole_attention

from minidist.context_parallel.cuts import Cut, Group


def gathered_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cut: Cut, group: Group = None
) -> torch.Tensor:
    """Causal attention. q: (B, H, T_r, D), k, v: (B, Hkv, T_r, D), of this rank's tokens.

    Run by run of consecutive tokens, each over the keys up to its end: two in a zigzag.
    """
    k, v = _Gather.apply(torch.stack([k, v]), cut, group)  # (B, Hkv, T, D)
    own = cut.positions[dist.get_rank(group)]
    ends = [*((own.diff() != 1).nonzero().flatten() + 1).tolist(), len(own)]
    pieces = []
    for first, last in zip([0, *ends], ends, strict=False):
        end = int(own[last - 1]) + 1
        seen = Cut([own[first:last], torch.arange(end)], cut.documents).allowed(0, 1)
        attended = whole_attention(
            q[:, :, first:last],
            k[:, :, :end],
            v[:, :, :end],
            seen.to(q.device),
            enable_gqa=q.shape[1] != k.shape[1],
        )
        pieces.append(attended)
    return torch.cat(pieces, 2)


class _Gather(torch.autograd.Function):
    """(2, B, Hkv, T_r, D) of each rank to (2, B, Hkv, T, D), in the order of the sequence. Ranks
    with fewer tokens than others pad."""

    @staticmethod
    def forward(ctx: Any, kv: torch.Tensor, cut: Cut, group: Group) -> torch.Tensor:
        ctx.cut, ctx.group = cut, group
        own = _padded(kv, cut)
        whole = own.new_empty(len(cut.positions), *own.shape)
        dist.all_gather_single(whole.flatten(0, 1), own, group=group)
        parts = [part[..., : len(of), :] for part, of in zip(whole, cut.positions, strict=True)]
        return cut.join(parts, 3)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cut, group = ctx.cut, ctx.group
        parts = [_padded(cut.take(gradient, r, 3), cut) for r in range(len(cut.positions))]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter_single(own, torch.cat(parts), group=group)
        return own[..., : len(cut.positions[dist.get_rank(group)]), :], None, None


def _padded(kv: torch.Tensor, cut: Cut) -> torch.Tensor:
    most = max(map(len, cut.positions))
    return F.pad(kv, (0, 0, 0, most - kv.shape[3])).contiguous()
