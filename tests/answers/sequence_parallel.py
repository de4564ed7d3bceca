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


def own_part(x):
    return x.chunk(dist.get_world_size(), 1)[dist.get_rank()]


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


def without_a_graph(x, columns):
    return gathered(x.detach()) @ columns.detach()


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


ANSWERS = {
    check.needs_the_sum: (
        [{"a", "c", "d"}, ("C", "a", "d"), "acd", "a, c, d"],
        [{"a"}, {"a", "c"}, "abcd", {"a", "c", "d", "e"}, {"d"}, "", "f", 3],
    ),
    check.whole_outweighs: (
        [4, 4.0],
        [3, 2, 12, 13, 1, "4 ranks"],
    ),
    check.gather_matmul: (
        [with_the_ring, by_checkpoint, of_minidist],
        [
            keeps_all_tokens,
            keeps_all_tokens_on_ctx,
            without_the_sum,
            columns_see_own_tokens,
            without_a_graph,
            other_order,
            along_the_rows,
            without_a_gather,
        ],
    ),
}
