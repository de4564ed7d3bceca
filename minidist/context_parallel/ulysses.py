"""All tokens of some heads, instead of some tokens of all heads (DeepSpeed-Ulysses, arXiv
2309.14509): an all_to_all before attention, and one after it.

Between them, attention is that of one process, with any mask or kernel. A rank sends (N - 1) / N²
of what all ranks together have: the more ranks, the less. But heads cannot be shared by ever more
ranks. Where ranks are more than heads of keys, several get the same one. Lesson: long_sequences.
"""

from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention as whole_attention

from minidist.context_parallel.cuts import Cut, Group


def ulysses_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cut: Cut, group: Group = None
) -> torch.Tensor:
    """Causal attention. q: (B, H, T_r, D), k, v: (B, Hkv, T_r, D), of this rank's tokens.

    Raises ValueError if the ranks cannot share the heads evenly.
    """
    ranks, heads, kv_heads = dist.get_world_size(group), q.shape[1], k.shape[1]
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise ValueError(f"{ranks} ranks cannot share {heads} heads and {kv_heads} of keys evenly")
    if kv_heads < ranks:  # autograd sums the gradients of the copies
        k, v = (x.repeat_interleave(ranks // kv_heads, 1) for x in (k, v))
    q, k, v = _Exchange.apply(True, cut, group, q, k, v)  # (B, H / N, T, D)
    seen = None
    if cut.documents is not None:
        seen = Cut([torch.arange(q.shape[2])], cut.documents).allowed(0, 0).to(q.device)
    attended: torch.Tensor = whole_attention(
        q, k, v, seen, is_causal=seen is None, enable_gqa=q.shape[1] != k.shape[1]
    )
    (attended,) = _Exchange.apply(False, cut, group, attended)
    return attended


class _Exchange(torch.autograd.Function):
    """Tensors (B, H, T_r, D) to (B, H / N, T, D), or back: by one message to each rank."""

    @staticmethod
    def forward(
        ctx: Any, to_heads: bool, cut: Cut, group: Group, *xs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.to_heads, ctx.cut, ctx.group = to_heads, cut, group
        ranks, own = len(cut.positions), len(cut.positions[dist.get_rank(group)])
        if to_heads:
            leaving = [[x.chunk(ranks, 1)[to] for x in xs] for to in range(ranks)]
            shapes = [[_shape(x, ranks, len(of)) for x in xs] for of in cut.positions]
            arrived = _all_to_all(leaving, shapes, group)
            return tuple(cut.join(list(parts), 2) for parts in zip(*arrived, strict=True))
        leaving = [[cut.take(x, to, 2) for x in xs] for to in range(ranks)]
        arrived = _all_to_all(leaving, [[_shape(x, 1, own) for x in xs]] * ranks, group)
        return tuple(torch.cat(parts, 1) for parts in zip(*arrived, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        back = _Exchange.apply(not ctx.to_heads, ctx.cut, ctx.group, *gradients)
        return None, None, None, *back


def _shape(x: torch.Tensor, ranks: int, tokens: int) -> tuple[int, ...]:
    return x.shape[0], x.shape[1] // ranks, tokens, x.shape[3]


def _all_to_all(
    leaving: list[list[torch.Tensor]], shapes: list[list[tuple[int, ...]]], group: Group
) -> list[list[torch.Tensor]]:
    """leaving: what goes to each rank. shapes: of what comes from each, which is returned."""
    flat = torch.cat([x.flatten() for to in leaving for x in to])
    sizes = [[prod(shape) for shape in of] for of in shapes]
    into = flat.new_empty(sum(map(sum, sizes)))
    out = [sum(x.numel() for x in to) for to in leaving]
    dist.all_to_all_single(into, flat, [*map(sum, sizes)], out, group=group)
    arrived = iter(into.split(sum(sizes, [])))
    return [[next(arrived).view(shape) for shape in of] for of in shapes]
