"""A module, or an optimizer, that changed after a strategy has taken its parameters: followed, or
refused by name. Never trained on each rank alone."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minidist as md
from minidist.common.wrapper import Guard
from minidist.tensor_parallel import QKVParallelLinear, parallelize_module

SGD = torch.optim.SGD


def net():
    """Its first layer is frozen."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(3, 2)).double()
    module[0].requires_grad_(False)
    return module


def share(step=0):
    """Other examples on each rank."""
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(8, 4, dtype=torch.float64, generator=generator)


# ---- a module that changed --------------------------------------------------------------------


def ddp(module, **options):
    return md.DistributedDataParallel(module, **options), SGD(module.parameters(), lr=0.1)


def stage1(module, **options):
    model = md.DistributedDataParallel(module, **options)
    return model, md.ZeroRedundancyOptimizer(module.parameters(), SGD, lr=0.1)


def stage2(module):
    optimizer = md.ZeroRedundancyOptimizer(module.parameters(), SGD, lr=0.1)
    return md.ShardedDataParallel(module, optimizer), optimizer


def fsdp(module):
    model = md.FullyShardedDataParallel(module)
    return model, SGD(model.parameters(), lr=0.1)


def unfreeze(module):
    module[0].requires_grad_(True)


def load_by_assignment(module):
    module.load_state_dict({k: v.clone() for k, v in module.state_dict().items()}, assign=True)


def replace_a_layer(module):
    module[2] = nn.Linear(3, 5).double()


def add_an_adapter(module):
    module[1].register_module("adapter", nn.Linear(4, 3).double())
    module[1].register_forward_hook(lambda layer, inputs, y: y + layer.adapter(*inputs))


def append_a_layer(module):
    module.append(nn.Linear(2, 1).double())


def remove_a_layer(module):
    del module[2]


def convert(module):
    module[2].weight.data = module[2].weight.data[:1]


CHANGES = {
    unfreeze: "parameter 0.weight has been unfrozen since it was wrapped",
    load_by_assignment: "parameter 1.weight has been replaced since",
    replace_a_layer: "parameter 2.weight has been replaced since",
    add_an_adapter: "parameter 1.adapter.weight has been added since",
    append_a_layer: "parameter 3.weight has been added since",
    remove_a_layer: "parameter 2.weight has been removed since",
    convert: "parameter 2.weight has changed since it was wrapped, from shape (2, 3), float64, on "
    "cpu to shape (1, 3), float64, on cpu",
}


def raised(function, *args):
    try:
        function(*args)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("strategy", [ddp, stage1, stage2], ids=lambda each: each.__name__)
def test_a_parameter_that_nobody_averages_is_named(pools, strategy, change):
    def train():
        module = net()
        model, optimizer = strategy(module)
        model(share()).sum().backward()
        optimizer.step()
        change(module)
        model.eval()
        if change is not convert:
            with torch.no_grad():
                model(share(1))  # an evaluation averages nothing
        return raised(model.train(), share(1))

    for told in pools(2)(train):
        assert told is not None and told[0] == "RuntimeError"
        assert told[1].startswith(CHANGES[change]), told[1]
        assert "Change a module first, and wrap it then" in told[1]


@pytest.mark.parametrize("strategy", [ddp, stage2, fsdp], ids=lambda each: each.__name__)
def test_another_module_in_the_wrapper(pools, strategy):
    def train():
        model, _ = strategy(net())
        model(share()).sum().backward()
        model.module = net()
        return [raised(model, share()) for _ in range(2)]

    for told in pools(2)(train):
        assert all(
            each is not None and "has been replaced since it was wr" in each[1] for each in told
        )


def freeze_for_a_while(module):
    module[1].requires_grad_(False)
    yield
    module[1].requires_grad_(True)


def rename(module):
    layer = module[2]
    del module[2]
    module.add_module("last", layer)
    yield


def add_what_is_not_trained(module):
    module.append(nn.Linear(2, 2).double().requires_grad_(False))
    with torch.no_grad():
        module[-1].weight.fill_(0.5)
        module[-1].bias.fill_(1)
    yield


HARMLESS = [freeze_for_a_while, rename, add_what_is_not_trained]


@pytest.mark.parametrize("change", HARMLESS, ids=lambda change: change.__name__)
@pytest.mark.parametrize("strategy", [ddp, stage1, stage2], ids=lambda each: each.__name__)
def test_what_changes_no_training_goes_on(pools, strategy, change):
    """The ranks' weights are those of one process with both batches."""

    def train():
        module = net()
        plain = copy.deepcopy(module)
        alone = SGD(plain.parameters(), lr=0.1)
        frozen = change is freeze_for_a_while and strategy is not stage2
        model, optimizer = strategy(module, **{"find_unused_parameters": True} if frozen else {})
        ours, theirs = change(module), change(plain)
        for step in range(4):
            if step in (1, 2):
                next(ours, None), next(theirs, None)
            optimizer.zero_grad()
            model(share(step)).pow(2).sum().backward()
            optimizer.step()
            alone.zero_grad()
            for rank in range(2):
                generator = torch.Generator().manual_seed(10 * step + rank)
                x = torch.randn(8, 4, dtype=torch.float64, generator=generator)
                (plain(x).pow(2).sum() / 2).backward()
            alone.step()
        state, wanted = module.state_dict(), plain.state_dict()
        assert list(state) == list(wanted)
        return max(float((state[name] - wanted[name]).abs().max()) for name in wanted)

    assert max(pools(2)(train)) < 1e-12


@pytest.mark.parametrize("ignored", [False, True])
def test_what_is_ignored_may_be_unfrozen(ignored):
    module = net()
    guard = Guard(module, "it", frozenset(module[0].parameters()) if ignored else frozenset())
    unfreeze(module)
    assert raised(guard.require_unchanged) is None if ignored else raised(guard.require_unchanged)


def test_a_check_walks_over_no_names(monkeypatch):
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(50)))
    guard = Guard(module, "this test")
    walks = []
    walk = nn.Module.named_modules
    monkeypatch.setattr(
        nn.Module, "named_modules", lambda *args, **kwargs: walks.append(1) or walk(*args, **kwargs)
    )
    guard.require_unchanged()
    assert walks == []
    module.append(nn.ReLU())
    guard.require_unchanged()
    assert walks != []
    walks.clear()
    guard.require_unchanged()
    assert walks == []


def test_the_mesh_sees_a_change_too(pools):
    def train():
        model = md.zoo.Transformer(width=8, heads=2, layers=2)
        model.positions.requires_grad_(False)
        mixed = md.mixed.MixedParallel(model, md.mixed.mesh(data=2), microbatches=2)
        x, y = (tensor[:4] for tensor in md.zoo.text(8))
        mixed.train_step(x, y, mixed.cross_entropy)
        model.positions.requires_grad_(True)
        return raised(mixed.train_step, x, y, mixed.cross_entropy)

    for told in pools(2)(train):
        assert told is not None and told[0] == "RuntimeError"
        assert "parameter positions.weight has been unfrozen since" in told[1]


# ---- an optimizer that was made before --------------------------------------------------------


def split(model):
    parallelize_module(model)


def split_in_a_mesh(model):
    md.mixed.MixedParallel(model, md.mixed.mesh(tensor=2), microbatches=2)


@pytest.mark.parametrize("wrap", [split, split_in_a_mesh], ids=lambda wrap: wrap.__name__)
@pytest.mark.parametrize("call", ["step", "zero_grad"])
@pytest.mark.parametrize("offloaded", [False, True])
def test_an_optimizer_of_the_whole_model_is_told_that_it_has_been_split(
    pools, wrap, call, offloaded
):
    def train():
        model = md.zoo.Transformer(width=8, heads=2, layers=1)
        kind = md.OffloadedOptimizer.of(SGD) if offloaded else SGD
        optimizer = kind(model.parameters(), lr=0.1)
        wrap(model)
        return raised(getattr(optimizer, call))

    for told in pools(2)(train):
        assert told is not None and told[0] == "RuntimeError"
        assert told[1].startswith(
            "this parameter was replaced: the model has been split by features"
        )
        assert "Make the optimizer after parallelize_module or MixedParallel" in told[1]


def test_an_optimizer_made_before_a_mesh_that_cuts_no_layer_trains(pools):
    """Along pipeline and data a rank's parameters are those of the model: nothing is refused."""

    def train():
        model = md.zoo.Transformer(width=8, heads=2, layers=2).double()
        optimizer = SGD(model.parameters(), lr=0.1)
        mixed = md.mixed.MixedParallel(model, md.mixed.mesh(pipeline=2), microbatches=2)
        before = {name: p.detach().clone() for name, p in mixed.named_parameters()}
        x, y = (tensor[:4] for tensor in md.zoo.text(8))
        mixed.train_step(x, y, mixed.cross_entropy)
        optimizer.step()
        return [name for name, p in mixed.named_parameters() if torch.equal(p, before[name])]

    assert pools(2)(train) == [[], []]


# ---- values that are written past autograd's counters ----------------------------------------


def clamp(p):
    p.data.clamp_(-0.01, 0.01)


def by_numpy(p):
    p.detach().numpy()[...] *= 0.5


def clamp_in_place(p):
    with torch.no_grad():
        p.clamp_(-0.01, 0.01)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("write", [clamp, by_numpy, clamp_in_place], ids=lambda w: w.__name__)
def test_an_offloaded_optimizer_sees_what_is_written_into_parameters(write, dtype):
    """As in the loop of a Wasserstein GAN, which clamps after each step."""

    def train(make):
        torch.manual_seed(0)
        module = nn.Linear(4, 1).to(dtype)
        optimizer = make(module.parameters())
        x = torch.randn(8, 4, dtype=dtype, generator=torch.Generator().manual_seed(1))
        for _ in range(4):
            optimizer.zero_grad()
            (-module(x).mean()).backward()
            optimizer.step()
            for p in module.parameters():
                write(p)
        optimizer.zero_grad()
        (-module(x).mean()).backward()
        optimizer.step()
        return [p.tolist() for p in module.parameters()]

    plain = train(lambda params: SGD(params, lr=0.1, momentum=0.9))
    ours = train(lambda params: md.OffloadedOptimizer(params, SGD, lr=0.1, momentum=0.9))
    assert ours == plain


def test_after_join_offloaded_ranks_stay_together(pools):
    def train():
        rank = dist.get_rank()
        module = nn.Linear(3, 1, bias=False).double()
        nn.init.constant_(module.weight, 1.0)
        model = md.DistributedDataParallel(module)
        optimizer = md.OffloadedOptimizer(model.parameters(), SGD, lr=0.1)
        x = torch.ones(2, 3, dtype=torch.float64)
        with model.join():
            for _ in range(1 + 2 * rank):
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        return module.weight[0].tolist()

    # One step of both ranks, two of rank 1 alone (half a mean), and again one of both.
    wanted = [1 - 0.1 * (1 + 2 * 0.5 + 1)] * 3
    for weights in pools(2)(train):
        assert weights == pytest.approx(wanted, abs=1e-12)


def test_in_16_bits_small_steps_add_up_between_writes_to_other_elements():
    """1 - 2⁻¹⁰ is 1 in bfloat16: only the host's copy knows of it, until the element changes."""
    p = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = md.OffloadedOptimizer([p], SGD, lr=2.0**-10)
    for _ in range(4):
        p.grad = torch.ones_like(p)
        optimizer.step()
        p.data[1] = 2
    assert p.tolist() == [1 - 2.0**-8, 2]


# ---- which optimizers can train shards --------------------------------------------------------


class LARS(SGD):
    """You et al., arXiv 1708.03888: the rate depends on the norms of parameter and gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    p -= group["lr"] * 0.001 * p.norm() / p.grad.norm() * p.grad


class LAMB(torch.optim.Optimizer):
    """You et al., arXiv 1904.00962: Adam's update, as long as the parameter."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or not p.numel():
                    continue
                state = self.state[p]
                if not state:
                    state.update(m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["m"].lerp_(p.grad, 0.1)
                state["v"].lerp_(p.grad**2, 0.001)
                update = state["m"] / (state["v"].sqrt() + 1e-6)
                p -= group["lr"] * p.norm() / update.norm() * update


class Clipped(SGD):
    """It scales all gradients by their common norm."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 0.1)
        super().step()


class ClippedIfLarge(SGD):
    """The same, of gradients whose norm is above 10: those of a trial may not be."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 10)
        super().step()


class Later(LARS):
    """It begins at the sixth step to look at norms, as Shampoo does."""

    calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        super().step() if self.calls > 5 else SGD.step(self)


class Declared(ClippedIfLarge):
    elementwise = True


class ChildOfDeclared(Declared):
    """Its step may be another."""


RATES = [0.0, 1e-8, 1e-5, 1e-3, 1.0]
WHOLE = [LARS, LAMB, Clipped, ClippedIfLarge, Later, ChildOfDeclared, torch.optim.Adafactor]
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


@pytest.mark.parametrize("kind", WHOLE, ids=lambda kind: kind.__name__)
def test_an_optimizer_that_looks_at_whole_parameters_is_refused_at_any_rate(pools, kind):
    def make():
        return [
            raised(lambda lr=lr: md.ZeroRedundancyOptimizer(net().parameters(), kind, lr=lr))
            for lr in RATES
        ]

    for told in pools(2)(make):
        for lr, found in zip(RATES, told, strict=True):
            assert found is not None and found[0] == "TypeError", lr
            assert f"{kind.__name__} cannot train shards" in found[1]


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_an_elementwise_optimizer_is_taken_at_any_rate(pools, kind):
    def make():
        parameters = list(net().parameters())
        random, rates = torch.get_rng_state(), RATES
        if kind in (torch.optim.Adam, torch.optim.AdamW):
            rates = [*RATES, torch.tensor(1e-3)]
        for lr in rates:
            md.ZeroRedundancyOptimizer(copy.deepcopy(parameters), kind, lr=lr)
        return torch.equal(random, torch.get_rng_state())

    assert pools(2)(make) == [True, True]


# ---- an option that was ignored ---------------------------------------------------------------


def test_queries_keys_and_values_are_not_gathered(pools):
    def make():
        plain = QKVParallelLinear(4, 12, heads=4, gather_output=False)
        return (
            tuple(plain(torch.ones(1, 2, 4)).shape),
            raised(lambda: QKVParallelLinear(4, 12, heads=4, gather_output=True)),
            raised(
                lambda: QKVParallelLinear.from_dense(nn.Linear(4, 12), heads=4, gather_output=True)
            ),
        )

    for shape, *told in pools(2)(make):
        assert shape == (1, 2, 6)
        for kind, words in told:
            assert kind == "ValueError" and words.startswith("gather_output: a QKVParallelLinear")
