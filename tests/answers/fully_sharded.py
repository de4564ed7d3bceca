"""Answers to the puzzles and the exercise of the lesson fully_sharded."""

import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import minidist as md
from minidist.course.checks import fully_sharded as check


class Again(torch.autograd.Function):
    """Computes the module a second time in backward."""

    @staticmethod
    def forward(ctx, x, unit, *shards):
        ctx.unit = unit
        ctx.save_for_backward(x)
        return functional_call(unit.module[0], unit.gather(), (x,))

    @staticmethod
    def backward(ctx, g):
        unit, x = ctx.unit, ctx.saved_tensors[0].detach().requires_grad_()
        full = {name: each.detach().requires_grad_() for name, each in unit.gather().items()}
        with torch.enable_grad():
            y = functional_call(unit.module[0], full, (x,))
        dx, *gradients = torch.autograd.grad(y, (x, *full.values()), g)
        return dx, None, *unit.reduce(gradients)


class Flat(nn.Module):
    """One line of all parameters."""

    function = Again

    def __init__(self, module):
        super().__init__()
        self.shapes = {name: p.shape for name, p in module.named_parameters()}
        pieces = self.cut([p.detach() for p in module.parameters()])
        self.shard = nn.Parameter(pieces[dist.get_rank()].clone())
        self.module = [module.to("meta")]

    def cut(self, tensors):
        flat = torch.cat([each.flatten() for each in tensors])
        n = dist.get_world_size()
        return F.pad(flat, (0, -len(flat) % n)).chunk(n)

    def gather(self):
        shards = [torch.empty_like(self.shard.data) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, self.shard.data)
        sizes = [shape.numel() for shape in self.shapes.values()]
        pieces = torch.cat(shards)[: sum(sizes)].split(sizes)
        named = zip(self.shapes.items(), pieces, strict=True)
        return {name: piece.view(shape) for (name, shape), piece in named}

    def reduce(self, gradients):
        own = torch.empty_like(self.shard.data)
        dist.reduce_scatter(own, [each.contiguous() for each in self.cut(gradients)])
        return [own / dist.get_world_size()]

    def forward(self, x):
        return self.function.apply(x, self, *self.parameters())


class EachTensor(nn.Module):
    """Each parameter is cut by itself."""

    def __init__(self, module):
        super().__init__()
        self.shapes = {name: p.shape for name, p in module.named_parameters()}
        self.shards = nn.ParameterList(
            self.cut(p.detach())[dist.get_rank()].clone() for p in module.parameters()
        )
        self.module = [module.to("meta")]

    def cut(self, tensor):
        n = dist.get_world_size()
        return F.pad(tensor.flatten(), (0, -tensor.numel() % n)).chunk(n)

    def gather(self):
        found = {}
        for (name, shape), shard in zip(self.shapes.items(), self.shards, strict=True):
            parts = [torch.empty_like(shard.data) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, shard.data)
            found[name] = torch.cat(parts)[: shape.numel()].view(shape)
        return found

    def reduce(self, gradients):
        found = [torch.empty_like(shard.data) for shard in self.shards]
        for own, gradient in zip(found, gradients, strict=True):
            dist.reduce_scatter(own, list(self.cut(gradient)))
            own /= dist.get_world_size()
        return found

    def forward(self, x):
        return Again.apply(x, self, *self.shards)


def naive(module):
    return md.fully_sharded.NaiveFullySharded(module)


def torch_fully_shard(module):  # by rows
    warnings.simplefilter("ignore")  # torch's, about views
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    return fully_shard(module, mesh=mesh, reshard_after_forward=True)


class ByCheckpoint(Flat):
    """Autograd gathers, within a checkpoint: what it saves is freed, and made once more."""

    reentrant = False

    def forward(self, x):
        unit = self

        class Gather(torch.autograd.Function):
            @staticmethod
            def forward(ctx, shard):
                return tuple(unit.gather().values())

            @staticmethod
            def backward(ctx, *gradients):
                return unit.reduce(gradients)[0]

        def compute(x, shard):
            full = dict(zip(unit.shapes, Gather.apply(shard), strict=True))
            return functional_call(unit.module[0], full, (x,))

        return checkpoint(compute, x, self.shard, use_reentrant=self.reentrant)


class KeepsGradients(Flat):
    """The whole gradients stay after they are reduced."""

    def reduce(self, gradients):
        self.last = gradients
        return super().reduce(gradients)


class OwnShardOnly(Flat):
    """Takes its own shard for those of all ranks."""

    def gather(self):
        pieces = torch.cat([self.shard.data] * dist.get_world_size())
        sizes = [shape.numel() for shape in self.shapes.values()]
        named = zip(self.shapes.items(), pieces[: sum(sizes)].split(sizes), strict=True)
        return {name: piece.view(shape) for (name, shape), piece in named}


class Keeps(Again):
    """Gathers once, and keeps the parameters for backward."""

    @staticmethod
    def forward(ctx, x, unit, *shards):
        ctx.full = unit.gather()
        return Again.forward(ctx, x, unit, *shards)


class KeepsUntilBackward(Flat):
    function = Keeps


class AutogradKeeps(Flat):
    """The right gradient, but autograd saves views of the full parameters."""

    def forward(self, x):
        class Gather(torch.autograd.Function):
            @staticmethod
            def forward(ctx, shard):
                return tuple(self.gather().values())

            @staticmethod
            def backward(ctx, *gradients):
                return self.reduce(gradients)[0]

        full = dict(zip(self.shapes, Gather.apply(self.shard), strict=True))
        return functional_call(self.module[0], full, (x,))


class Sum(Flat):
    """The sum of the ranks' gradients, not the mean."""

    def reduce(self, gradients):
        return [super().reduce(gradients)[0] * dist.get_world_size()]


class OwnRows(Flat):
    """The gradient of this rank's rows alone."""

    def reduce(self, gradients):
        return [self.cut(gradients)[dist.get_rank()].clone()]


class NoGradientOfX(Flat):
    def forward(self, x):
        return self.function.apply(x.detach(), self, self.shard)


class StillThere(Flat):
    """The module stays in memory behind the optimizer's back."""

    def __init__(self, module):
        super().__init__(module)
        self.module = [module.to_empty(device="cpu")]


class WholeParameter(Flat):
    def __init__(self, module):
        super().__init__(module)
        self.full = nn.Parameter(torch.zeros(sum(s.numel() for s in self.shapes.values())).double())


class LinearOnly(nn.Module):
    """TinyUnit of the lesson."""

    def __init__(self, layer):
        super().__init__()
        self.shape = layer.weight.shape


def itself(module):
    return module


def nothing_to_train(module):
    return nn.Identity()


ANSWERS = {
    check.peak: ([480, 480.0], [600, 400, 320, 120, 800, 640, 480e6, 500, "480 MB"]),
    check.accumulated: ([9, 9.0], [12, 3, 8, 5, 2, 6, 36, 7, "9 times"]),
    check.unit: (
        [Flat, EachTensor, naive, torch_fully_shard, ByCheckpoint],
        [
            KeepsUntilBackward,
            AutogradKeeps,
            Sum,
            OwnRows,
            NoGradientOfX,
            StillThere,
            WholeParameter,
            LinearOnly,
            itself,
            nothing_to_train,
            KeepsGradients,
            OwnShardOnly,
        ],
    ),
}
