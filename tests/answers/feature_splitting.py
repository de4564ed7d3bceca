"""Answers to the puzzles and the exercise of the lesson feature_splitting."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from minidist import tensor_parallel
from minidist.course.checks import feature_splitting as check


def mine(whole, dim):
    return whole.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def summed(x):
    total = x.contiguous().clone()
    dist.all_reduce(total)
    return total


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return summed(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient)


class SumBoth(Sum):
    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient)


def nothing(x):
    return x


def rows_of_heads(weight):
    return torch.cat([mine(each, 0) for each in weight.chunk(3)])


def own_heads(block, x, enter=Copy.apply, leave=Sum.apply, rows=rows_of_heads, out=None, bias=1):
    """Right as it is; the options make other answers of it."""
    heads = block.heads // dist.get_world_size()
    q, k, v = (
        each.unflatten(-1, (heads, -1)).transpose(1, 2)
        for each in F.linear(enter(x), rows(block.qkv.weight)).chunk(3, -1)
    )
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    weight = mine(block.out.weight, 1) if out is None else out(block.out.weight)
    y = leave(F.linear(attended.transpose(1, 2).flatten(2), weight))
    return y + block.out.bias if bias else y


def from_the_library(block, x):
    copy, add = tensor_parallel.copy_to_group, tensor_parallel.reduce_from_group
    return own_heads(block, x, copy, add)


def every_nth_head(block, x):
    """Rank r takes the heads r, r + N, r + 2N, ..."""
    size, heads = dist.get_world_size(), block.heads
    index = torch.arange(heads * x.shape[2] // heads).view(heads, -1)
    index = index[dist.get_rank() :: size].flatten()
    return own_heads(
        block,
        x,
        rows=lambda weight: torch.cat([each[index] for each in weight.chunk(3)]),
        out=lambda weight: weight[:, index],
    )


def spelled_out(block, x):
    """Attention in matrix products, a head at a time."""
    C, size = x.shape[2], dist.get_world_size()
    D, T = C // block.heads, x.shape[1]
    mask = torch.full((T, T), float("-inf"), dtype=x.dtype).triu(1)
    x, y = Copy.apply(x), 0
    for head in range(dist.get_rank(), block.heads, size):
        q, k, v = (
            x @ block.qkv.weight[part * C + head * D : part * C + (head + 1) * D].T
            for part in range(3)
        )
        weights = (q @ k.transpose(1, 2) / D**0.5 + mask).softmax(-1)
        y = y + weights @ v @ block.out.weight[:, head * D : (head + 1) * D].T
    return Sum.apply(y) + block.out.bias


def whole(block, x):
    q, k, v = (
        each.unflatten(-1, (block.heads, -1)).transpose(1, 2)
        for each in F.linear(x, block.qkv.weight).chunk(3, -1)
    )
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(attended.transpose(1, 2).flatten(2), block.out.weight, block.out.bias)


def slices_afterwards(block, x):
    """q, k and v of all heads."""
    q, k, v = (
        mine(each.unflatten(-1, (block.heads, -1)).transpose(1, 2), 1)
        for each in F.linear(Copy.apply(x), block.qkv.weight).chunk(3, -1)
    )
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    partial = F.linear(attended.transpose(1, 2).flatten(2), mine(block.out.weight, 1))
    return Sum.apply(partial) + block.out.bias


def without_gradients(block, x):
    return own_heads(block, x, rows=lambda weight: rows_of_heads(weight.data))


def straight(block, x):
    return own_heads(block, x, rows=lambda weight: mine(weight, 0))


def no_copy(block, x):
    return own_heads(block, x, nothing)


def no_sum(block, x):
    return own_heads(block, x, leave=nothing)


def sum_both(block, x):
    return own_heads(block, x, leave=SumBoth.apply)


def bias_on_each(block, x):
    return own_heads(block, x, leave=lambda y: Sum.apply(y + block.out.bias), bias=0)


def bias_on_rank_0(block, x):
    def leave(y):
        return Sum.apply(y + block.out.bias if dist.get_rank() == 0 else y)

    return own_heads(block, x, leave=leave, bias=0)


def copies_queries_keys_values(block, x):
    """Copy behind the layer: sums gradients of other heads."""
    heads = block.heads // dist.get_world_size()
    q, k, v = (
        each.unflatten(-1, (heads, -1)).transpose(1, 2)
        for each in Copy.apply(F.linear(x, rows_of_heads(block.qkv.weight))).chunk(3, -1)
    )
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    partial = F.linear(attended.transpose(1, 2).flatten(2), mine(block.out.weight, 1))
    return Sum.apply(partial) + block.out.bias


def three_copies(block, x):
    """One for each of queries, keys and values: three messages of x in place of one."""
    heads = block.heads // dist.get_world_size()
    q, k, v = (
        F.linear(Copy.apply(x), mine(each, 0)).unflatten(-1, (heads, -1)).transpose(1, 2)
        for each in block.qkv.weight.chunk(3)
    )
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    partial = F.linear(attended.transpose(1, 2).flatten(2), mine(block.out.weight, 1))
    return Sum.apply(partial) + block.out.bias


ANSWERS = {
    check.between: (["bd", "b, d", "DB"], ["b", "d", "a", "abd", "bcd", "ac", "", "x", 2, "GELU"]),
    check.operator: (
        [
            *("copy_to_group", "`copy_to_group`", "tensor_parallel.copy_to_group()", "Copy.apply"),
            *("Copy", tensor_parallel.copy_to_group, Copy, Copy.apply),
        ],
        [
            *("reduce_from_group", "Sum", "nothing", "all_reduce", "copied", nothing, Sum),
            *(Sum.apply, tensor_parallel.gather_from_sequence),
        ],
    ),
    check.attention: (
        [own_heads, from_the_library, every_nth_head, spelled_out],
        [
            whole,
            slices_afterwards,
            without_gradients,
            straight,
            no_copy,
            no_sum,
            sum_both,
            bias_on_each,
            bias_on_rank_0,
            copies_queries_keys_values,
            three_copies,
        ],
    ),
}
