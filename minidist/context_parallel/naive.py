"""The idea, in one short file: keys and values go round a ring, and each rank adds up what it sees.

A rank keeps the queries of its own tokens. N - 1 times, every rank passes the keys and values that
it has to its right neighbour. What it has seen so far is an output and, for each query, the
logarithm of the sum of its exponentials: enough to add another block. In backward keys and values
go round again, with their gradients, which are home after N hops. What the other files add: cuts
that share the work, messages beside computing, fewer hops, documents, whole models.

Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context" (arXiv
2310.01889). Lesson: long_sequences.
"""

from typing import Any

import torch
import torch.distributed as dist


class NaiveRing(torch.autograd.Function):
    """Causal attention. q, k, v: (B, H, T_r, D), of this rank's tokens; positions: [(T_r,)], of
    each rank's tokens in the whole sequence."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: list[torch.Tensor]
    ) -> torch.Tensor:
        rank, ranks, kv = dist.get_rank(), dist.get_world_size(), [k, v]
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf)
        for step in range(ranks):
            source = (rank - step) % ranks  # whose keys these are
            if step:
                kv = to_the_right(kv, len(positions[source]))
            scores = scores_of(q, kv[0], positions[rank], positions[source])
            total = torch.logaddexp(lse, scores.logsumexp(-1))  # (B, H, T_r)
            out = out * (lse - total).exp()[..., None] + (scores - total[..., None]).exp() @ kv[1]
            lse = total
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.positions = positions
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        rank, ranks, positions = dist.get_rank(), dist.get_world_size(), ctx.positions
        dq, travels = torch.zeros_like(q), [k, v, torch.zeros_like(k), torch.zeros_like(v)]
        own = (dout * out).sum(-1, keepdim=True)  # what a row of softmax subtracts
        for step in range(ranks):
            source = (rank - step) % ranks
            if step:
                travels = to_the_right(travels, len(positions[source]))
            k, v, dk, dv = travels
            scores = scores_of(q, k, positions[rank], positions[source])
            weights = (scores - lse[..., None]).exp()
            dscores = weights * (dout @ v.mT - own) * q.shape[-1] ** -0.5
            dq += dscores @ k
            dk += dscores.mT @ q
            dv += weights.mT @ dout
        dk, dv = to_the_right(travels[2:], len(positions[rank]))  # home
        return dq, dk, dv, None


def scores_of(q: torch.Tensor, k: torch.Tensor, at: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """(B, H, T_r, T_s): no token sees a later one."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return scores.masked_fill(at[:, None] < of, -torch.inf)


def to_the_right(tensors: list[torch.Tensor], tokens: int) -> list[torch.Tensor]:
    """Send these to the right neighbour, and receive the left one's, which are of `tokens`."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = []
    for x in tensors:
        request: Any = dist.isend(x.contiguous(), (rank + 1) % ranks)
        y = x.new_empty(*x.shape[:2], tokens, x.shape[3])
        dist.recv(y, (rank - 1) % ranks)
        request.wait()
        received.append(y)
    return received
