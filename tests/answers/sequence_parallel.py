"""Answers to the puzzles and the exercise of the lesson sequence_parallel."""

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import minidist as md
from minidist import tensor_parallel
from minidist.course.checks import sequence_parallel as check
from minidist.tensor_parallel.operators import ColumnLinear


def gathered(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    md.collectives.all_gather(parts, x.contiguous())
    return torch.cat(parts, 1)


def scattered_sum(x):
    parts = [part.contiguous() for part in x.chunk(dist.get_world_size(), 1)]
    own = torch.empty_like(parts[0])
    md.collectives.reduce_scatter(own, parts)
    return own


def summed_and_cut(x):
    total = x.contiguous().clone()
    dist.all_reduce(total)
    return total.chunk(dist.get_world_size(), 1)[dist.get_rank()]


def own_part(x):
    return x.chunk(dist.get_world_size(), 1)[dist.get_rank()]


def mean(x):
    return scattered_sum(x) / dist.get_world_size()


def made_of(gather, scatter):
    class GatherTwice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, columns):
            ctx.save_for_backward(x, columns)
            return gather(x) @ columns

        @staticmethod
        def backward(ctx, grad):
            x, columns = ctx.saved_tensors
            rows = gather(x).flatten(0, 1)
            return scatter(grad @ columns.T), rows.T @ grad.flatten(0, 1)

    return GatherTwice.apply


def with_the_ring(x, columns):
    return made_of(gathered, scattered_sum)(x, columns)


def by_all_reduce(x, columns):
    return made_of(gathered, summed_and_cut)(x, columns)


def by_checkpoint(x, columns):
    def product(x, columns):
        return tensor_parallel.gather_from_sequence(x) @ columns

    return checkpoint(product, x, columns, use_reentrant=False)


def of_minidist(x, columns):
    return ColumnLinear.apply(x, columns.T, None, None, True)


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return gathered(x)

    @staticmethod
    def backward(ctx, grad):
        return scattered_sum(grad)


def keeps_all_tokens(x, columns):
    return Gather.apply(x) @ columns


class Hoards(torch.autograd.Function):
    """Keeps all tokens where autograd does not look."""

    @staticmethod
    def forward(ctx, x, columns):
        ctx.whole, ctx.columns = gathered(x), columns
        return ctx.whole @ columns

    @staticmethod
    def backward(ctx, grad):
        rows = ctx.whole.flatten(0, 1)
        return scattered_sum(grad @ ctx.columns.T), rows.T @ grad.flatten(0, 1)


def keeps_all_tokens_on_ctx(x, columns):
    return Hoards.apply(x, columns)


def without_the_sum(x, columns):
    return made_of(gathered, own_part)(x, columns)


def with_the_mean(x, columns):
    return made_of(gathered, mean)(x, columns)


class OwnTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, columns):
        ctx.save_for_backward(x, columns)
        return gathered(x) @ columns

    @staticmethod
    def backward(ctx, grad):
        x, columns = ctx.saved_tensors
        rows = own_part(grad).flatten(0, 1)
        return scattered_sum(grad @ columns.T), x.flatten(0, 1).T @ rows


def columns_see_own_tokens(x, columns):
    return OwnTokens.apply(x, columns)


def detached(x, columns):
    return gathered(x.detach()) @ columns


def without_a_graph(x, columns):
    return gathered(x.detach()) @ columns.detach()


def gradient_not_cut(x, columns):
    def summed(x):
        total = x.contiguous().clone()
        dist.all_reduce(total)
        return total

    return made_of(gathered, summed)(x, columns)


def other_order(x, columns):
    def turned(x):
        return torch.cat(gathered(x).chunk(dist.get_world_size(), 1)[::-1], 1)

    return made_of(turned, scattered_sum)(x, columns)


def along_the_rows(x, columns):
    def gather(x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 0)

    return made_of(gather, scattered_sum)(x, columns)


def without_a_gather(x, columns):
    return x @ columns


def by_hooks(x, columns):
    """What autograd saves of all tokens is cut, and gathered again."""
    size = dist.get_world_size()

    def pack(saved):
        if saved.numel() != size * x.numel():
            return saved, None
        whole = saved.reshape(x.shape[0], -1, x.shape[2])
        return own_part(whole).clone(), saved.shape

    def unpack(packed):
        saved, shape = packed
        return saved if shape is None else gathered(saved).view(shape)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return Gather.apply(x) @ columns


def reentrant(x, columns):
    def product(x, columns):
        return Gather.apply(x) @ columns

    return checkpoint(product, x, columns, use_reentrant=True)


class RankByRank(torch.autograd.Function):
    """No rank ever has all tokens: they come one rank after the other."""

    @staticmethod
    def tokens_of(x):
        for rank in range(dist.get_world_size()):
            part = x.contiguous().clone()
            dist.broadcast(part, src=rank)
            yield part

    @staticmethod
    def forward(ctx, x, columns):
        ctx.save_for_backward(x, columns)
        return torch.cat([part @ columns for part in RankByRank.tokens_of(x)], 1)

    @staticmethod
    def backward(ctx, grad):
        x, columns = ctx.saved_tensors
        of_columns = torch.zeros_like(columns)
        grads = grad.chunk(dist.get_world_size(), 1)
        for part, own in zip(RankByRank.tokens_of(x), grads, strict=True):
            of_columns += part.flatten(0, 1).T @ own.flatten(0, 1)
        return scattered_sum(grad @ columns.T), of_columns


def rank_by_rank(x, columns):
    return RankByRank.apply(x, columns)


class Slices(torch.autograd.Function):
    """Saves its own tokens as a slice of all tokens, which stay in memory with it."""

    @staticmethod
    def forward(ctx, x, columns):
        whole = gathered(x)
        ctx.save_for_backward(own_part(whole), columns)
        return whole @ columns

    @staticmethod
    def backward(ctx, grad):
        x, columns = ctx.saved_tensors
        rows = gathered(x).flatten(0, 1)
        return scattered_sum(grad @ columns.T), rows.T @ grad.flatten(0, 1)


def keeps_a_slice(x, columns):
    return Slices.apply(x, columns)


class InHalfPrecision(torch.autograd.Function):
    """Keeps all tokens, in fewer bytes."""

    @staticmethod
    def forward(ctx, x, columns):
        whole = gathered(x)
        ctx.save_for_backward(whole.bfloat16(), columns)
        return whole @ columns

    @staticmethod
    def backward(ctx, grad):
        whole, columns = ctx.saved_tensors
        rows = whole.to(grad.dtype).flatten(0, 1)
        return scattered_sum(grad @ columns.T), rows.T @ grad.flatten(0, 1)


def keeps_bfloat16(x, columns):
    return InHalfPrecision.apply(x, columns)


class SumsColumns(torch.autograd.Function):
    """Adds up the gradients of columns that are not the same."""

    @staticmethod
    def forward(ctx, x, columns):
        ctx.save_for_backward(x, columns)
        return gathered(x) @ columns

    @staticmethod
    def backward(ctx, grad):
        x, columns = ctx.saved_tensors
        of_columns = gathered(x).flatten(0, 1).T @ grad.flatten(0, 1)
        dist.all_reduce(of_columns)
        return scattered_sum(grad @ columns.T), of_columns


def sums_columns(x, columns):
    return SumsColumns.apply(x, columns)


class Others(torch.autograd.Function):
    """Keeps the tokens of the other ranks, beside its own: all of them."""

    @staticmethod
    def forward(ctx, x, columns):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        md.collectives.all_gather(parts, x.contiguous())
        parts[dist.get_rank()] = x
        ctx.save_for_backward(columns, *parts)
        return torch.cat(parts, 1) @ columns

    @staticmethod
    def backward(ctx, grad):
        columns, *parts = ctx.saved_tensors
        rows = torch.cat(parts, 1).flatten(0, 1)
        return scattered_sum(grad @ columns.T), rows.T @ grad.flatten(0, 1)


def keeps_the_others(x, columns):
    return Others.apply(x, columns)


ANSWERS = {
    check.gathered_logits: (
        [21_376, 21376.0, 128_256 / 6],
        [128_256 / 3, 128_256 / 2, 128_256, 2672, 5344, 1 / 21_376, "21,376"],
    ),
    check.of_sixteen: (
        [11.5 / 2.125, 92 / 17, (10 + 24 / 16) / (34 / 16)],
        [13 / 4.25, 19 / 4, 34 / 11.5, 16, 17 / 92, 11.5, 2.125, "5.4"],
    ),
    check.gather_matmul: (
        [
            with_the_ring,
            by_all_reduce,
            by_checkpoint,
            of_minidist,
            by_hooks,
            reentrant,
            rank_by_rank,
        ],
        [
            keeps_all_tokens,
            keeps_all_tokens_on_ctx,
            without_the_sum,
            with_the_mean,
            columns_see_own_tokens,
            detached,
            without_a_graph,
            gradient_not_cut,
            other_order,
            along_the_rows,
            without_a_gather,
            keeps_a_slice,
            keeps_bfloat16,
            sums_columns,
            keeps_the_others,
        ],
    ),
}
