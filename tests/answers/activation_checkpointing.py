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
        return CheckpointPolicy.MUST_SAVE if self.keep(op) else CheckpointPolicy.MUST_RECOMPUTE

    def forward(self, x):
        contexts = partial(create_selective_checkpoint_contexts, self.policy)
        return checkpoint(self.block, x, use_reentrant=False, context_fn=contexts)


def by_name(block):
    return Keeping(block, lambda op: "mm" in str(op) or "attention" in str(op))


def by_a_set(block):
    return Keeping(block, {aten.mm.default, aten.addmm.default, ATTENTION}.__contains__)


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
    return Keeping(block, lambda op: True)


def without_addmm(block):
    return Keeping(block, lambda op: op in (aten.mm.default, ATTENTION))


def without_attention(block):
    return Keeping(block, lambda op: "mm" in str(op))


def attention_alone(block):
    return Keeping(block, lambda op: "attention" in str(op))


def wrap_mlp(block):
    block.mlp = md.checkpoint_wrapper(block.mlp)
    return block


def without_a_graph(block):
    return lambda x: block(x).detach()


ANSWERS = {
    check.segment: ([4, 4.0], [8, 16, 32, 1, 2, "4 layers"]),
    check.of_gpt3: ([114, 114.0, 34 + 5 * 96 * 2048 / 12288], [80, 34, 30, 0.3, "114 bytes"]),
    check.selective: (
        [by_name, by_a_set, three_checkpoints],
        [
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
