"""An attention over tokens that are cut among ranks, held against one process."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import minidist as md
from minidist.context_parallel import Cut
from minidist.instruments.compare.watched_steps import sent

HEADS, FEATURES = 12, 8


def attention(
    way: Callable[..., Tensor], kind: str = "zigzag", length: int = 48, kv_heads: int = HEADS
) -> tuple[float, int, int]:
    """How far a causal attention of 12 heads is from one process, relatively: its output, and the
    gradients of q, k and v. And the bytes that this rank sends forward, and backward.

        pool(md.compare.attention, md.context_parallel.ring_attention)

    way: of this rank's q, k and v (1, H, T_r, 8) in float64, and a `Cut`. Lesson: long_sequences.
    """
    torch.manual_seed(0)
    cut, rank = Cut.of(kind, length, dist.get_world_size()), dist.get_rank()
    sizes = (HEADS, kv_heads, kv_heads, HEADS)
    whole = [torch.randn(1, n, length, FEATURES, dtype=torch.float64) for n in sizes]
    own = [cut.take(x, rank, 2) for x in whole]

    def by_one_process(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    wanted, *_ = _result(by_one_process, *whole)
    found, forward, backward = _result(lambda q, k, v: way(q, k, v, cut), *own)
    pairs = zip(found, [cut.take(x, rank, 2) for x in wanted], strict=True)
    return max(md.parity.relative_difference(a, b) for a, b in pairs), forward, backward


def _result(
    way: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> tuple[list[Tensor], int, int]:
    """The output and three gradients; bytes sent forward, and backward."""
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    with md.measure.TrafficCounter() as forward:
        out = way(q, k, v)
    with md.measure.TrafficCounter() as backward:
        out.backward(dout)
    gradients = [x.grad for x in (q, k, v) if x.grad is not None]
    return [out.detach(), *gradients], round(sent(forward)), round(sent(backward))
