"""The idea, in one short file: keys and values go round a ring, and each rank adds up what it sees.

A rank keeps the queries of its own tokens. N - 1 times, every rank passes the keys and values that
it has to its right neighbour. What it has seen so far is an output and, for each query, the
logarithm of the sum of its exponentials. In backward keys and values go round again, with their
gradients, which are home after N hops. The other files add cuts that share the work, messages
beside computing, fewer hops, documents, whole models. Liu et al., "Ring Attention with Blockwise
Transformers for Near-Infinite Context" (arXiv 2310.01889). Lesson: long_sequences.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class NaiveRing(torch.autograd.Function):
    """Causal attention. q, k, v: (B, H, T_r, D), of this rank's tokens; positions: [(T_r,)], of
    each rank's tokens in the whole sequence."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, positions: list[Tensor]) -> Tensor:
        out, lse, kv = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf), torch.stack([k, v])
        for step in range(len(positions)):
            kv, scores = next_block(step, kv, q, positions)
            total = torch.logaddexp(lse, scores.logsumexp(-1))  # (B, H, T_r)
            weights = (scores - total[..., None]).exp()
            out, lse = out * (lse - total).exp()[..., None] + weights @ kv[1], total
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.positions = positions
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, travels = torch.zeros_like(q), torch.stack([k, v, k * 0, v * 0])
        inner = (dout * out).sum(-1, keepdim=True)  # what a row of softmax subtracts
        for step in range(len(ctx.positions)):
            travels, scores = next_block(step, travels, q, ctx.positions)
            k, v, dk, dv = travels
            weights = (scores - lse[..., None]).exp()
            dscores = weights * (dout @ v.mT - inner) * q.shape[-1] ** -0.5
            dq += dscores @ k
            dk += dscores.mT @ q
            dv += weights.mT @ dout
        dk, dv = to_the_right(travels[2:], q.shape[2])  # home
        return dq, dk, dv, None


def next_block(
    step: int, travels: Tensor, q: Tensor, positions: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """What travels, passed on but at step 0; the scores of its keys, (B, H, T_r, T_s)."""
    rank, source = dist.get_rank(), (dist.get_rank() - step) % len(positions)
    if step:
        travels = to_the_right(travels, len(positions[source]))
    scores = q @ travels[0].mT * q.shape[-1] ** -0.5
    return travels, scores.masked_fill(positions[rank][:, None] < positions[source], -torch.inf)


def to_the_right(x: Tensor, tokens: int) -> Tensor:
    """Send this to the right neighbour, and receive the left one's, which is of `tokens`."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    request: Any = dist.isend(x.contiguous(), (rank + 1) % ranks)
    dist.recv(arrived := x.new_empty(*x.shape[:3], tokens, x.shape[4]), (rank - 1) % ranks)
    request.wait()
    return arrived
