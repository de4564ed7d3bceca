"""Attention of one block of queries and keys, and how blocks are merged.

On CPUs by torch's flash kernel: no matrix of scores, fewer heads of keys than of queries. Its
operators are private, for `F.scaled_dot_product_attention` does not return the logarithms that
merging needs. On other devices in the open, by matrices of a block's scores, which are not kept.
"""

import torch

from minidist.context_parallel.cuts import Block

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_flash_on = "cpu"


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output (B, H, rows, D) of a block's rows and its log-sum-exp (B, H, rows)."""
    q, (k, v) = _in_rows(q[:, :, block.rows]), (_in_rows(x[:, :, block.columns]) for x in (k, v))
    if q.device.type != _flash_on:
        scores, values = _scores(q, k, block), _like_queries(v, q)
        lse = scores.logsumexp(-1)
        return (scores - lse[..., None]).exp().nan_to_num().to(v.dtype) @ values, lse
    out, lse = _flash(q, k, v, 0.0, block.causal, attn_mask=_bias(block, q))
    if block.seen is not None:  # torch 2.13 gives 0 to a query that sees no key of this block
        lse = lse.masked_fill(~block.seen.any(1), -torch.inf)
    return out, lse


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    block: Block,
) -> tuple[torch.Tensor, ...]:
    """The gradients of a block's rows of q, and of its columns of k and v. `out` and `lse` are of
    the whole sequence: so the weights are the true ones, not those within the block."""
    dout, q, out, lse = (x[:, :, block.rows].contiguous() for x in (dout, q, out, lse))
    k, v = (_in_rows(x[:, :, block.columns]) for x in (k, v))
    if q.device.type != _flash_on:
        weights = (_scores(q, k, block) - lse[..., None]).exp().to(q.dtype)  # (B, H, rows, columns)
        own = (dout * out).sum(-1, keepdim=True)  # what a row of softmax subtracts
        dscores = weights * (dout @ _like_queries(v, q).mT - own) * q.shape[-1] ** -0.5
        whole = dscores.mT @ q, weights.mT @ dout  # of each head of queries
        dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in whole)
        return dscores @ _like_queries(k, q), dk, dv
    result: tuple[torch.Tensor, ...] = _flash_backward(
        dout, q, k, v, out, lse, 0.0, block.causal, attn_mask=_bias(block, q)
    )
    return result


def merge(
    out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor, rows: slice
) -> None:
    """Add a block to what was seen so far, in place."""
    total = torch.logaddexp(lse[:, :, rows], more_lse)
    share = (more_lse - total).exp().nan_to_num().unsqueeze(-1)  # nan: nothing seen yet
    out[:, :, rows] = out[:, :, rows] * (1 - share) + more * share
    lse[:, :, rows] = total


def _in_rows(x: torch.Tensor) -> torch.Tensor:
    """The flash kernel reads a token's numbers one after the other, however they lie."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _bias(block: Block, like: torch.Tensor) -> torch.Tensor | None:
    if block.seen is None:
        return None
    return like.new_zeros(block.seen.shape).masked_fill(~block.seen, -torch.inf)


def _like_queries(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)  # (B, Hkv, T, D) to (B, H, T, D)


def _scores(q: torch.Tensor, k: torch.Tensor, block: Block) -> torch.Tensor:
    scores = (q @ _like_queries(k, q).mT).to(at_least_float32(q)) * q.shape[-1] ** -0.5
    seen = block.seen
    if block.causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores if seen is None else scores.masked_fill(~seen.to(q.device), -torch.inf)


def at_least_float32(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
