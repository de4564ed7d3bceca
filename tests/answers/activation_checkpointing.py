"""Answers to the puzzles and the exercise of the lesson activation_checkpointing."""

from functools import partial

import numpy as np
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


def all_but_the_cheap(block):
    cheap = {aten.gelu.default, aten.native_layer_norm.default, aten.add.Tensor}
    views = ("view", "transpose", "split", "detach", ".t.")
    return Keeping(block, lambda op: op not in cheap and not any(name in str(op) for name in views))


class LinearOf(torch.autograd.Function):
    """linear(cheap(x)), of which backward computes `cheap` again."""

    @staticmethod
    def forward(ctx, cheap, linear, x, *weights):
        ctx.cheap, ctx.linear = cheap, linear
        ctx.save_for_backward(x)
        return linear(cheap(x))

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.cheap(x)
        linear, rows, columns = ctx.linear, gradient.flatten(0, -2), y.detach().flatten(0, -2)
        linear.weight.grad = rows.T @ columns
        if linear.bias is not None:
            linear.bias.grad = rows.sum(0)
        y.backward(gradient @ linear.weight)
        return None, None, x.grad, *[None] * (len(ctx.needs_input_grad) - 3)


class Written(nn.Module):
    """The forward of zoo.Block, with LinearOf."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        block = self.block
        qkv = LinearOf.apply(block.norm1, block.qkv, x, *block.norm1.parameters())
        q, k, v = (
            each.unflatten(-1, (block.heads, -1)).transpose(1, 2) for each in qkv.chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + block.out(attended.transpose(1, 2).flatten(2))
        first, gelu, second = block.mlp
        wide = LinearOf.apply(block.norm2, first, x, *block.norm2.parameters())
        return x + LinearOf.apply(gelu, second, wide)


def by_hand(block):
    return Written(block)


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


def nothing_kept(block):
    return Keeping(block, lambda op: False)


def all_kept(block):
    return Keeping(block, lambda op: True)


def without_addmm(block):
    return Keeping(block, lambda op: op in (aten.mm.default, ATTENTION))


def without_attention(block):
    return Keeping(block, lambda op: "mm" in str(op))


def attention_alone(block):
    return Keeping(block, lambda op: "attention" in str(op))


def wrap_gelu(block):  # its output is kept all the same, by the linear layer after it
    block.mlp[1] = md.checkpoint_wrapper(block.mlp[1])
    return block


def wrap_mlp(block):
    block.mlp = md.checkpoint_wrapper(block.mlp)
    return block


def as_bytes(block):
    """All is kept, but not in tensors."""

    def pack(tensor):
        array = tensor.detach().contiguous().numpy()
        return array.tobytes(), array.dtype, tensor.shape

    def unpack(kept):
        data, dtype, shape = kept
        return torch.from_numpy(np.frombuffer(data, dtype).copy()).view(shape)

    def forward(x):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return block(x)

    return forward


def frozen(block):
    def forward(x):
        with torch.no_grad():
            y = block(x)
        return y + 0 * x

    return forward


def without_a_graph(block):
    return lambda x: block(x).detach()


def a_tuple(block):
    return lambda x: (block(x),)


ANSWERS = {
    check.segment: ([4, 4.0], [8, 16, 32, 1, 2, "4 layers"]),
    check.of_gpt3: ([114, 114.0, 34 + 5 * 96 * 2048 / 12288], [80, 34, 30, 0.3, "114 bytes"]),
    check.selective: (
        [by_name, by_a_set, all_but_the_cheap, by_hand, three_checkpoints],
        [
            lambda block: block,
            md.checkpoint_wrapper,
            nothing_kept,
            all_kept,
            as_bytes,
            without_addmm,
            without_attention,
            attention_alone,
            wrap_gelu,
            wrap_mlp,
            frozen,
            without_a_graph,
            a_tuple,
            lambda block: block.mlp,
            lambda block: block.qkv,
        ],
    ),
}
