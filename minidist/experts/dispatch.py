"""Rows go to their experts and back, by an uneven all_to_all that autograd goes through: a row for
each expert that a token has chosen, or one for each rank that has some of them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None  # None: one process, which has all experts
Compute = Callable[[Tensor, Sequence[int]], Tensor]  # rows, sorted by expert, and how many each has


class Plan(NamedTuple):
    """How many rows go to each rank, and come from it, in a forward pass. Their results go the
    other way, and so do the gradients of both in backward."""

    sends: list[int]
    receives: list[int]

    def leaving(self, rank: int) -> int:
        """Rows and results that leave this rank, forward. In backward as many gradients do."""
        return sum(self.sends) + sum(self.receives) - self.sends[rank] - self.receives[rank]


def every_choice(
    rows: Tensor, weights: Tensor, chosen: Tensor, counts: Tensor, compute: Compute, group: Group
) -> tuple[Tensor, Plan]:
    """A token's row (C,) goes out k times, and its weighted results are added up at home.

    rows (N, C); weights, chosen (N, k); counts (E,), of the choices. Returns (N, C)."""
    order = chosen.flatten().argsort(stable=True)  # by expert, and so by rank
    tokens = order // chosen.shape[1]
    theirs = swap(counts.view(size_of(group), -1), group)  # (p, E / p): each rank's, for my experts
    plan = Plan(counts.view_as(theirs).sum(1).tolist(), theirs.sum(1).tolist())
    arrived = exchange(rows[tokens], *plan, group)
    # Rows arrive by sender, and from each by expert. Together they are to be by expert.
    kinds = torch.arange(theirs.shape[1], device=rows.device).repeat(len(theirs))
    mine = kinds.repeat_interleave(theirs.flatten()).argsort(stable=True)
    done = compute(arrived[mine], theirs.sum(0).tolist())
    done = torch.empty_like(done).index_copy(0, mine, done)  # by sender again
    back = exchange(done, plan.receives, plan.sends, group)
    weighted = back * weights.flatten()[order].unsqueeze(1)
    return torch.zeros_like(rows).index_add(0, tokens, weighted), plan


def once_to_each_rank(
    rows: Tensor, weights: Tensor, chosen: Tensor, counts: Tensor, compute: Compute, group: Group
) -> tuple[Tensor, Plan]:
    """A token's row goes to a rank once, however many of its experts are there, beside its weights
    for these. Back comes their weighted sum. So p (1 - C(E - E/p, k) / C(E, k)) rows a token leave
    on average, not k: between nodes, this is what DeepSeek-V3 does (arXiv 2412.19437, 3.2.2)."""
    p, E = size_of(group), len(counts)
    # A weight of exactly 0 counts for nothing, nor has its score a gradient.
    gates = weights.new_zeros(len(rows), E).scatter(1, chosen, weights).unflatten(1, (p, -1))
    rank, token = (gates != 0).any(2).T.nonzero(as_tuple=True)  # by rank, and then by token
    sends = rank.bincount(minlength=p)
    plan = Plan(sends.tolist(), swap(sends, group).tolist())
    arrived = exchange(torch.cat([rows[token], gates[token, rank]], 1), *plan, group)
    x, gate = arrived.tensor_split([rows.shape[1]], 1)
    expert, row = (gate != 0).T.nonzero(as_tuple=True)  # by expert
    done = compute(x[row], expert.bincount(minlength=gate.shape[1]).tolist())
    y = torch.zeros_like(x).index_add(0, row, done * gate[row, expert].unsqueeze(1))
    back = exchange(y, plan.receives, plan.sends, group)
    return torch.zeros_like(rows).index_add(0, token, back), plan


def size_of(group: Group) -> int:
    return 1 if group is None else group.size()


def swap(counts: Tensor, group: Group) -> Tensor:
    """counts (p, …): row r goes to rank r, and comes from it."""
    if group is None:
        return counts
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts.contiguous(), group=group)
    return theirs


def exchange(rows: Tensor, sends: list[int], receives: list[int], group: Group) -> Tensor:
    """sends[r] of the rows go to rank r, in their order; receives[r] come from it. All ranks of the
    group call it, those without rows as well, forward and backward. None: the rows as they are."""
    return rows if group is None else _Exchange.apply(rows, sends, receives, group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sends: list[int], receives: list[int], group: Any
    ) -> Tensor:
        ctx.back = receives, sends, group
        arrived = rows.new_empty(sum(receives), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), receives, sends, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Exchange.apply(gradient, *ctx.back), None, None, None
