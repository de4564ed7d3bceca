"""A module, or an optimizer, that changed after a strategy has taken its parameters: followed, or
refused by name. Never trained on each rank alone."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minidist as md
from minidist.tensor_parallel import parallelize_module

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


# ---- a module that changed --------------------------------------------------------------------


def ddp(module, **options):
    return md.DistributedDataParallel(module, **options), SGD(module.parameters(), lr=0.1)


def stage2(module, **options):
    optimizer = md.ZeroRedundancyOptimizer(module.parameters(), SGD, lr=0.1)
    return md.ShardedDataParallel(module, optimizer, **options), optimizer


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


def raised(function, *args):
    try:
        function(*args)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("strategy", [ddp, stage2])
def test_a_parameter_that_nobody_averages_is_named(pools, strategy):
    def train(change):
        module = net()
        model, optimizer = strategy(module)
        model(share()).sum().backward()
        optimizer.step()
        change(module)
        if change is not convert:
            with torch.no_grad():
                model(share(1))  # an evaluation averages nothing
        return raised(model, share(1))

    for change, name in CHANGES.items():
        for told in pools(2)(train, change):
            assert told is not None and told[0] == "RuntimeError", change
            assert told[1].startswith(f"parameter {name} was added, replaced, unfro"), told[1]


@pytest.mark.parametrize("strategy", [ddp, stage2])
def test_what_is_frozen_for_a_while_stays_as_it_is(pools, strategy):
    """The ranks' weights are those of one process with both batches."""

    def train():
        module = net()
        plain = copy.deepcopy(module)
        alone = SGD(plain.parameters(), lr=0.1)
        model, optimizer = strategy(module, find_unused_parameters=True)
        for step in range(4):
            for each in module, plain:
                each[1].requires_grad_(step != 1)
            optimizer.zero_grad()
            model(share(step)).pow(2).sum().backward()
            optimizer.step()
            alone.zero_grad()
            for rank in range(2):
                (plain(share(step, rank)).pow(2).sum() / 2).backward()
            alone.step()
        state, wanted = module.state_dict(), plain.state_dict()
        return max(float((state[name] - wanted[name]).abs().max()) for name in wanted)

    assert max(pools(2)(train)) < 1e-12


# ---- an optimizer that was made before --------------------------------------------------------


def split(model):
    parallelize_module(model)


def split_in_a_mesh(model):
    md.mixed.MixedParallel(model, md.mixed.mesh(tensor=2), microbatches=2)


def test_an_optimizer_of_the_whole_model_is_told_that_it_has_been_split(pools):
    def train(wrap, call):
        model = md.zoo.Transformer(width=8, heads=2, layers=1)
        optimizer = SGD(model.parameters(), lr=0.1)
        wrap(model)
        return raised(getattr(optimizer, call))

    for wrap, call in (split, "step"), (split_in_a_mesh, "zero_grad"):
        for told in pools(2)(train, wrap, call):
            assert told is not None and told[0] == "RuntimeError", wrap
            words = "this parameter was replaced: the model has been split by features"
            assert told[1].startswith(words), wrap
            assert "Make the optimizer after parallelize_module or MixedParallel" in told[1]


# ---- which optimizers can train shards --------------------------------------------------------


class Clipped(SGD):
    """It scales all gradients by their common norm, of which those of a trial may be small."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 10)
        super().step()


class Declared(Clipped):
    elementwise = True


WHOLE = [Clipped, torch.optim.Adafactor]
ELEMENTWISE = [
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.ASGD,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
    Declared,
]


def test_an_optimizer_that_looks_at_whole_parameters_is_refused(pools):
    def make(kind):
        return raised(lambda: md.ZeroRedundancyOptimizer(net().parameters(), kind, lr=1e-3))

    for kind in WHOLE:
        for told in pools(2)(make, kind):
            assert told is not None and told[0] == "TypeError", kind
            assert f"{kind.__name__} cannot train rows" in told[1]


def test_an_elementwise_optimizer_is_taken(pools):
    def make():
        for kind in ELEMENTWISE:
            md.ZeroRedundancyOptimizer(net().parameters(), kind, lr=1e-3)

    pools(2)(make)
