"""Answers to the puzzle and the exercise of the lesson data_parallel."""

import torch

from minidist.course.checks import data_parallel as check


class Joining(torch.autograd.Function):
    """What the answers share: forward."""

    @staticmethod
    def forward(ctx, *outputs):
        ctx.sizes = [len(output) for output in outputs]
        return torch.cat(outputs)


class Split(Joining):
    @staticmethod
    def backward(ctx, gradient):
        return gradient.split(ctx.sizes)


class Narrowed(Joining):
    @staticmethod
    def backward(ctx, gradient):
        parts, start = [], 0
        for size in ctx.sizes:
            parts.append(gradient.narrow(0, start, size).clone())
            start += size
        return tuple(parts)


class OfTheClass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *outputs):
        OfTheClass.sizes = [len(output) for output in outputs]
        return torch.cat(outputs)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.split(OfTheClass.sizes)


class Chunked(Joining):
    """Right where `chunk` happens to cut so: not if a smaller output stands before a larger."""

    @staticmethod
    def backward(ctx, gradient):
        chunks = iter(gradient.chunk(sum(size > 0 for size in ctx.sizes)))
        return tuple(next(chunks) if size else gradient[:0] for size in ctx.sizes)


class Whole(Joining):
    @staticmethod
    def backward(ctx, gradient):
        return tuple(gradient for _ in ctx.sizes)


class Reversed(Joining):
    @staticmethod
    def backward(ctx, gradient):
        return gradient.split(ctx.sizes)[::-1]


class Nothing(Joining):
    @staticmethod
    def backward(ctx, gradient):
        return (None,) * len(ctx.sizes)


class Detached(Split):
    @staticmethod
    def forward(ctx, *outputs):
        joined = Joining.forward(ctx, *outputs)
        ctx.mark_non_differentiable(joined)
        return joined


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *outputs):
        return torch.cat(outputs)


NAMED = {check.gather: {Detached: "autograd cannot go back through what comes out."}}
ANSWERS = {
    check.running_mean: (["share", " Share"], ["batch", "nothing", "zero", 0]),
    check.gather: (
        [Split, Narrowed],
        [
            Chunked,
            Whole,
            Reversed,
            Nothing,
            NoBackward,
            OfTheClass,
            Detached,
            torch.cat,
            Split.apply,
        ],
    ),
}
