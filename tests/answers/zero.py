"""Answers to the puzzles and the exercise of the lesson zero."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from minidist.course.checks import zero as check


class Flat:
    """All parameters are views of one vector of N shards."""

    def __init__(self, parameters, make_optimizer):
        self.parameters = list(parameters)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.flat = self.end_to_end([parameter.data for parameter in self.parameters])
        offset = 0
        for parameter in self.parameters:
            place = self.flat[offset : offset + parameter.numel()]
            parameter.data = place.view_as(parameter)
            offset += parameter.numel()
        self.shards = list(self.flat.chunk(self.world_size))
        self.mine = nn.Parameter(self.shards[self.rank])
        self.worker = make_optimizer([self.mine])

    def end_to_end(self, tensors):
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        return F.pad(flat, (0, -len(flat) % self.world_size))

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None

    def take(self):
        gradient = self.end_to_end([parameter.grad for parameter in self.parameters])
        self.mine.grad = gradient.chunk(self.world_size)[self.rank]

    def give(self):
        dist.all_gather(self.shards, self.mine.data)

    def step(self):
        self.take()
        self.worker.step()
        self.give()


class EachTensor:
    """Each tensor is cut for itself, and has an optimizer of its own."""

    def __init__(self, parameters, make_optimizer):
        self.parts = [Flat([parameter], make_optimizer) for parameter in parameters]

    def zero_grad(self):
        for part in self.parts:
            part.zero_grad()

    def step(self):
        for part in self.parts:
            part.step()


class ByRows:
    """Each tensor is cut by its rows, as torch's fully_shard does; the optimizer comes late."""

    def __init__(self, parameters, make_optimizer):
        self.parameters, self.make = list(parameters), make_optimizer
        size, rank = dist.get_world_size(), dist.get_rank()
        self.rows = [-(-len(p) // size) for p in self.parameters]
        pairs = zip(self.parameters, self.rows, strict=True)
        self.mine = [nn.Parameter(p.data[rank * n : (rank + 1) * n]) for p, n in pairs]
        self.inner = None

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None

    def step(self):
        self.inner = self.inner or self.make(self.mine)
        rank = dist.get_rank()
        for p, n, mine in zip(self.parameters, self.rows, self.mine, strict=True):
            mine.grad = p.grad[rank * n : (rank + 1) * n]
        self.inner.step()
        for p, n in zip(self.parameters, self.rows, strict=True):
            for src, rows in enumerate(p.data.split(n)):
                dist.broadcast(rows, src=src)


class Forgets(Flat):
    """A new optimizer at each step, without states."""

    def __init__(self, parameters, make_optimizer):
        super().__init__(parameters, make_optimizer)
        self.make = make_optimizer

    def take(self):
        super().take()
        self.worker = self.make([self.mine])


class BiasesWhole:
    """Matrices are cut, biases are not."""

    def __init__(self, parameters, make_optimizer):
        parameters = list(parameters)
        self.cut = Flat([p for p in parameters if p.ndim > 1], make_optimizer)
        self.whole = make_optimizer([p for p in parameters if p.ndim == 1])

    def zero_grad(self):
        self.cut.zero_grad()
        self.whole.zero_grad()

    def step(self):
        self.cut.step()
        self.whole.step()


class GathersFirst(Flat):
    """Sends the shards before they are updated: one step late."""

    def step(self):
        self.take()
        self.give()
        self.worker.step()


class Everything(Flat):
    """Nothing is shared out."""

    def __init__(self, parameters, make_optimizer):
        self.parameters = list(parameters)
        self.worker = make_optimizer(self.parameters)

    def step(self):
        self.worker.step()


class WholeTensors(Flat):
    def __init__(self, parameters, make_optimizer):
        self.parameters = list(parameters)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.worker = make_optimizer(self.parameters[self.rank :: self.world_size])

    def step(self):
        self.worker.step()
        for i, parameter in enumerate(self.parameters):
            dist.broadcast(parameter.data, src=i % self.world_size)


class NeverGathered(Flat):
    def give(self):
        pass


class NotPadded(Flat):
    def end_to_end(self, tensors):
        return torch.cat([tensor.flatten() for tensor in tensors])


class Summed(Flat):
    """The mean is summed over the ranks."""

    def take(self):
        super().take()
        self.mine.grad = self.mine.grad * self.world_size


ANSWERS = {
    check.largest_in_stage_1: (
        [10, 80 / 8, 10.0],
        [5, 8, 20, 80 / 12, 1e10, 16, "10 billion"],
    ),
    check.own_rows_alone: (
        [{"a", "b", "e"}, "abe", ("e", "B", "a"), "a, b, e", ("a", "b", "e", "e")],
        [{"a", "b"}, "abcde", {"a", "b", "d", "e"}, {"c"}, "", "f", 3, {1, 2}],
    ),
    check.my_zero: (
        [Flat, EachTensor, ByRows],
        [
            *(
                Everything,
                WholeTensors,
                NeverGathered,
                NotPadded,
                Summed,
            ),
            *(Forgets, BiasesWhole, GathersFirst),
        ],
    ),
}
