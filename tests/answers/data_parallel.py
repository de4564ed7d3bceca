"""Answers to the puzzles and the exercises of the lesson data_parallel."""

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


class Copying(torch.autograd.Function):
    """What the answers share: forward."""

    @staticmethod
    def forward(ctx, x, n):
        return tuple(x.clone() for _ in range(n))


class Summed(Copying):
    @staticmethod
    def backward(ctx, *gradients):
        return sum(gradients), None


class OneByOne(torch.autograd.Function):
    """The first copy is the parameter itself, and gradients may be missing."""

    @staticmethod
    def forward(ctx, x, n):
        ctx.set_materialize_grads(False)
        return x.detach(), *(x.detach().clone() for _ in range(n - 1))

    @staticmethod
    def backward(ctx, *gradients):
        total = None
        for gradient in gradients:
            if gradient is not None:
                total = gradient if total is None else total + gradient
        return total, None


class Averaged(Copying):
    @staticmethod
    def backward(ctx, *gradients):
        return sum(gradients) / len(gradients), None


class FirstCopy(Copying):
    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0], None


class ForOneArgument(Copying):
    @staticmethod
    def backward(ctx, *gradients):
        return sum(gradients)


class OneMemory(Summed):
    @staticmethod
    def forward(ctx, x, n):
        copy = x.clone()
        return tuple(copy.view_as(copy) for _ in range(n))


class CopiesDetached(Summed):
    @staticmethod
    def forward(ctx, x, n):
        copies = Copying.forward(ctx, x, n)
        ctx.mark_non_differentiable(*copies)
        return copies


class OneTooFew(Summed):
    @staticmethod
    def forward(ctx, x, n):
        return tuple(x.clone() for _ in range(n - 1))


NAMED = {  # what an answer is told
    check.gather: {Detached: "autograd cannot go back through what comes out."},
    check.broadcast: {CopiesDetached: "autograd cannot go back through what comes out."},
}
ANSWERS = {
    check.device_0_sends: ([700, 700.0], [175, 100, 800, 1400, 700e6, 350, "700 MB"]),
    check.weights_of_losses: (
        [[0.3, 0.3, 0.3, 0.1], (3 / 10, 3 / 10, 3 / 10, 1 / 10), torch.tensor([3, 3, 3, 1]) / 10],
        [[0.25] * 4, [3, 3, 3, 1], [0.1] * 4, [1] * 4, [0.3, 0.3, 0.3], [0.1, 0.3, 0.3, 0.3], 0.3],
    ),
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
    check.broadcast: (
        [Summed, OneByOne],
        [
            Averaged,
            FirstCopy,
            ForOneArgument,
            OneMemory,
            OneTooFew,
            CopiesDetached,
            Copying,
            Split,
            Summed.apply,
        ],
    ),
}
