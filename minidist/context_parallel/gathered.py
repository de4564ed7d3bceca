"""Keys and values of all tokens on every rank, as in Llama 3 (arXiv 2407.21783, section 3.3.2).

Nothing is merged, and any mask would do. With few heads of keys, what is gathered is small beside
what is computed. But autograd keeps all keys and values until backward (one could gather them
again), attention begins only when all have come, and its mask is given whole: a kernel for CPUs
takes twice as long. Forward is an all_gather, backward a reduce_scatter. Lesson: long_sequences.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.functional import scaled_dot_product_attention as whole_attention

from minidist.context_parallel.cuts import Cut, Group
from minidist.tensor_parallel.operators import gather_from_sequence


def gathered_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cut: Cut, group: Group = None
) -> torch.Tensor:
    """Causal attention. q: (B, H, T_r, D), k, v: (B, Hkv, T_r, D), of this rank's tokens.

    Run by run of consecutive tokens, each over the keys up to its end: two in a zigzag.
    """
    most = max(map(len, cut.positions))  # who has fewer tokens than others, pads
    padded = F.pad(torch.stack([k, v]), (0, 0, 0, most - k.shape[2]))
    parts = gather_from_sequence(padded, 3, group).split(most, 3)
    parts = [part[..., : len(of), :] for part, of in zip(parts, cut.positions, strict=True)]
    k, v = cut.join(parts, 3)  # (B, Hkv, T, D), in the order of the sequence
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
