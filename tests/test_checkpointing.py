"""Lesson: activation_checkpointing. A module that is computed again in backward trains as one that
is not, and keeps its inputs alone. Held against the bare module, torch's own checkpoint, and a
formula, in bytes."""

import copy
import gc
import weakref
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import minidist as md
from minidist.checkpointing import CheckpointWrapper
from minidist.fully_sharded import by_class
from minidist.pipeline import SCHEDULES

wrap = md.checkpoint_wrapper


def layers():
    """Dropout, a running mean, an op that saves its output and one that saves its input."""
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.Dropout(0.5),
        nn.BatchNorm1d(8),
        nn.Sigmoid(),
        nn.Linear(8, 6),
        nn.GELU(),
    )


class Twice(nn.Module):
    """One module, called twice; its second call has other inputs."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return self.block(self.block(x) + 1)


class Tied(nn.Module):
    """Two modules that share a weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second = layers(), layers()
        self.second[0].weight = self.first[0].weight

    def forward(self, x):
        return self.second(self.first(x))


def nested(model):
    return wrap(nn.Sequential(model[0], wrap(model[1:4]), wrap(wrap(model[4:]))))


# By name: a model, and how it is wrapped. Both begin with the same weights.
WAYS = {
    "whole": (layers, wrap),
    "each layer": (layers, lambda model: nn.Sequential(*map(wrap, model))),
    "in two": (layers, lambda model: nn.Sequential(wrap(model[:3]), wrap(model[3:]))),
    "nested": (layers, nested),
    "called twice": (lambda: Twice(layers()), lambda model: Twice(wrap(model.block))),
    "tied": (Tied, lambda model: nn.Sequential(wrap(model.first), wrap(model.second))),
    "frozen": (lambda: layers().requires_grad_(False), wrap),
}


def pair(way):
    """The bare model and the wrapped one, float64."""
    make, around = WAYS[way]
    torch.manual_seed(0)
    plain = make().double()
    torch.manual_seed(0)
    return plain, around(copy.deepcopy(make().double()))


def outcome(model, backward, requires_grad=True):
    """Outputs, gradients, buffers, and the next random number."""
    x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x.requires_grad_(requires_grad)
    torch.manual_seed(2)
    y = model(x)
    trained = [p for p in model.parameters() if p.requires_grad] or [x]
    given = backward(y, x, trained)
    found = [y.detach(), x.grad, *[p.grad for p in model.parameters()], *model.buffers()]
    return [*found, *(given or []), torch.rand(1)]


def apart(ours, wanted, allowed=1e-12):
    assert len(ours) == len(wanted)
    for a, b in zip(ours, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert md.parity.relative_difference(a, b) <= allowed


def loss_of(y):
    weights = torch.arange(1, y.numel() + 1, dtype=y.dtype).view(y.shape)
    return (y * weights).sin().sum()


def once(y, x, weights):
    loss_of(y).backward()


def three_times(y, x, weights):
    for _ in range(2):
        loss_of(y).backward(retain_graph=True)
    loss_of(y).backward()


def gradients_of_gradients(y, x, weights):
    found = torch.autograd.grad(loss_of(y), weights, create_graph=True)
    sum(gradient.pow(2).sum() for gradient in found).backward()


BACKWARD = [once, three_times, gradients_of_gradients]


@pytest.mark.parametrize("backward", BACKWARD)
@pytest.mark.parametrize("way", WAYS)
def test_the_same_as_the_bare_module(way, backward):
    plain, wrapped = pair(way)
    apart(outcome(wrapped, backward), outcome(plain, backward))
    if way != "frozen":
        apart(outcome(wrapped, backward, False), outcome(plain, backward, False))


def test_autocast_is_that_of_the_first_pass():
    plain, wrapped = (model.float() for model in pair("in two"))

    def outputs(model):
        torch.manual_seed(0)
        x = torch.randn(5, 6, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            with torch.autocast("cpu", enabled=False):
                x = model(x)
            y = model(x)
        assert y.dtype is torch.bfloat16
        with torch.autocast("cpu", torch.float16):  # another one, within backward
            y.float().pow(2).sum().backward()
        return [p.grad for p in model.parameters()]

    apart(outputs(wrapped), outputs(plain), 0)


@dataclass
class Box:
    inside: torch.Tensor


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.linear = nn.Embedding(4, 3), nn.Linear(3, 3)

    def forward(self, pair, box, *, scale, names, mask):
        tokens, (x, _) = pair
        y = self.linear(self.table(tokens) * x + box.inside) * scale["by"]
        y = y.masked_fill(mask, 0)
        return {"y": [y, y.detach() + 1], "names": names, "n": 3, "box": Box(y.exp())}


def test_nested_inputs_and_outputs():
    torch.manual_seed(0)
    plain = Nested()
    wrapped = wrap(copy.deepcopy(plain))
    x, scale, inside = (torch.rand(2, 3, requires_grad=True) for _ in range(3))
    given, mask = (
        ((torch.tensor([1, 3]), (x, None)), Box(inside)),
        torch.tensor([True, False, False]),
    )
    found = []
    for model in plain, wrapped:
        out = model(*given, scale={"by": scale}, names="ab", mask=mask)
        assert out["names"] == "ab" and out["n"] == 3 and not out["y"][1].requires_grad
        x.grad = scale.grad = inside.grad = None
        (out["y"][0].pow(2).sum() + out["box"].inside.sum() + out["y"][1].sum()).backward()
        grads = [p.grad for p in model.parameters()]
        found.append([out["y"][0].detach(), x.grad, scale.grad, inside.grad, *grads])
    apart(found[1], found[0], 0)


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(6, 6), 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x).tanh()


def test_forward_runs_twice_and_without_gradients_once():
    model = wrap(nn.Sequential(Counted(), Counted()))
    x = torch.randn(5, 6)
    for calls, context in enumerate((torch.no_grad, torch.inference_mode), start=1):
        with context():
            assert not model(x).requires_grad
        assert [part.calls for part in model.module] == [calls] * 2
    model(x).sum().backward()
    assert [part.calls for part in model.module] == [4, 4]
    y = nn.Sequential(wrap(nn.ReLU()), nn.ReLU())(x)  # nothing is trained
    assert not y.requires_grad


# ---- bytes ------------------------------------------------------------------------------------

B, T, C = 4, 32, 32


def language_model(n, around, every=1):
    torch.manual_seed(0)
    model = md.zoo.Transformer(width=C, length=T, layers=n)
    parts = [model.blocks[i : i + every] for i in range(0, n, every)]
    model.blocks = nn.Sequential(*map(around, parts))
    return model, torch.randint(256, (B, T))


def measured(n, around, every=1):
    model, x = language_model(n, around, every)
    with md.measure.MemoryTracker(model) as memory:
        model(x).sum().backward()
    return memory.after("forward")["activations"], memory.peak_of, memory.live


class Torchs(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return checkpoint(self.module, x, use_reentrant=False)


def test_only_the_inputs_of_wrapped_modules_remain():
    ends = (
        measured(0, wrap)[0] - 4 * B * T * C
    )  # of the model: the last block's output is saved too
    per_block = measured(1, lambda block: block)[0] - measured(0, wrap)[0]
    for n, every in [(2, 1), (4, 2), (6, 3)]:
        kept, peak, live = measured(n, wrap, every)
        # The input of each segment, and the output of the last one, which the norm saves.
        assert kept == ends + (n // every + 1) * 4 * B * T * C
        assert measured(n, lambda part: part)[0] == ends + 4 * B * T * C + n * per_block
        assert live["activations"] == live["other"] == 0
        theirs = measured(n, Torchs, every)
        assert (kept, peak["activations"]) == (theirs[0], theirs[1]["activations"])
        # One segment at a time is there again, beside what is left of the rest.
        assert every * per_block < peak["activations"] <= kept + every * per_block


@pytest.mark.parametrize("backward", [once, three_times, None])
def test_nothing_stays_behind(backward):
    _, model = pair("nested")
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    inner = x * 2
    life = weakref.ref(inner.untyped_storage())
    gc.disable()  # not by the collector of cycles
    try:
        y = model(inner)
        del inner
        assert life() is not None or backward is None
        if backward:
            backward(y, x, list(model.parameters()))
        del y
        assert life() is None
    finally:
        gc.enable()


# ---- within the strategies --------------------------------------------------------------------


def blocks(model, around=wrap):
    model.blocks = nn.Sequential(*map(around, model.blocks))
    return model


def stage2(module, optimizer):
    zero = md.ZeroRedundancyOptimizer(module.parameters(), optimizer, lr=0.1)
    return md.ShardedDataParallel(module, zero), zero


def units_of(kind, model):
    return md.FullyShardedDataParallel(model, auto_wrap_policy=by_class(kind))


def units_of_checkpoints(model):
    return units_of(CheckpointWrapper, blocks(model))


STRATEGIES = {
    "DDP": lambda model: md.DistributedDataParallel(blocks(model), bucket_cap_mb=0.01),
    "torch DDP": lambda model: TorchDDP(blocks(model)),
    "ZeRO 2": lambda model: stage2(blocks(model), torch.optim.SGD),
    "fully sharded, checkpoints of units": lambda model: units_of(md.zoo.Block, blocks(model)),
    "fully sharded, units of checkpoints": units_of_checkpoints,
    "fully sharded, one checkpoint": lambda model: units_of(md.zoo.Block, wrap(model)),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_parity_of_replicas(pools, name):
    md.parity.check(
        STRATEGIES[name],
        model=partial(md.zoo.Transformer, length=8, width=16, layers=2),
        data=md.zoo.text(8),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        ranks=pools(2),
        steps=2,
    )


def test_states_of_sharded_checkpoints_are_those_of_the_bare_module(pools):
    def saved():
        model = units_of(CheckpointWrapper, blocks(md.zoo.Transformer(seed=1)))
        other = md.zoo.Transformer(seed=2).state_dict()
        first = model.state_dict()
        model.load_state_dict(other)
        return first, model.state_dict()

    plain, other = md.zoo.Transformer(seed=1), md.zoo.Transformer(seed=2).state_dict()
    wanted = plain.state_dict()
    for first, second in pools(2)(saved):
        for found, expected in (first, wanted), (second, other):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_within_a_pipeline(pools):
    def train(schedule, recompute):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]
        plain = nn.Sequential(*layers).double()
        model = md.Pipeline(
            nn.Sequential(*map(wrap, copy.deepcopy(plain))), 4, schedule, recompute=recompute
        )
        x = torch.randn(8, 6, dtype=torch.float64)
        model.train_step(x, x, nn.functional.mse_loss)
        nn.functional.mse_loss(plain(x), x).backward()
        wanted = {name: p.grad for name, p in plain.named_parameters()}
        own = {k: v.grad for k, v in model.state_dict(keep_vars=True).items() if v.grad is not None}
        assert own
        return max(md.parity.relative_difference(own[name], wanted[name]) for name in own)

    for schedule in SCHEDULES:
        for recompute in (False, True):
            assert max(pools(2)(train, schedule, recompute)) <= 1e-12, (schedule, recompute)


# ---- mistakes ---------------------------------------------------------------------------------


class Overwrites(nn.Module):
    def forward(self, x):
        return x.mul_(2).exp()


class Changes(nn.Module):
    """Does something else each time."""

    def __init__(self, how):
        super().__init__()
        self.how, self.calls = how, 0
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        self.calls += 1
        y = self.linear(x)
        if self.calls % 2 == 0:
            y = {
                "shape": lambda: y[:, :3],
                "dtype": y.double,
                "more": lambda: y.exp().log(),
                "less": lambda: y,
            }[self.how]()
        return y.exp() if not (self.how == "less" and self.calls % 2 == 0) else y * 1


def test_a_second_pass_that_differs():
    was = r"a tensor \(5, 6\) float32 on cpu was"
    for how, words in {
        "shape": rf"Changes must do the same each time, .* {was}",
        "dtype": rf"{was} a tensor \(5, 6\) float64 on cpu the sec",
        "more": "[0-9] tensors were [0-9] the second time",
        "less": "[0-9] tensors were [0-9] the second time",
    }.items():
        y = wrap(Changes(how))(torch.randn(5, 6))
        with pytest.raises(RuntimeError, match=words):
            y.sum().backward()


def test_inputs_and_weights_that_have_changed():
    with pytest.raises(RuntimeError, match="Overwrites changes its input in place"):
        wrap(Overwrites())(torch.randn(3, requires_grad=True) * 1)
    x = torch.randn(5, 6)
    model = wrap(nn.Linear(6, 6))
    y = model(x).sum()
    x += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        y.backward()
    assert "inputs of a checkpointed Linear" in caught.value.__notes__[0]
    y = model(x).exp().sum()
    with torch.no_grad():
        model.module.bias += 1
    with pytest.raises(RuntimeError, match="the weights of a checkpointed Linear were changed"):
        y.backward()


def test_no_module():
    with pytest.raises(TypeError, match="needs an nn.Module, not function"):
        wrap(lambda x: x)
