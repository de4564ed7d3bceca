"""Ring attention with messages beside computing.

While a rank computes with one block of keys and values, the next one is on its way. Backward sends
the same blocks round again. Their gradients follow one step behind: those of rank s begin at its
right neighbour, and arrive at s after N - 1 hops, where its own part is added. Lesson:
long_sequences.
"""

from typing import Any

import torch
import torch.distributed as dist

from minidist.context_parallel import kernel
from minidist.context_parallel.cuts import Cut, Group


def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cut: Cut, group: Group = None
) -> torch.Tensor:
    """Causal attention. q: (B, H, T_r, D), k, v: (B, Hkv, T_r, D), of this rank's tokens."""
    attended: torch.Tensor = _Ring.apply(q, k, v, cut, group)
    return attended


class Passing:
    """A tensor on its way to the right neighbour, and the left one's on its way here."""

    beside = True  # False: nothing is computed meanwhile, to see what that costs

    def __init__(self, x: torch.Tensor, tokens: int, group: Group) -> None:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self._leaving = x.contiguous()
        self._arriving = x.new_empty(*x.shape[:3], tokens, x.shape[4])
        right, left = (rank + 1) % ranks, (rank - 1) % ranks
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._leaving, group=group, group_peer=right),
                dist.P2POp(dist.irecv, self._arriving, group=group, group_peer=left),
            ]
        )
        if not self.beside:
            self.wait()

    def wait(self) -> torch.Tensor:
        while self._works:
            self._works.pop().wait()
        return self._arriving


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cut: Cut, group: Group
    ) -> torch.Tensor:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        kv = own = torch.stack([k, v])
        out = torch.zeros_like(q, dtype=kernel.at_least_float32(q))
        lse = out.new_full(q.shape[:3], -torch.inf)
        for step in range(ranks):
            passing = None
            if step < ranks - 1:
                passing = Passing(kv, len(cut.positions[(rank - step - 1) % ranks]), group)
            if block := cut.block(rank, (rank - step) % ranks):
                kernel.merge(out, lse, *kernel.forward(q, kv[0], kv[1], block), block.rows)
            if passing:
                kv = passing.wait()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, own, out, lse)
        ctx.cut, ctx.group = cut, group
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, kv, out, lse = ctx.saved_tensors
        cut, group = ctx.cut, ctx.group
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        dq, own, following = torch.zeros_like(q), torch.zeros_like(kv), None
        for step in range(ranks):
            before, passing = len(cut.positions[(rank - step - 1) % ranks]), None
            if step < ranks - 1:
                passing = Passing(kv, before, group)
            dkv = torch.zeros_like(kv) if step else own
            if block := cut.block(rank, (rank - step) % ranks):
                grads = kernel.backward(dout, q, kv[0], kv[1], out, lse, block)
                dq[:, :, block.rows] += grads[0]
                for total, part in zip(dkv, grads[1:], strict=True):
                    total[:, :, block.columns] += part
            if following:
                dkv += following.wait()
            if step:
                following = Passing(dkv, before, group)
            if passing:
                kv = passing.wait()
        if following:
            own += following.wait()
        return dq, own[0], own[1], None, None
