"""A fixed number of places for each expert: even messages, whose shapes are known beforehand.

No counts travel, and no GPU waits for a CPU that reads them. The price: empty places travel too,
and a choice without a place is dropped. A token without any skips the layer: the residual
connection alone carries it on. Each rank's tokens have queues of their own: one process drops
others.

Lepikhin et al., "GShard" (arXiv 2006.16668), section 2.2. Lesson: experts.
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from minidist.experts.dispatch import Compute, Group, exchange, size_of


def places(tokens: int, k: int, experts: int, factor: float) -> int:
    """That an expert has for one rank's tokens: `factor` times an even share of them."""
    return math.ceil(factor * tokens * k / experts)


def queue(chosen: Tensor, experts: int) -> Tensor:
    """(N, k): the place of each choice in the queue of its expert. First choices come first, as in
    GShard, and then tokens in their order."""
    by_choice = chosen.T.flatten()  # (k N,)
    before = F.one_hot(by_choice, experts).cumsum(0) - 1
    return before.gather(1, by_choice.unsqueeze(1)).view(chosen.T.shape).T


def with_places(
    rows: Tensor,
    weights: Tensor,
    chosen: Tensor,
    counts: Tensor,
    compute: Compute,
    group: Group,
    factor: float,
) -> tuple[Tensor, int]:
    """As `every_choice`, without the choices that find no place. Returns (N, C), and how many of
    this rank's were dropped."""
    (N, k), C, experts, p = chosen.shape, rows.shape[1], len(counts), size_of(group)
    most = torch.tensor(N, device=rows.device)
    if group is not None:  # or the ranks' messages would not match
        dist.all_reduce(most, dist.ReduceOp.MAX, group)
    room = places(int(most), k, experts, factor)
    place = queue(chosen, experts)
    fits = place < room
    slot = (chosen * room + place)[fits]  # of E room places
    token = torch.arange(N, device=rows.device).unsqueeze(1).expand(-1, k)[fits]
    boxes = rows.new_zeros(experts * room, C).index_copy(0, slot, rows[token])
    even = [experts * room // p] * p
    arrived = exchange(boxes, even, even, group)  # (p, E / p, room, C): by sender
    done = compute(_swapped(arrived, p, experts // p), [p * room] * (experts // p))
    back = exchange(_swapped(done, experts // p, p), even, even, group)
    weighted = back[slot] * weights[fits].unsqueeze(1)
    return torch.zeros_like(rows).index_add(0, token, weighted), int((~fits).sum())


def _swapped(rows: Tensor, outer: int, inner: int) -> Tensor:
    """(outer · inner · room, C) to (inner · outer · room, C)."""
    return rows.view(outer, inner, -1, rows.shape[1]).transpose(0, 1).flatten(0, 2)
