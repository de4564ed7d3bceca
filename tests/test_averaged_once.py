"""A gradient is averaged once, as the user's hooks have left it, and only by a wrapper's own pass.

Held against one process, which computes all ranks' shares."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minidist as md

DDP = md.DistributedDataParallel
SGD = partial(md.ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD, lr=1.0)


def share(rank, step=0):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(5, 4, dtype=torch.float64, generator=generator)


def mine(step=0):
    return share(dist.get_rank(), step)


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def sharded(module):
    """Stage 2, with an optimizer whose step leaves each weight less by its gradient."""
    optimizer = SGD(module.parameters())
    return md.ShardedDataParallel(module, optimizer), optimizer


def alone(module, pass_of, ranks=2):
    """The gradients of one process, by the shares of all ranks."""
    for rank in range(ranks):
        (pass_of(module, rank) / ranks).backward()
    return [parameter.grad for parameter in module.parameters()]


def square(module, rank):
    return module(share(rank)).pow(2).mean()


def far(ours, theirs):
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


# ---- mistakes -----------------------------------------------------------------------------


def raised(function):
    try:
        function()
    except (RuntimeError, AttributeError, ValueError) as error:
        return str(error)


# ---- two wrappers -------------------------------------------------------------------------------


def twice():
    return DDP(DDP(net()))


def whole_and_part():
    first, _, last = net()
    return DDP(nn.Sequential(DDP(first), last))


def ddp_around_zero():
    return DDP(sharded(net())[0])


def test_a_part_that_is_wrapped_already_is_refused(pools):
    def train(make):
        return raised(lambda: square(make(), dist.get_rank()).backward())

    for make in twice, whole_and_part, ddp_around_zero:
        for told in pools(2)(train, make):
            assert told is not None and "is wrapped already" in told, make


def test_a_model_that_was_wrapped_before_in_shards(pools):
    """The wrapper that a notebook's cell made first may be there still, with its hooks."""

    def train():
        module = net()
        old, _ = sharded(module)
        square(old, dist.get_rank()).backward()
        model, optimizer = sharded(module)
        before = [p.detach().clone() for p in module.parameters()]
        square(model, dist.get_rank()).backward()
        optimizer.step()
        ours = [b - p.detach() for b, p in zip(before, module.parameters(), strict=True)]
        return far(ours, alone(net(), square)), old.module is module

    for apart, kept in pools(2)(train):
        assert apart < 1e-12 and kept


def test_a_wrapper_whose_output_is_left_alone_does_not_average(pools):
    """A cell is run again: the wrapper of before is kept alive by what it gave."""

    def train():
        module = net()
        kept = [DDP(module)(mine())]
        model = DDP(module)
        square(model, dist.get_rank()).backward()
        apart = far([p.grad for p in module.parameters()], alone(net(), square))
        assert kept
        return apart

    assert max(pools(2)(train)) < 1e-12


def of_forces(module, rank):
    x = share(rank).requires_grad_()
    (force,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    return force.pow(2).mean()


def test_a_loss_of_gradients_alone_is_averaged(pools):
    """Its backward pass comes through no output of the wrapper."""

    def run():
        module = nn.Sequential(net()[0], nn.Tanh(), nn.Linear(3, 2, bias=False).double())
        wanted = [g.clone() for g in alone(module, of_forces)]
        module.zero_grad()
        model = DDP(module)
        of_forces(model, dist.get_rank()).backward()
        return far([p.grad for p in module.parameters()], wanted)

    assert max(pools(2)(run)) < 1e-12


# ---- the module without its wrapper --------------------------------------------------------------


class Model(nn.Module):
    width = 4

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        self.hidden = self.net(x)
        return self.hidden

    def penalty(self, weight=1.0):
        return weight * sum(p.pow(2).sum() for p in self.parameters())


WRAPS = pytest.mark.parametrize(
    "wrap", [DDP, lambda module: sharded(module)[0]], ids=["ddp", "zero"]
)


@WRAPS
def test_methods_are_the_modules_alone(pools, wrap):
    """As in torch, whose class has none of the module's attributes."""

    def look():
        model = wrap(Model())
        square(model, dist.get_rank()).backward()
        assert model.width == 4 and model.hidden is model.module.hidden
        assert not hasattr(model, "penalty") and hasattr(model.module, "penalty")
        return raised(lambda: model.penalty)

    for told in pools(2)(look):
        assert told.partition(" has no penalty(): ")[2].endswith(" in a forward of your own")


def test_a_penalty_of_the_bare_module_may_join_the_loss(pools):
    def train():
        model, apart = DDP(Model()), 0.0
        for _ in range(2):  # before the first pass, and after one
            model.module.penalty().backward()  # alone it is this rank's
            model.zero_grad()
            (square(model, dist.get_rank()) + model.module.penalty(0.5)).backward()
            theirs = alone(Model(), lambda m, rank: square(m, rank) + m.penalty(0.5))
            apart = max(apart, far([p.grad for p in model.parameters()], theirs))
            model.zero_grad()
        return apart

    assert max(pools(2)(train)) < 1e-12
