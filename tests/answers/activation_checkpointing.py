"""Answers to the puzzles and the exercise of the lesson activation_checkpointing."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import minidist as md
from minidist.course.checks import activation_checkpointing as check

aten = torch.ops.aten
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default


class Keeping(nn.Module):
    """The block; backward computes all again but what `keep` says of an op."""

    def __init__(self, block, keep):
        super().__init__()
        self.block, self.keep = block, keep

    def policy(self, _, op, *args, **kwargs):
        return (
            CheckpointPolicy.MUST_SAVE if self.keep(op, *args) else CheckpointPolicy.MUST_RECOMPUTE
        )

    def forward(self, x):
        contexts = partial(create_selective_checkpoint_contexts, self.policy)
        return checkpoint(self.block, x, use_reentrant=False, context_fn=contexts)


def by_name(block):
    return Keeping(block, lambda op, *_: "mm" in str(op) or "attention" in str(op))


def by_a_set(block):
    return Keeping(block, lambda op, *_: op in {aten.mm.default, aten.addmm.default, ATTENTION})


def but_the_last(block):
    """All products but the last one, which nobody saves: there torch stops."""
    last = block.mlp[2].weight.t().shape

    def keep(op, *args):
        if op == aten.addmm.default:
            return args[2].shape != last
        return op in (aten.mm.default, ATTENTION)

    return Keeping(block, keep)


class ThreeCheckpoints(nn.Module):
    """Usual checkpoints that end in a linear layer. torch stops before it computes that again."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        block, again = self.block, partial(checkpoint, use_reentrant=False)
        first, gelu, second = block.mlp
        qkv = again(nn.Sequential(block.norm1, block.qkv), x)
        q, k, v = (
            each.unflatten(-1, (block.heads, -1)).transpose(1, 2) for each in qkv.chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + block.out(attended.transpose(1, 2).flatten(2))
        wide = again(nn.Sequential(block.norm2, first), x)
        return x + again(nn.Sequential(gelu, second), wide)


def three_checkpoints(block):
    return ThreeCheckpoints(block)


def all_kept(block):
    return Keeping(block, lambda op, *_: True)


def without_addmm(block):
    return Keeping(block, lambda op, *_: op in (aten.mm.default, ATTENTION))


def without_attention(block):
    return Keeping(block, lambda op, *_: "mm" in str(op))


def attention_alone(block):
    return Keeping(block, lambda op, *_: "attention" in str(op))


def wrap_mlp(block):
    block.mlp = md.checkpoint_wrapper(block.mlp)
    return block


def without_a_graph(block):
    return lambda x: block(x).detach()


ANSWERS = {
    check.one_each: ([32, 32.0], [16, 64, 96, 8, 31, 33, "32 blocks"]),
    check.wrapped_twice: ([3, 3.0], [2, 4, 1, 0, "3 times"]),
    check.selective: (
        [but_the_last, three_checkpoints],
        [
            by_name,
            by_a_set,
            lambda block: block,
            md.checkpoint_wrapper,
            all_kept,
            without_addmm,
            without_attention,
            attention_alone,
            wrap_mlp,
            without_a_graph,
            lambda block: block.mlp,
            lambda block: block.qkv,
        ],
    ),
}
