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
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import fully_shard
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


def nested_in_two(model):
    return wrap(nn.Sequential(*map(wrap, model)))


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


def outcome(model, backward, requires_grad=True, context=torch.enable_grad):
    """Outputs, gradients, buffers, and the next random number."""
    x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x.requires_grad_(requires_grad)
    torch.manual_seed(2)
    with context():
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


def for_some(y, x, weights):
    """Parts of the graph, one after the other: what one leaves, another may need."""
    first = torch.autograd.grad(loss_of(y), weights[-1], retain_graph=True, allow_unused=True)
    second = torch.autograd.grad(loss_of(y), weights[:1], retain_graph=True, allow_unused=True)
    once(y, x, weights)
    return [*first, *second]


def gradients_of_gradients(y, x, weights):
    found = torch.autograd.grad(loss_of(y), weights, create_graph=True)
    sum(gradient.pow(2).sum() for gradient in found).backward()


BACKWARD = [once, three_times, for_some, gradients_of_gradients]


@pytest.mark.parametrize("backward", BACKWARD)
@pytest.mark.parametrize("way", WAYS)
def test_the_same_as_the_bare_module(way, backward):
    plain, wrapped = pair(way)
    apart(outcome(wrapped, backward), outcome(plain, backward))
    if way != "frozen":
        apart(outcome(wrapped, backward, False), outcome(plain, backward, False))


class Counts(nn.Module):
    """Forward puts other tensors into its buffers, one of which is not there at first."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))
        self.register_buffer("last", None)

    def forward(self, x):
        self.passes = self.passes + 1
        self.last = x.detach().mean() + (0 if self.last is None else self.last)
        return self.linear(x).exp()


@pytest.mark.parametrize("around", [wrap, nested_in_two])
def test_buffers_that_forward_replaces_move_once(around):
    torch.manual_seed(0)
    plain = nn.Sequential(Counts(), Counts())
    wrapped, x = around(copy.deepcopy(plain)), torch.randn(3, 5, 6)
    for part in x:
        for model in (plain, wrapped):
            model(part).sum().backward()
    assert [int(part.passes) for part in plain] == [3, 3]
    found, wanted = wrapped.state_dict(), plain.state_dict()
    assert found.keys() == wanted.keys()
    apart([*found.values()], [*wanted.values()], 0)


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

    def forward(self, pair, box, *, scale, names, mask=None):
        tokens, (x, _) = pair
        y = self.linear(self.table(tokens) * x + box.inside) * scale["by"]
        if mask is not None:
            y = y.masked_fill(mask, 0)
        return {"y": [y, y.detach() + 1], "names": names, "n": 3, "box": Box(y.exp())}


@pytest.mark.parametrize("mask", [None, torch.tensor([True, False, False])])
def test_nested_inputs_and_outputs(mask):
    torch.manual_seed(0)
    plain = Nested()
    wrapped = wrap(copy.deepcopy(plain))
    x, scale, inside = (torch.rand(2, 3, requires_grad=True) for _ in range(3))
    given = (torch.tensor([1, 3]), (x, None)), Box(inside)
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
    """Its gradient penalty asks for a gradient within forward."""

    def __init__(self, penalty=False):
        super().__init__()
        self.linear, self.penalty, self.calls = nn.Linear(6, 6), penalty, 0

    def forward(self, x):
        self.calls += 1
        y = self.linear(x).tanh()
        if self.penalty:
            (slope,) = torch.autograd.grad(y.sum(), self.linear.weight, create_graph=True)
            return y + slope.pow(2).sum()
        return y


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


def test_a_gradient_within_forward():
    torch.manual_seed(0)
    plain = Counted(penalty=True)
    x, found = torch.randn(5, 6), []
    for model in plain, wrap(copy.deepcopy(plain)):
        model(x).sum().backward()
        found.append([p.grad for p in model.parameters()])
    apart(found[1], found[0], 1e-6)


def test_names_are_those_of_the_bare_module():
    plain, wrapped = pair("nested")
    inside = nn.Sequential(nn.Linear(2, 2), wrap(nn.Linear(2, 2)))
    assert list(inside.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    whole = wrap(plain)
    assert list(whole.state_dict()) == list(plain.state_dict())
    wrap(layers()).load_state_dict(layers().state_dict())
    assert whole.module is plain and list(wrapped.parameters())


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
    for n, every in [(2, 1), (4, 1), (4, 2), (6, 3)]:
        kept, peak, live = measured(n, wrap, every)
        # The input of each segment, and the output of the last one, which the norm saves.
        assert kept == ends + (n // every + 1) * 4 * B * T * C
        assert measured(n, lambda part: part)[0] == ends + 4 * B * T * C + n * per_block
        assert live["activations"] == live["other"] == 0
        theirs = measured(n, Torchs, every)
        assert (kept, peak["activations"]) == (theirs[0], theirs[1]["activations"])
        # One segment at a time is there again, beside what is left of the rest.
        assert every * per_block < peak["activations"] <= kept + every * per_block


def test_a_whole_of_segments_keeps_less_still():
    kept = measured(8, wrap)[0]
    model, x = language_model(8, wrap)
    model.blocks = nn.Sequential(wrap(model.blocks[:4]), wrap(model.blocks[4:]))
    with md.measure.MemoryTracker(model) as memory:
        model(x).sum().backward()
    assert kept - memory.after("forward")["activations"] == 6 * 4 * B * T * C


def test_a_graph_that_is_retained_keeps_no_more_than_before():
    model, x = language_model(2, wrap)
    with md.measure.MemoryTracker(model) as memory:
        loss = model(x).sum()
        loss.backward(retain_graph=True)
    assert memory.live["activations"] == memory.after("forward")["activations"] > 0
    assert memory.live["other"] == loss.nbytes


@pytest.mark.parametrize("backward", [once, for_some, None])
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


def units_of(kind, model, **options):
    return md.FullyShardedDataParallel(model, auto_wrap_policy=by_class(kind), **options)


def units_of_checkpoints(**options):
    return lambda model: units_of(CheckpointWrapper, blocks(model), **options)


STRATEGIES = {
    "DDP": lambda model: md.DistributedDataParallel(blocks(model), bucket_cap_mb=0.01),
    "DDP of the whole": lambda model: md.DistributedDataParallel(wrap(model)),
    "checkpoint of DDP": lambda model: wrap(md.DistributedDataParallel(model)),
    "torch DDP": lambda model: TorchDDP(blocks(model)),
    "ZeRO 2": lambda model: stage2(blocks(model), torch.optim.SGD),
    "fully sharded, checkpoints of units": lambda model: units_of(md.zoo.Block, blocks(model)),
    "fully sharded, units of checkpoints": units_of_checkpoints(),
    "and not freed after forward": units_of_checkpoints(reshard_after_forward=False),
    "and without prefetch": units_of_checkpoints(prefetch=False),
    "fully sharded, one checkpoint": lambda model: units_of(md.zoo.Block, wrap(model)),
    "checkpoint of fully sharded": lambda model: wrap(units_of(md.zoo.Block, model)),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_parity_of_replicas(pools, name):
    md.parity.check(
        STRATEGIES[name],
        model=partial(md.zoo.Transformer, length=8, width=16, layers=3),
        data=md.zoo.text(8),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        ranks=pools(2),
        steps=2,
    )


@pytest.mark.parametrize("name", ["checkpoints of units", "units of checkpoints"])
def test_shards_and_checkpoints_each_save_their_own(pools, name):
    """What is kept is that of checkpoints alone. Parameters travel and are there as without."""

    def kept_sent_and_whole(around):
        model, x = language_model(4, lambda part: part[0])
        model = around(model)
        with md.measure.TrafficCounter() as traffic, md.measure.MemoryTracker(model) as memory:
            model(x).sum().backward()
        return memory.after("forward")["activations"], traffic.calls, memory.peak_of["parameters"]

    alone = measured(4, wrap)[0]
    for rank in (0, 1):
        bare = pools(2)(kept_sent_and_whole, partial(units_of, md.zoo.Block))[rank]
        kept, *others = pools(2)(kept_sent_and_whole, STRATEGIES[f"fully sharded, {name}"])[rank]
        assert (kept, others) == (alone, list(bare[1:])) and kept < bare[0] / 3


def shard(model):
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


SHARDED = {
    "fully_shard of checkpoints": lambda model: shard(blocks(model)),
    "checkpoints of fully_shard": lambda model: fully_shard(
        blocks(model, lambda b: wrap(fully_shard(b)))
    ),
    "FSDP of checkpoints": lambda model: TorchFSDP(
        blocks(model, lambda b: TorchFSDP(wrap(b), device_id=torch.device("cpu"))),
        device_id=torch.device("cpu"),
    ),
}


def like_sharded(name):
    """On a rank: the losses of three steps, wrapped and not, as one process has them."""
    losses = []
    for around in (SHARDED[name], lambda model: model):
        torch.manual_seed(0)
        model = around(md.zoo.Transformer(length=8, width=16, layers=2).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs, targets = md.zoo.text(8)
        own = []
        for step in range(3):
            shares = [slice(4 * step + r, 4 * step + 4, 2) for r in range(2)]
            if around is SHARDED[name]:
                shares = [shares[dist.get_rank()]]
            optimizer.zero_grad()
            for share in shares:
                loss = md.parity.cross_entropy(model(inputs[share]), targets[share]) / len(shares)
                loss.backward()
            optimizer.step()
            with torch.no_grad():
                own.append(md.parity.cross_entropy(model(inputs[:8]), targets[:8]))
        losses.append(torch.stack(own))
    return md.parity.relative_difference(*losses)


@pytest.mark.parametrize("name", SHARDED)
def test_within_torchs_sharded_training(pools, name):
    assert max(pools(2)(like_sharded, name)) <= 1e-12


@pytest.mark.parametrize("kind", [md.zoo.Block, CheckpointWrapper])
def test_states_of_sharded_checkpoints_are_those_of_the_bare_module(pools, kind):
    def saved():
        model = units_of(kind, blocks(md.zoo.Transformer(seed=1)))
        other = md.zoo.Transformer(seed=2).state_dict()
        names = [name for name, _ in model.named_parameters()]
        first = model.state_dict()
        model.load_state_dict(other)
        return names, first, model.state_dict()

    plain, other = md.zoo.Transformer(seed=1), md.zoo.Transformer(seed=2).state_dict()
    wanted = plain.state_dict()
    for names, first, second in pools(2)(saved):
        assert set(names) == {name for name, _ in plain.named_parameters()}
        for found, expected in (first, wanted), (second, other):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recompute", [False, True])
def test_within_a_pipeline(pools, schedule, recompute):
    def train():
        torch.manual_seed(0)
        plain = nn.Sequential(
            *[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]
        ).double()
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

    assert max(pools(2)(train)) <= 1e-12


def test_within_features_split_over_ranks(pools):
    def split():
        torch.manual_seed(0)
        plain = nn.Sequential(
            md.ColumnParallelLinear(6, 8, dtype=torch.float64),
            nn.GELU(),
            md.RowParallelLinear(8, 6, dtype=torch.float64),
        )
        found = []
        for model in plain, wrap(copy.deepcopy(plain)):
            x = torch.ones(3, 6, dtype=torch.float64, requires_grad=True)
            loss_of(model(x)).backward()
            found.append(
                torch.cat([x.grad.flatten(), *[p.grad.flatten() for p in model.parameters()]])
            )
        return md.parity.relative_difference(*found)

    assert pools(2)(split) == [0.0] * 2


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


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("shape", r"Changes must do the same each time, .* a tensor \(5, 6\) float32 on cpu was"),
        ("dtype", r"a tensor \(5, 6\) float32 on cpu was a tensor \(5, 6\) float64 on cpu the sec"),
        ("more", "[0-9] tensors were [0-9] the second time"),
        ("less", "[0-9] tensors were [0-9] the second time"),
    ],
)
def test_a_second_pass_that_differs(how, words):
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


@pytest.mark.parametrize("way", ["functional_call", "replaced"])
@pytest.mark.parametrize("around", [wrap, nested_in_two])
def test_other_weights_in_the_second_pass_are_refused(around, way):
    plain = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double()
    model, x = around(copy.deepcopy(plain)), torch.randn(5, 6, dtype=torch.float64)
    others = {name: (p * 3).detach().requires_grad_() for name, p in model.named_parameters()}
    if way == "functional_call":
        y = torch.func.functional_call(model, others, (x,))
    else:
        y = model(x)
        model.get_submodule("module.0").weight = nn.Parameter(plain[0].weight * 3)
    with pytest.raises(RuntimeError, match="weight of a checkpointed .* is another tensor in back"):
        y.sum().backward()


def test_a_tied_weight_that_is_replaced_under_its_second_name_is_refused():
    tied = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    tied[1].weight = tied[0].weight
    y = wrap(tied)(torch.randn(5, 6)).sum()
    tied[1].weight = nn.Parameter(tied[0].weight * 3)
    with pytest.raises(RuntimeError, match="1.weight of a checkpointed Sequential is another"):
        y.backward()


def test_the_same_weights_by_another_object_are_the_same():
    plain = nn.Linear(6, 6)
    model, x = wrap(copy.deepcopy(plain)), torch.randn(5, 6)
    aliases = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
    torch.func.functional_call(model, aliases, (x,)).exp().sum().backward()
    plain(x).exp().sum().backward()
    found = [alias.grad for alias in aliases.values()]
    assert all(map(torch.equal, found, [p.grad for p in plain.parameters()]))


def test_a_failure_in_the_second_pass_leaves_random_numbers_and_buffers():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.calls = nn.BatchNorm1d(6), 0

        def forward(self, x):
            self.calls += 1
            x = nn.functional.dropout(self.norm(x))
            assert self.calls < 2, "on purpose"
            return x

    model = Fails()
    y = wrap(model)(torch.randn(5, 6)).sum()
    before = [torch.get_rng_state(), *[b.clone() for b in model.buffers()]]
    with pytest.raises(AssertionError, match="on purpose"):
        y.backward()
    apart([torch.get_rng_state(), *model.buffers()], before, 0)


def test_no_module():
    with pytest.raises(TypeError, match="needs an nn.Module, not function"):
        wrap(lambda x: x)
