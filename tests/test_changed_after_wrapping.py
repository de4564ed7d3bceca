"""A module that was changed after a strategy has taken its parameters, or is wrapped again: its
gradients are averaged once, or it is refused by name."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minidist as md
from minidist.instruments.parity.differences import differences

SGD = torch.optim.SGD


def net():
    """Its first layer is frozen."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(3, 2)).double()
    module[0].requires_grad_(False)
    return module


def share(step=0, rank=None):
    """Other examples on each rank."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(8, 4, dtype=torch.float64, generator=generator)


def ddp(module, **options):
    return md.DistributedDataParallel(module, **options), SGD(module.parameters(), lr=0.1)


def stage2(module, **options):
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = md.ZeroRedundancyOptimizer(trained, SGD, lr=0.1)
    return md.ShardedDataParallel(module, optimizer, **options), optimizer


BOTH = pytest.mark.parametrize("strategy", [ddp, stage2])


def train(model, optimizer, step=0):
    optimizer.zero_grad()
    model(share(step)).pow(2).sum().backward()
    optimizer.step()


def train_alone(model, step=0):
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    for rank in range(2):
        (model(share(step, rank)).pow(2).sum() / 2).backward()
    optimizer.step()


def apart(model, plain):
    found = differences(dict(model.state_dict()), dict(plain.state_dict()))
    return [words for words, difference in found if not difference < 1e-12]


def raised(function, *args):
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# ---- a module that changed --------------------------------------------------------------------


def unfreeze(module):
    module[0].requires_grad_(True)


def replace_a_layer(module):
    module[2] = nn.Linear(3, 5).double()


def add_an_adapter(module):
    module[1].register_module("adapter", nn.Linear(4, 3).double())
    module[1].register_forward_hook(lambda layer, inputs, y: y + layer.adapter(*inputs))


def convert(module):
    module[2].weight.data = module[2].weight.data[:1]


CHANGES = {
    unfreeze: "0.weight",
    replace_a_layer: "2.weight",
    add_an_adapter: "1.adapter.weight",
    convert: "2.weight",
}


@BOTH
def test_a_parameter_that_nobody_averages_is_named(pools, strategy):
    def run(change):
        module = net()
        model, optimizer = strategy(module)
        train(model, optimizer)
        change(module)
        return raised(model, share(1))

    for change, name in CHANGES.items():
        for told in pools(2)(run, change):
            assert told.startswith(f"RuntimeError: parameter {name} was added, replaced"), told


# ---- two wrappers -----------------------------------------------------------------------------


def test_a_part_that_is_wrapped_already_is_refused(pools):
    def run():
        module = net()
        module[1], _ = ddp(module[1])
        return raised(ddp, module), raised(ddp, ddp(net())[0])

    for part, whole in pools(2)(run):
        assert "is wrapped already" in part and "is wrapped already" in whole


@BOTH
def test_a_cell_that_wraps_is_run_again(pools, strategy):
    """The wrapper of before is there still, with what it gave, and with its hooks."""

    def run():
        module, plain = net(), net()
        old, first = strategy(module)
        train(old, first)
        kept = old(share(1))
        model, optimizer = strategy(module)
        train(model, optimizer, 1)
        train_alone(plain)
        train_alone(plain, 1)
        return apart(module, plain), kept.requires_grad

    assert pools(2)(run) == [([], True)] * 2
