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


class Reduced(Flat):
    """The gradients are reduced once more, which changes nothing."""

    def take(self):
        gradient = self.end_to_end([parameter.grad for parameter in self.parameters])
        self.mine.grad = torch.empty_like(self.mine)
        dist.reduce_scatter(self.mine.grad, list(gradient.chunk(self.world_size)))
        self.mine.grad /= self.world_size


class ByBroadcast(Flat):
    def give(self):
        for rank, shard in enumerate(self.shards):
            dist.broadcast(shard, src=rank)


class Copied:
    """A shard of its own, copied back; all_gather of objects."""

    def __init__(self, parameters, make_optimizer):
        self.parameters, self.size = list(parameters), dist.get_world_size()
        whole = nn.utils.parameters_to_vector(self.parameters).detach()
        self.mine = nn.Parameter(whole.tensor_split(self.size)[dist.get_rank()].clone())
        self.adam = make_optimizer([self.mine])

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad.zero_() if parameter.grad is not None else None

    def step(self):
        gradient = torch.cat([parameter.grad.flatten() for parameter in self.parameters])
        self.mine.grad = gradient.tensor_split(self.size)[dist.get_rank()]
        self.adam.step()
        pieces = [None] * self.size
        dist.all_gather_object(pieces, self.mine.detach())
        with torch.no_grad():
            nn.utils.vector_to_parameters(torch.cat(pieces), self.parameters)


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


def as_a_function(parameters, make_optimizer):
    return Flat(parameters, make_optimizer)


class Strided(Copied):
    """Rank r has the elements r, r + N, r + 2N, ..."""

    def __init__(self, parameters, make_optimizer):
        self.parameters, self.size = list(parameters), dist.get_world_size()
        whole = self.whole([p.detach() for p in self.parameters])
        self.mine = nn.Parameter(whole[dist.get_rank() :: self.size].clone())
        self.adam = make_optimizer([{"params": [self.mine]}])

    def whole(self, tensors):
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        return F.pad(flat, (0, -len(flat) % self.size))

    def step(self):
        gradient = self.whole([parameter.grad for parameter in self.parameters])
        self.mine.grad = gradient[dist.get_rank() :: self.size]
        self.adam.step()
        parts = [torch.empty_like(self.mine.data) for _ in range(self.size)]
        dist.all_gather(parts, self.mine.data)
        with torch.no_grad():
            nn.utils.vector_to_parameters(torch.stack(parts, 1).flatten(), self.parameters)


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


class ByLength(Flat):
    """Takes the gradients of its shard from the front of each tensor."""

    def take(self):
        parts = [p.grad.flatten().chunk(self.world_size) for p in self.parameters]
        gradient = torch.cat([part[min(self.rank, len(part) - 1)] for part in parts])
        self.mine.grad = F.pad(gradient, (0, len(self.mine)))[: len(self.mine)]


class Everything(Flat):
    """Nothing is shared out."""

    def __init__(self, parameters, make_optimizer):
        self.parameters = list(parameters)
        self.worker = make_optimizer(self.parameters)

    def step(self):
        self.worker.step()


class Hidden(Everything):
    """The same, with an empty `inner` for those who count there."""

    def __init__(self, parameters, make_optimizer):
        super().__init__(parameters, make_optimizer)
        self.inner = make_optimizer([nn.Parameter(torch.zeros(1))])


class MadeByHand(Hidden):
    """A real optimizer of everything, of the same class, that `make_optimizer` has not made."""

    def __init__(self, parameters, make_optimizer):
        super().__init__(parameters, make_optimizer)
        given = {
            name: self.inner.defaults[name]
            for name in ("lr", "momentum", "betas")
            if name in self.inner.defaults
        }
        self.worker = type(self.inner)(self.parameters, **given)


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


class Backwards(Flat):
    def take(self):
        gradient = self.end_to_end([parameter.grad for parameter in self.parameters[::-1]])
        self.mine.grad = gradient.chunk(self.world_size)[self.rank]


class NotPadded(Flat):
    def end_to_end(self, tensors):
        return torch.cat([tensor.flatten() for tensor in tensors])


class Summed(Flat):
    """The mean is summed over the ranks."""

    def take(self):
        super().take()
        self.mine.grad = self.mine.grad * self.world_size


class AlwaysAdam(Flat):
    def __init__(self, parameters, make_optimizer):
        super().__init__(parameters, make_optimizer)
        self.worker = torch.optim.Adam([self.mine], lr=1e-3)


class FirstShard(Flat):
    """All ranks update the first shard."""

    def take(self):
        gradient = self.end_to_end([parameter.grad for parameter in self.parameters])
        self.mine.grad = gradient.chunk(self.world_size)[0]


class NoStep:
    def __init__(self, parameters, make_optimizer):
        self.inner = make_optimizer(parameters)


ANSWERS = {
    check.stage_1_of_a_billion: ([7, 7.0, 2 + 2 + 12 / 4], [16, 10, 5.5, 4, 28, 7e9, "7 GB"]),
    check.accumulated_in_stage_2: (
        [14.875, 17 * 7 / 8, (16 + 1) * (8 - 1) / 8],
        [1.75, 2.625, 14, 17, 28, 28.875, 12.75, "14.875 Ψ"],
    ),
    check.my_zero: (
        [Flat, Reduced, ByBroadcast, Copied, EachTensor, as_a_function, Strided, ByRows],
        [
            *(
                Everything,
                Hidden,
                MadeByHand,
                WholeTensors,
                NeverGathered,
                Backwards,
                NotPadded,
                Summed,
            ),
            *(AlwaysAdam, FirstShard, NoStep, Forgets, BiasesWhole, GathersFirst, ByLength),
        ],
    ),
}
