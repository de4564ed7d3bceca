"""Answers to the puzzles and the exercise of the lesson distributed_data_parallel."""

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

import minidist as md
from minidist.course.checks import distributed_data_parallel as check


class Wrapped(nn.Module):
    """What the answers share: the module, rank 0's weights, and a hook after each gradient."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.begin()
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.arrived)

    def begin(self):
        for parameter in self.module.parameters():
            dist.broadcast(parameter.data, src=0)

    def forward(self, *inputs):
        return self.module(*inputs)

    def arrived(self, parameter):
        parameter.grad /= dist.get_world_size()
        self.add_up(parameter.grad)


class Waiting(Wrapped):
    def add_up(self, gradient):
        dist.all_reduce(gradient)


class ByRing(Wrapped):
    def add_up(self, gradient):
        md.collectives.all_reduce(gradient, algorithm="ring")


class AtTheEnd(Wrapped):
    """All gradients in one message, after the last of them."""

    missing = 0

    def arrived(self, parameter):
        parameters = list(self.module.parameters())
        self.missing = (self.missing or len(parameters)) - 1
        if not self.missing:
            flat = torch.cat([p.grad.flatten() for p in parameters])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for p, piece in zip(
                parameters, flat.split([p.numel() for p in parameters]), strict=True
            ):
                p.grad = piece.view_as(p)


class Asynchronous(Wrapped):
    def begin(self):
        super().begin()
        self.travelling = []

    def add_up(self, gradient):
        self.travelling.append(dist.all_reduce(gradient, async_op=True))
        if len(self.travelling) == len(list(self.module.parameters())):
            for work in self.travelling:
                work.wait()
            self.travelling.clear()


class ByCallback(Asynchronous):
    def add_up(self, gradient):
        if not self.travelling:
            Variable._execution_engine.queue_callback(self.finish)
        self.travelling.append(dist.all_reduce(gradient, async_op=True))

    def finish(self):
        for work in self.travelling:
            work.wait()
        self.travelling.clear()


class Buckets(Wrapped):
    """Two layers in a message; the gradients go in and out by copies."""

    def begin(self):
        super().begin()
        parameters = list(self.module.parameters())[::-1]
        self.groups = [parameters[i : i + 4] for i in range(0, len(parameters), 4)]
        self.there, self.travelling = set(), []

    def arrived(self, parameter):
        self.there.add(parameter)
        for group in self.groups[len(self.travelling) :]:
            if not self.there.issuperset(group):
                return
            flat = torch.cat([p.grad.flatten() for p in group]) / dist.get_world_size()
            self.travelling.append((group, flat, dist.all_reduce(flat, async_op=True)))
        for group, flat, work in self.travelling:
            work.wait()
            for p, piece in zip(group, flat.split([p.numel() for p in group]), strict=True):
                p.grad.copy_(piece.view_as(p))
        self.begin_anew()

    def begin_anew(self):
        self.there, self.travelling = set(), []


class DummyMessages(AtTheEnd):
    """Zeros of the same size travel early; the gradients wait for the end."""

    def arrived(self, parameter):
        dist.all_reduce(torch.zeros_like(parameter.grad), async_op=True)
        super().arrived(parameter)


class Nothing(Wrapped):
    def arrived(self, parameter):
        pass


class Summed(Wrapped):
    def arrived(self, parameter):
        dist.all_reduce(parameter.grad)


class TwiceDivided(Wrapped):
    def add_up(self, gradient):
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


class OwnWeights(Waiting):
    def begin(self):
        pass


class OnlyWeights(Waiting):
    """The biases are forgotten."""

    def arrived(self, parameter):
        if parameter.dim() > 1:
            super().arrived(parameter)


class OnlyOnce(Waiting):
    """The first backward pass is averaged, and no other."""

    def arrived(self, parameter):
        seen = self.__dict__.setdefault("seen", set())
        if parameter not in seen:
            super().arrived(parameter)
        seen.add(parameter)


class ViewsOfForward(Wrapped):
    """Gradients become views in forward; a zero_grad() after it takes them away."""

    def begin(self):
        super().begin()
        self.flat = torch.zeros(
            sum(p.numel() for p in self.module.parameters()),
            dtype=next(self.module.parameters()).dtype,
        )

    def forward(self, *inputs):
        self.flat.zero_()
        parameters = list(self.module.parameters())
        pieces = self.flat.split([p.numel() for p in parameters])
        for p, piece in zip(parameters, pieces, strict=True):
            p.grad = piece.view_as(p)
        self.missing = len(parameters)
        return self.module(*inputs)

    def arrived(self, parameter):
        self.missing -= 1
        if not self.missing:
            self.flat /= dist.get_world_size()
            dist.all_reduce(self.flat)


class NoParameters(nn.Module):
    def __init__(self, module):
        super().__init__()


def bare(module):
    return module


WAITING = [Waiting, ByRing, AtTheEnd]
OVERLAPPING = [Asynchronous, ByCallback, Buckets, md.DistributedDataParallel]
WRONG = [
    *(Nothing, Summed, TwiceDivided, OwnWeights, OnlyWeights, OnlyOnce),
    *(ViewsOfForward, NoParameters, bare, nn.Linear(2, 2)),
]

ANSWERS = {
    check.last_bucket: ([100, 100.0], [150, 75, 90, 0.1, 105, "100 ms"]),
    check.tied_weights: ([20, 20.0], [0, 50, 30, 40, 0.02, 60, "20 ms"]),
    check.overlaps: (OVERLAPPING, [*WAITING, DummyMessages, *WRONG]),
}
