"""Fully sharded training at its edges: what autograd does not show, ranks that differ, loops of
other scripts. Held against one process. Lesson: fully_sharded"""

import contextlib
import copy
import gc
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from fsdp_scripts import saved_by_both
from programs import few
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import minidist as md
from minidist.common.refusals import RefusedError
from minidist.fully_sharded import by_class, by_size, flat_shard
from minidist.fully_sharded.fsdp_module import groups_in

LAYERS = by_class(nn.Linear)
wrapped = partial(md.FullyShardedDataParallel, auto_wrap_policy=LAYERS)


def flats_of(model):
    return [flat for group in groups_in(model) for flat in group.flats]


def double(*sizes):
    return md.zoo.mlp(*sizes, dtype=torch.float64)


def share(rank, step=0, n=5, width=6):
    """Examples of a rank, other ones on each rank and at each step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(n, width, dtype=torch.float64, generator=generator)


def apart(ours, plain, allowed=1e-12):
    assert ours.keys() == plain.keys()
    differences = {k: md.parity.relative_difference(ours[k], v) for k, v in plain.items()}
    return {name: d for name, d in differences.items() if not d <= allowed}


def pair(make, wrap=wrapped):
    """A module, sharded; and one of the same weights, for one process."""
    torch.manual_seed(0)
    module = make()
    plain = copy.deepcopy(module)
    return wrap(module), plain


def trained(make, wrap, loss_of, steps=2, **options):
    """On a rank: some steps, sharded and in one process. What differs, and the bytes not freed.
    `loss_of(model, rank, step)` is the loss of this rank's share."""
    model, plain = pair(make, partial(wrap, **options))
    ours, alone = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain))
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(steps):
        for m, optimizer, ranks in ((model, ours, [rank]), (plain, alone, range(size))):
            optimizer.zero_grad()
            for each in ranks:
                (loss_of(m, each, step) / len(ranks)).backward()
            optimizer.step()
    wholes = [flat.full.untyped_storage().nbytes() for flat in flats_of(model)]
    return apart(model.state_dict(), plain.state_dict()), sum(wholes)


FINE = ({}, 0)


# ---- a graph whose ends are not seen ----------------------------------------------------------


class Output:
    """A plain object, which nobody knows."""

    def __init__(self, y):
        self.y = [y]


class Slotted:
    __slots__ = ("y",)

    def __init__(self, y):
        self.y = y


class Scales(nn.Module):
    """Elementwise parameters: what reads them when they are freed does not raise."""

    def __init__(self, where="output"):
        super().__init__()
        self.where, self.hidden = where, []
        self.a, self.b = (
            nn.Parameter(torch.full((6,), v, dtype=torch.float64)) for v in (3.0, 5.0)
        )

    def forward(self, x):
        y = x * self.a * self.b
        if self.where == "object":
            return Output(y)
        if self.where == "slots":
            return Slotted(y)
        if self.where == "attribute":
            self.loss = y.pow(2).mean()
            return x
        if self.where == "attribute, later":
            out = x * self.a
            self.loss = y.pow(2).mean()
            return out
        if self.where == "closure":
            HIDDEN[:] = [y]
            return x
        return y


HIDDEN = []


class Around(nn.Module):
    """Layers before and after."""

    def __init__(self, where):
        super().__init__()
        self.first, self.scales, self.last = double(6, 6), Scales(where), double(6, 3)

    def forward(self, x):
        x = self.scales(self.first(x))
        if isinstance(x, Output):
            x = x.y[0]
        return self.last(getattr(x, "y", x))


def loss_of_parts(model, rank, step):
    """Of the output, and of what is hidden within."""
    output = model(share(rank, step))
    output = getattr(output, "y", output)
    output = output[0] if isinstance(output, list) else output
    losses = [output.pow(2).mean()] if output.requires_grad else []
    losses += [
        each.loss for each in model.modules() if isinstance(each, Scales) and hasattr(each, "loss")
    ]
    losses += [y.pow(2).mean() for y in HIDDEN]
    return sum(losses)


def hidden_alone(model, rank, step):
    """The output is not used."""
    model(share(rank, step))
    return next(each.loss for each in model.modules() if hasattr(each, "loss"))


WHERE = ["object", "slots", "attribute", "attribute, later", "closure"]


@pytest.mark.parametrize("where", WHERE)
def test_outputs_that_are_hidden(pools, where):
    def run(make, loss_of, **options):
        HIDDEN.clear()
        return trained(make, md.FullyShardedDataParallel, loss_of, **options)

    for make in (partial(Scales, where), partial(Around, where)):
        policy = by_class(Scales, nn.Linear) if make.func is Around else None
        assert pools(2)(run, make, loss_of_parts, auto_wrap_policy=policy) == [FINE] * 2
    if "attribute" in where:
        assert pools(2)(run, make, hidden_alone, auto_wrap_policy=policy) == [FINE] * 2


def test_what_cannot_be_found_beside_an_output_raises_and_crashes_nothing(pools):
    def run():
        def hide(module, x, y):
            HIDDEN[:] = [(y[0] * module.b).sum()]

        module = Scales()
        module.register_forward_hook(hide)
        md.FullyShardedDataParallel(module)(share(0))
        try:
            sum(HIDDEN).backward()
        except RuntimeError as error:
            return str(error)

    for told in pools(2)(run):
        assert told is not None and "modified inplace" in told, told


def test_what_was_freed_since_it_was_kept_raises_and_crashes_nothing(pools):
    """A unit that stays after backward is freed by a pass without gradients all the same. Then
    nothing may take it for one that is there: a graph that nobody sees would read freed memory."""

    def run():
        module, hidden = nn.Sequential(Scales(), double(6, 6)), []
        module[0].register_forward_hook(lambda m, x, y: hidden.append((y * m.b).sum()))
        for unit in (module[0], module):
            md.fully_shard(unit)
        module[0].set_reshard_after_backward(False)
        module(share(0)).sum().backward()
        hidden.clear()
        module(share(0))
        with torch.no_grad():
            module(share(0))
        try:
            module(share(0))
            hidden[0].backward()
        except RuntimeError as error:
            return str(error)

    for told in pools(2)(run):
        assert told is not None and "modified inplace" in told, told


class Hides(nn.Module):
    """A layer that gives its output within an iterator, or as it is."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x, hidden):
        h = self.inner(x).tanh()
        return iter([h]) if hidden else h


class CallsAgain(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.first, self.unit, self.last = nn.Linear(6, 6), Hides(), nn.Linear(6, 6)
        self.hidden = hidden

    def forward(self, x):
        x = self.first(x)
        for hidden in self.hidden:
            y = self.unit(x, hidden)
            x = self.last(next(y) if hidden else y)
        return x


def two_graphs(model, rank, step):
    x = share(rank, step)
    return model(x).pow(2).mean() + model(2 * x).mean()


def twice_back(model, rank, step):
    loss = model(share(rank, step)).pow(2).mean()
    ranks = 1 if isinstance(model, md.FullyShardedDataParallel) else dist.get_world_size()
    (loss / ranks).backward(retain_graph=True)
    return loss


CALLS = {"before": (True, False), "after": (False, True), "both": (True, True)}


@pytest.mark.parametrize("when", CALLS)
@pytest.mark.parametrize("loss_of", [two_graphs, twice_back], ids=lambda f: f.__name__)
def test_a_unit_with_a_hidden_output_that_is_called_again_raises(pools, when, loss_of):
    """The second call frees the parameters that the first one's graph is to read."""

    def run():
        def make():
            return CallsAgain(CALLS[when]).double()

        try:
            return trained(make, wrapped, loss_of, auto_wrap_policy=by_class(Hides))
        except RuntimeError as error:
            return str(error)

    for told in pools(2)(run):
        assert "modified inplace" in told


class AddsInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.scales, self.mlp = Scales(), double(6, 6)

    def forward(self, x, t):
        x += self.scales(t).tanh()
        x += self.mlp(t)
        return x


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = double(6, 6), double(6, 3)
        self.blocks = nn.ModuleList([AddsInPlace(), AddsInPlace()])

    def forward(self, x):
        t, x = x, self.first(x)
        for block in self.blocks:
            x = block(x, t)
        return self.last(x)


class GivesParameters(nn.Module):
    """Units that return what they hold, or a view of it."""

    def __init__(self):
        super().__init__()
        self.prompt, self.first = Prompt(), double(6, 6)

    def forward(self, x):
        return self.first(x * self.prompt()).pow(2) * self.prompt(expand=x)


class Prompt(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 7, dtype=torch.float64))

    def forward(self, expand=None):
        return self.weight if expand is None else self.weight.expand_as(expand)


class Stopped(nn.Module):
    """A parameter that is read where no gradient goes to it, and frozen ones."""

    def __init__(self):
        super().__init__()
        self.first, self.last = double(6, 6), double(6, 6)
        self.first[0].bias.requires_grad_(False)
        self.gate = nn.Parameter(torch.full((6,), 2.0, dtype=torch.float64))

    def forward(self, x):
        x = x @ self.last[0].weight.detach() * self.gate
        return self.last(self.first(x).tanh() * self.gate.detach())


def squares(model, rank, step):
    return model(share(rank, step)).pow(2).mean()


@pytest.mark.parametrize(
    "make, units",
    [
        (InPlace, by_class(AddsInPlace)),
        (GivesParameters, by_class(Prompt)),
        (Stopped, None),
        (partial(nn.Sequential, Stopped(), Stopped()), by_class(Stopped)),
    ],
    ids=["in place", "gives parameters", "stopped", "stopped, units"],
)
@pytest.mark.parametrize("prefetch", [True, False])
def test_parameters_are_there_as_long_as_they_are_read(pools, make, units, prefetch):
    run = partial(trained, make, md.FullyShardedDataParallel, squares)
    assert pools(2)(run, auto_wrap_policy=units, prefetch=prefetch) == [FINE] * 2


def test_passes_without_a_backward_pass_leave_nothing(pools):
    """Without Python's collector of cycles, which comes when it likes."""

    def run():
        blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)]
        model = md.FullyShardedDataParallel(nn.Sequential(*blocks), auto_wrap_policy=LAYERS)
        x = torch.randn(256, 64, requires_grad=True)

        def live_after(steps):
            with md.measure.MemoryTracker(model) as memory:
                for _ in range(steps):
                    model(x * 1).sum()
            return sum(memory.live.values())

        gc.collect()
        gc.disable()
        try:
            # Gloo's thread may give back the last message late.
            return [min(live_after(steps) for _ in range(4)) for steps in (1, 3, 6)]
        finally:
            gc.enable()

    for live in pools(2)(run):
        assert live == [live[0]] * 3, live


# ---- ranks that differ ------------------------------------------------------------------------


class Prompted(nn.Module):
    """What only some ranks use: a unit, a dtype, a parameter. The table is a flat parameter of its
    own in any case: it is complex."""

    def __init__(self, what):
        super().__init__()
        self.what = what
        self.first, self.layer, self.last = double(6, 6), double(6, 6), double(6, 6)
        self.prompt, self.table = Prompt(), nn.Linear(6, 6, dtype=torch.complex128)

    def forward(self, x, use):
        t = self.first(x)
        layer, prompt = self.layer(t), self.prompt(expand=t)  # all ranks compute all units
        table = self.table(t.to(torch.complex128)).abs()
        if use:
            t = t + {"layer": layer, "prompt": prompt, "table": table}[self.what]
        return self.last(t)


def used_by_rank_0(model, rank, step):
    return model(share(rank, step), rank == 0).pow(2).mean()


def used_by_the_last(model, rank, step):
    return model(share(rank, step), rank == dist.get_world_size() - 1).pow(2).mean()


def hybrid(module, **options):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    return md.FullyShardedDataParallel(module, device_mesh=mesh, **options)


@pytest.mark.parametrize("used", [used_by_rank_0, used_by_the_last])
@pytest.mark.parametrize("what", ["layer", "prompt", "table"])
@pytest.mark.parametrize("prefetch", [True, False])
def test_what_one_rank_has_not_in_its_graph_counts_there_as_zero(pools, what, used, prefetch):
    for policy in (None, by_class(nn.Linear, Prompt)):
        run = partial(trained, partial(Prompted, what), steps=3, loss_of=used)
        options = {"auto_wrap_policy": policy, "prefetch": prefetch}
        found = pools(3)(run, md.FullyShardedDataParallel, **options)
        assert found == [FINE] * 3
    if prefetch:
        assert pools(4)(run, hybrid, **options) == [FINE] * 4


def clipped_by_method(model, norm_type=2.0):
    if isinstance(model, md.FullyShardedDataParallel):
        model.clip_grad_norm_(0.1, norm_type)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)


def clipped_by_torch(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


@pytest.mark.parametrize(
    "use",
    [
        lambda rank, k: rank == k % 2,
        lambda rank, k: rank == 0 and k == 0,
        lambda rank, k: rank == 0 and k == 1,
        lambda rank, k: False,
    ],
)
@pytest.mark.parametrize(
    "change",
    [
        lambda model: None,
        clipped_by_method,
        pytest.param(clipped_by_torch, marks=pytest.mark.newer_torch("clipping")),
    ],
)
def test_what_one_rank_lacks_within_no_sync(pools, use, change):
    """In a pass that is kept, and not in the one that is reduced. Gradients within no_sync are the
    same DTensors on all ranks; what no rank used keeps its value, without weight decay."""

    def run():
        wrap = partial(md.FullyShardedDataParallel, auto_wrap_policy=by_class(nn.Linear, Prompt))
        model, plain = pair(partial(Prompted, "layer"), wrap)
        rank, size = dist.get_rank(), dist.get_world_size()
        for k in range(3):
            with model.no_sync() if k < 2 else contextlib.nullcontext():
                model(share(rank, k), use(rank, k)).pow(2).mean().backward()
            for each in range(size):
                (plain(share(each, k), use(each, k)).pow(2).mean() / size).backward()
            for m in (model, plain):
                change(m)
        for m in (model, plain):
            torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.1).step()
        return apart(model.state_dict(), plain.state_dict())

    assert pools(3)(run) == [{}] * 3


class Forces(nn.Module):
    """A model that needs gradients of its own within its forward pass."""

    def __init__(self):
        super().__init__()
        self.energy, self.last = nn.Sequential(double(6, 6), nn.Tanh()), double(6, 6)

    def forward(self, x):
        x = x.detach().requires_grad_()
        energy = self.energy(x)
        with torch.enable_grad():
            (forces,) = torch.autograd.grad(energy.sum(), x, retain_graph=True)
        return self.last(energy) + forces


@pytest.mark.parametrize("policy", [None, LAYERS, by_class(nn.Sequential)])
@pytest.mark.parametrize("reshard", [True, False])
def test_autograd_within_the_forward_pass(pools, policy, reshard):
    options = {"auto_wrap_policy": policy, "reshard_after_forward": reshard}
    found = pools(2)(trained, Forces, md.FullyShardedDataParallel, squares, **options)
    assert [apart for apart, _ in found] == [{}] * 2


def test_gradients_of_inputs_alone_reduce_nothing(pools):
    def run():
        model = wrapped(double(6, 5, 4))
        x = share(dist.get_rank()).requires_grad_()
        loss = model(x).sum()
        with md.measure.TrafficCounter() as traffic:
            torch.autograd.grad(loss, x, retain_graph=True)
        none = [p.grad is None for p in model.parameters()]
        loss.backward()  # the same graph, now for the parameters
        return sorted(traffic.calls), all(none), [p.grad is None for p in model.parameters()]

    for calls, none, missing in pools(2)(run):
        assert calls == ["all_gather"] or calls == ["broadcast"]
        assert none and not any(missing)


# ---- whole modules of others ------------------------------------------------------------------


class Encoders(nn.Module):
    def __init__(self, layers=1):
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 12, 0.0, batch_first=True, dtype=torch.float64)
        self.first = double(6, 6)
        self.layer = nn.TransformerEncoder(layer, 2) if layers > 1 else layer

    def forward(self, x):
        return self.layer(self.first(x).view(1, -1, 6))


class Normed(nn.Module):
    """Batch norms see the same on all ranks, or their statistics would differ."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8, dtype=dtype), nn.BatchNorm1d(8, dtype=dtype)
        self.last = nn.Linear(8, 3, dtype=dtype)

    def forward(self, x):
        x = self.first(x)
        y = self.norm(x.relu())
        self.seen = [x.dtype, self.norm.weight.dtype, y.dtype]
        return self.last(y)


class Quantized(nn.Module):
    """Frozen numbers of 8 bits, beside a trained layer, and a mask of bools."""

    def __init__(self):
        super().__init__()
        self.last = double(6, 3)
        self.numbers = nn.Parameter(torch.arange(250, 256).to(torch.int8), requires_grad=False)
        self.mask = nn.Parameter(torch.arange(6) % 2 == 0, requires_grad=False)

    def forward(self, x):
        assert self.numbers.dtype == torch.int8 and self.numbers.tolist() == [*range(-6, 0)]
        return self.last((x * self.numbers * self.mask).to(x.dtype))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("policy", [by_size(40), LAYERS, by_class(nn.TransformerEncoderLayer)])
def test_encoder_layers_of_torch(pools, layers, policy):
    """They read the parameters of their children, and in eval mode those of all at once."""

    def run():
        torch.manual_seed(0)
        make = partial(Encoders, layers)
        found = trained(make, md.FullyShardedDataParallel, squares, auto_wrap_policy=policy)
        module = make()
        plain = copy.deepcopy(module).eval()
        model = md.FullyShardedDataParallel(module, auto_wrap_policy=policy).eval()
        with torch.no_grad():
            difference = (model(share(0)) - plain(share(0))).abs().max()
        return found, float(difference) < 1e-12

    assert pools(2)(run) == [(FINE, True)] * 2


def test_frozen_integers(pools):
    assert pools(2)(trained, Quantized, md.FullyShardedDataParallel, squares) == [FINE] * 2


def test_batch_norms_keep_their_precision(pools):
    def run(**precision):
        policy = MixedPrecision(torch.bfloat16, **precision)
        model = wrapped(Normed(torch.float32), mixed_precision=policy)
        squares(model, 0, 0).backward()
        model.eval()(share(0))
        return model.module.seen, {b.dtype for b in model.buffers()}

    kept = {torch.float32, torch.int64}
    for buffers in ({}, {"buffer_dtype": torch.bfloat16}):
        seen = [torch.bfloat16, torch.float32, torch.bfloat16]
        assert pools(2)(run, **buffers) == [(seen, kept)] * 2


def test_which_inputs_are_cast(pools):
    """As with torch: those of the root, and those of units if it is said so."""

    def run(**casts):
        found = []

        class Sees(nn.Linear):
            def forward(self, x, table=None):
                found.append(table.dtype if table is not None else x.dtype)
                return super().forward(x)

        class Gives(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = Sees(6, 6), Sees(6, 6)

            def forward(self, x):
                return self.b(self.a(x), torch.ones(3))

        policy = MixedPrecision(torch.bfloat16, **casts)
        units = by_class(Sees)
        md.FullyShardedDataParallel(Gives(), None, units, policy)(share(0).bfloat16())
        return found

    b, f = torch.bfloat16, torch.float32
    assert pools(2)(run) == [[b, f]] * 2
    assert pools(2)(run, cast_forward_inputs=True) == [[b, b]] * 2


# ---- scripts of others ------------------------------------------------------------------------


def decayed(model):
    """The usual groups: no weight decay for biases and norms."""
    weights = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": weights, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}]


def test_groups_by_dimensions(pools):
    def run():
        model, plain = pair(
            lambda: nn.Sequential(
                nn.Conv1d(1, 2, 2, dtype=torch.float64), nn.Flatten(), double(10, 3)
            )
        )
        adam = [torch.optim.AdamW(decayed(m), lr=0.1) for m in (model, plain)]
        rank, size = dist.get_rank(), dist.get_world_size()
        for step in range(3):
            for m, optimizer, ranks in zip(
                (model, plain), adam, ([rank], range(size)), strict=True
            ):
                optimizer.zero_grad()
                for each in ranks:
                    (m(share(each, step)[:, None]).pow(2).mean() / len(ranks)).backward()
                optimizer.step()
        found = apart(model.state_dict(), plain.state_dict())
        ours = model.optim_state_dict(adam[0])["state"]
        for number, state in adam[1].state_dict()["state"].items():
            found |= apart(ours[number], state)
        named = model.optim_state_dict(adam[0], by_name=True)
        by_torch = get_optimizer_state_dict(plain, adam[1])
        assert named["param_groups"] == by_torch["param_groups"]
        assert list(named["state"]) == list(by_torch["state"])
        for name, state in by_torch["state"].items():
            found |= apart(named["state"][name], state)
        for group in by_torch["param_groups"]:
            group["params"].reverse()  # names say which is which
        for saved in (adam[1].state_dict(), by_torch):
            new = torch.optim.AdamW(decayed(model), lr=0.1)
            model.load_optim_state_dict(new, saved)
            for p, state in new.state.items():
                assert state["exp_avg"].shape == p.shape
                found |= apart(wholes(state), wholes(adam[0].state[p]))
        by_torch["param_groups"][0]["params"][0] = "other"
        with pytest.raises(ValueError, match="its group 0 and the optimizer's differ in .*, other"):
            model.load_optim_state_dict(new, by_torch)
        return found, [p.ndim for p in model.parameters()] == [p.ndim for p in plain.parameters()]

    assert pools(3)(run) == [({}, True)] * 3


def wholes(state):
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}


def test_the_state_of_the_module_itself_is_in_rows(pools):
    def run():
        model, plain = pair(
            lambda: nn.Sequential(double(6, 5), nn.BatchNorm1d(5, dtype=torch.float64))
        )
        rows = model.module.state_dict()
        found = apart(wholes(rows), plain.state_dict(), 0)
        assert isinstance(rows["0.0.weight"], DTensor) and len(rows["0.0.weight"]._local_tensor) < 5
        with_prefix = nn.ModuleDict({"x": model}).state_dict()
        return found | apart(with_prefix, nn.ModuleDict({"x": plain}).state_dict(), 0)

    assert pools(2)(run) == [{}] * 2


def test_a_cast_copy_of_a_shard_dies_when_the_parameters_are_there(pools):
    """Not when the thread that sent it comes to it."""
    low = MixedPrecision(param_dtype=torch.bfloat16)

    def run():
        model = wrapped(double(6, 5, 4), mixed_precision=low)
        sent = []
        gather = flat_shard.all_gather_each

        def watched(places, group, own):
            sent.append(own)
            return gather(places, group, own)

        flat_shard.all_gather_each = watched
        try:
            model.module[0].unshard()
        finally:
            flat_shard.all_gather_each = gather
        return [(own.dtype, own.untyped_storage().nbytes()) for own in sent]

    assert pools(2)(run) == [[(torch.bfloat16, 0)]] * 2


@pytest.mark.parametrize("sharded", [True, False])
def test_saved_and_loaded_in_inference_mode(pools, sharded):
    def run():
        model, plain = pair(lambda: double(6, 5, 4))
        state = model.module if sharded else model
        with torch.inference_mode():
            saved = state.state_dict()
            doubled = {k: v * 2 for k, v in saved.items()} if not sharded else saved
            state.load_state_dict(doubled)
        for p in plain.parameters():
            p.data *= 1 if sharded else 2
        for m, ranks in ((model, [dist.get_rank()]), (plain, range(2))):
            for each in ranks:
                (squares(m, each, 0) / len(ranks)).backward()
            torch.optim.SGD(m.parameters(), lr=0.1).step()
        return apart(model.state_dict(), plain.state_dict())

    assert pools(2)(run) == [{}] * 2


def test_a_step_within_a_summoned_block_that_fails_stays(pools):
    def run():
        model = wrapped(double(6, 4))
        model(share(dist.get_rank())).sum().backward()
        optimizer, before = torch.optim.SGD(model.parameters(), 0.1), wholes(model.state_dict())
        with pytest.raises(KeyError), model.summon_full_params():
            optimizer.step()
            raise KeyError
        after = wholes(model.state_dict())
        return [name for name, x in after.items() if x.equal(before[name])]

    assert pools(2)(run) == [[], []]


def test_loaded_within_summon_full_params(pools):
    def run():
        model = wrapped(double(6, 5, 4))
        wanted = {k: torch.full_like(v, 7.0) for k, v in model.state_dict().items()}
        with model.summon_full_params():
            model.load_state_dict(wanted)
        return apart(model.state_dict(), wanted, 0)

    assert pools(2)(run) == [{}] * 2


def test_accumulation_by_a_flag(pools):
    """As scripts for DistributedDataParallel do it."""

    def run():
        model, plain = pair(lambda: double(6, 5, 4))
        assert model.require_backward_grad_sync
        with md.measure.TrafficCounter() as traffic:
            for k in range(4):
                model.require_backward_grad_sync = k == 3
                squares(model, dist.get_rank(), k).backward()
                for rank in range(2):
                    (squares(plain, rank, k) / 2).backward()
        for m in (model, plain):
            torch.optim.SGD(m.parameters(), lr=0.1).step()
        return apart(model.state_dict(), plain.state_dict()), traffic.calls["all_reduce"][0]

    assert pools(2)(run) == [({}, 1)] * 2


@pytest.mark.parametrize("norm_type", [2.0, 1.0])
@pytest.mark.parametrize("wrap", [wrapped, hybrid], ids=["one axis", "hybrid"])
def test_clipping_by_torch(pools, norm_type, wrap):
    """The norm is that of the whole gradient, and the same on every rank; also after an average of
    several passes, and of shards without elements."""

    def run(foreach):
        def make():
            return nn.Sequential(double(6, 5, 4), nn.Linear(4, 1, bias=False).double())

        model, plain = pair(make, partial(wrap, auto_wrap_policy=LAYERS))
        clip = partial(torch.nn.utils.clip_grad_norm_, norm_type=norm_type, foreach=foreach)
        norms = []
        for step in range(2):
            squares(model, dist.get_rank(), step).backward()
            for rank in range(size := dist.get_world_size()):
                (squares(plain, rank, step) / size).backward()
            for p in (*model.parameters(), *plain.parameters()):
                p.grad = p.grad * 3
            norms += [clip(m.parameters(), 0.1) for m in (model, plain)]
        for m in (model, plain):
            torch.optim.SGD(m.parameters(), lr=0.1).step()
        torch.testing.assert_close(norms[::2], norms[1::2], rtol=1e-12, atol=0)
        return apart(model.state_dict(), plain.state_dict())

    for foreach in (None, True):
        assert pools(4)(run, foreach) == [{}] * 4


def scaled(model):
    for p in model.parameters():
        p.grad *= 0.5


def scaled_in_a_copy(model):
    for p in model.parameters():
        p.grad = p.grad * 0.5


def clipped_by_hand(model):
    norms = [p.grad.detach().norm() for p in model.parameters()]
    for p in model.parameters():
        p.grad /= torch.stack(norms).norm()


CHANGES = [scaled, scaled_in_a_copy, clipped_by_hand, clipped_by_method]
CHANGES += [partial(clipped_by_method, norm_type=float("inf"))]


@pytest.mark.parametrize("change", CHANGES)
def test_what_happens_to_gradients_within_no_sync(pools, change):
    """They are the sum over the ranks, as any tool sees them, and the next pass adds to that."""

    def run():
        model, plain = pair(lambda: double(6, 5, 4))
        rank, size = dist.get_rank(), dist.get_world_size()
        for k in range(2):
            with model.no_sync() if k == 0 else contextlib.nullcontext():
                squares(model, rank, k).backward()
            for each in range(size):
                (squares(plain, each, k) / size).backward()
            change(model)
            change(plain)
        for m in (model, plain):
            torch.optim.SGD(m.parameters(), lr=0.1).step()
        return apart(model.state_dict(), plain.state_dict())

    assert pools(3)(run) == [{}] * 3


def test_averaged_weights_in_a_copy(pools):
    """A deep copy, as for an exponential moving average: trained on, evaluated and saved."""

    def averages(model, wrap):
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rank, size = dist.get_rank(), dist.get_world_size()
        for step in range(3):
            optimizer.zero_grad()
            for each in [rank] if wrap else range(size):
                (squares(model, each, step) / (1 if wrap else size)).backward()
            optimizer.step()
            averaged.update_parameters(model)
        state = {**averaged.module.state_dict(), "output": averaged(share(7)).detach()}
        assert not any(p.grad is not None for p in averaged.parameters())
        squares(averaged, rank, 0).backward()  # the copy can be trained, too
        return state, all(p.grad is not None for p in averaged.parameters())

    def run():
        torch.manual_seed(0)
        module = nn.Sequential(*double(6, 5, 4), nn.LSTM(4, 3, dtype=torch.float64), Last())
        plain = copy.deepcopy(module)
        (ours, trains), (wanted, _) = averages(wrapped(module), True), averages(plain, False)
        return apart(ours, wanted), trains

    assert pools(2)(run) == [({}, True)] * 2


class Last(nn.Module):
    def forward(self, x):
        return x[0]


class Buffered(nn.Module):
    """What is ignored stays: a frozen table, a head that each rank trains for itself."""

    def __init__(self):
        super().__init__()
        self.first, self.own = double(6, 6), double(6, 3)
        self.scale = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, x):
        return self.own(self.first(x) * self.scale)


@pytest.mark.parametrize("policy", [None, LAYERS])
def test_what_is_ignored_stays_on_each_rank(pools, policy):
    def run(how):
        torch.manual_seed(dist.get_rank())
        module = Buffered()
        plain = copy.deepcopy(module)
        given = [module.own] if how == "ignored_modules" else [module.own, module.scale]
        model = md.FullyShardedDataParallel(module, auto_wrap_policy=policy, **{how: given})
        assert isinstance(module.own[0], nn.Linear) and module.own[0].weight.shape == (3, 6)
        plain.first.load_state_dict(first(model))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        squares(model, dist.get_rank(), 0).backward()
        squares(plain, dist.get_rank(), 0).backward()
        found = apart({"g": module.own[0].weight.grad}, {"g": plain.own[0].weight.grad})
        norm = model.clip_grad_norm_(1e9)
        optimizer.step()
        states = model.optim_state_dict(optimizer)
        model.load_optim_state_dict(optimizer, states)
        state = model.state_dict()
        model.load_state_dict(state)
        return found, {k: tuple(v.shape) for k, v in state.items()}, float(norm) > 0

    shapes = {k: tuple(v.shape) for k, v in Buffered().state_dict().items()}
    for how in ("ignored_modules", "ignored_states"):
        assert pools(2)(run, how) == [({}, shapes, True)] * 2


def first(model):
    state = model.state_dict()
    return {k.removeprefix("first."): v for k, v in state.items() if k.startswith("first.")}


SCRIPT = """
import functools, os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, FullStateDictConfig
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from LIBRARY import FullyShardedDataParallel as FSDP
from model import Block, Model

dist.init_process_group("gloo")
rank, device = dist.get_rank(), torch.device("cpu")
torch.manual_seed(0)
model = FSDP(
    Model(),
    sharding_strategy=ShardingStrategy.STRATEGY,
    cpu_offload=CPUOffload(offload_params=False),
    auto_wrap_policy=functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={Block}
    ),
    backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
    mixed_precision=MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float32),
    device_id=device,
    sync_module_states=False,
    forward_prefetch=True,
    limit_all_gathers=True,
    use_orig_params=True,
)
assert model.width == 8
decay = [p for name, p in model.named_parameters() if not name.endswith("bias")]
rest = [p for name, p in model.named_parameters() if name.endswith("bias")]
groups = [dict(params=decay, weight_decay=0.1), dict(params=rest, weight_decay=0.0)]
optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
generator = torch.Generator().manual_seed(rank)
norms = []
for step in range(4):
    optimizer.zero_grad()
    tokens = torch.randint(16, (3, 2, 5), generator=generator)
    with model.no_sync():
        for part in tokens[:2]:
            nn.functional.cross_entropy(model(part).flatten(0, 1), part.flatten()).backward()
    nn.functional.cross_entropy(model(tokens[2]).flatten(0, 1), tokens[2].flatten()).backward()
    norms.append(float(model.clip_grad_norm_(0.5)))
    optimizer.step()
    schedule.step()
    if step == 1:
        states = FSDP.optim_state_dict(model, optimizer)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, states))

model.eval()
with torch.no_grad():
    loss = nn.functional.cross_entropy(model(tokens[0]).flatten(0, 1), tokens[0].flatten())
    dist.all_reduce(loss)
with FSDP.summon_full_params(model, writeback=False):
    total = sum(p.double().sum() for p in model.parameters()).item()
config = FullStateDictConfig()
with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
    state = model.state_dict()
if rank == 0:
    torch.save((state, norms, loss, total), sys.argv[1])
dist.destroy_process_group()
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", few(["FULL_SHARD", "SHARD_GRAD_OP"], {"FULL_SHARD"}))
def test_a_script_for_torchs_class_with_one_line_changed(tmp_path, strategy):
    script = SCRIPT.replace("STRATEGY", strategy)
    (ours, *found), (theirs, *wanted) = saved_by_both(tmp_path, script)
    assert list(ours) == list(theirs) and apart(ours, theirs, 1e-5) == {}
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-5, atol=0)


# ---- full parameters for a moment -------------------------------------------------------------


class Generates(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.last = nn.LSTM(6, 6, dtype=torch.float64), double(6, 6)

    def forward(self, x):
        return self.last(self.lstm(x)[0])

    def generate(self, x):
        return self.forward(self.forward(x))


@pytest.mark.parametrize("policy", [None, by_class(nn.Linear, nn.LSTM)])
def test_forward_passes_with_full_parameters(pools, policy):
    """As for the evaluation of averaged weights, or for text, on any rank alone."""

    def run():
        wrap = partial(md.FullyShardedDataParallel, auto_wrap_policy=policy)
        model, plain = pair(Generates, wrap)
        model(share(0)).sum().backward()
        x, found = share(5), []
        with torch.no_grad(), model.summon_full_params(writeback=False):
            for p in plain.parameters():
                p.mul_(1.5)
            for p in model.parameters():
                p.mul_(1.5)
            if dist.get_rank() == 0:
                found = [model(x) - plain(x), model.module.generate(x) - plain.generate(x)]
        for p in plain.parameters():
            p.data.div_(1.5)
        found.append(model(x) - plain(x))
        return max(float(d.detach().abs().max()) for d in found)

    for difference in pools(2)(run):
        assert difference < 1e-14


class TwoInputs(nn.Linear):
    def forward(self, x, table):
        self.dtypes = x.dtype, table.dtype
        return super().forward(x)


class Outer(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.inner = wrap(TwoInputs(6, 6))

    def forward(self, x):
        return self.inner(x, torch.ones(3))


def test_a_unit_that_is_wrapped_by_hand_is_no_root_within_another(pools):
    """Its other inputs stay as they are, and all modules are shown to `apply`."""

    def run():
        wrap = partial(md.FullyShardedDataParallel, mixed_precision=MixedPrecision(torch.bfloat16))
        inner = wrap(TwoInputs(6, 6))
        alone = inner.module
        inner(torch.ones(2, 6), torch.ones(3))
        model = wrap(Outer(wrap))
        model(torch.ones(2, 6))
        names = []
        model.apply(lambda module: names.append(type(module).__name__))
        model.apply(lambda module: [p.data.fill_(2.0) for p in module.parameters(recurse=False)])
        filled = {float(value.min()) for value in model.state_dict().values()}
        return alone.dtypes, model.module.inner.module.dtypes, len(names), filled

    b, f = torch.bfloat16, torch.float32
    assert pools(2)(run) == [((b, b), (b, f), 4, {2.0})] * 2


def test_summoned_on_one_rank_or_in_inference_mode(pools):
    def run():
        model = wrapped(double(6, 5, 4))
        x = share(0)
        with torch.no_grad():
            wanted = model(x)
        with model.summon_full_params(writeback=False, rank0_only=True):
            shapes = {type(value).__name__ for value in model.state_dict().values()}
        with torch.inference_mode(), model.summon_full_params():
            found = model(x)
            for p in model.parameters():
                p.mul_(2)
        with model.summon_full_params(writeback=False):
            doubled = sum(float(p.detach().abs().sum()) for p in model.parameters())
        state = sum(float(value.abs().sum()) for value in model.state_dict().values())
        return shapes, float((found - wanted).abs().max()), doubled - state

    whole, rows = pools(2)(run)
    assert whole == ({"Tensor"}, 0.0, 0.0) and rows == ({"DTensor"}, 0.0, 0.0)


def test_summoned_without_the_units_within_with_gradients_on_the_cpu(pools):
    def run():
        model, plain = pair(lambda: double(6, 5, 4))
        root = nn.Sequential(model, nn.Linear(4, 3, dtype=torch.float64))
        alone = nn.Sequential(plain, copy.deepcopy(root[1]))
        model = md.FullyShardedDataParallel(root)
        squares(model, dist.get_rank(), 0).backward()
        for each in range(2):
            (squares(alone, each, 0) / 2).backward()
        options = {"recurse": False, "with_grads": True, "offload_to_cpu": True}
        with model.summon_full_params(**options):
            kinds = [type(p.data).__name__ for p in model.parameters()]
            inner, last = model.module[0], model.module[1]
            apart_now = apart(
                {"weight": last.weight, "its gradient": last.weight.grad},
                {"weight": alone[1].weight, "its gradient": alone[1].weight.grad},
            )
            devices = {last.weight.device.type, last.weight.grad.device.type}
            last.weight.grad.zero_()
            assert all(isinstance(p, DTensor) for p in inner.parameters())
        left = float(model.module[1].weight.grad.full_tensor().abs().sum())
        return kinds.count("Tensor"), kinds.count("DTensor"), apart_now, devices, left

    assert pools(2)(run) == [(2, 4, {}, {"cpu"}, 0.0)] * 2


VIEWS = {
    "slice": lambda y: y[:, :],
    "view": lambda y: y.view(y.shape),
    "squeeze": lambda y: y[None].squeeze(0),
}


class GivesView(nn.Module):
    def __init__(self, view):
        super().__init__()
        self.layer, self.view = nn.Linear(6, 6), VIEWS.get(view, lambda y: y)

    def forward(self, x):
        return self.view(self.layer(x.tanh()))


class ChangedInPlace(nn.Module):
    """Blocks, between which their outputs are changed."""

    def __init__(self, view):
        super().__init__()
        self.blocks = nn.ModuleList([GivesView(view) for _ in range(3)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            x.mul_(2)
        return x


@pytest.mark.parametrize("view", [*VIEWS, "itself"])
@pytest.mark.parametrize("wrap", ["fully_shard", "FullyShardedDataParallel"])
def test_an_output_that_is_changed_in_place(pools, wrap, view):
    """Autograd would drop the hook by which parameters come back: torch raises as well."""

    def shard(model):
        if wrap != "fully_shard":
            return md.FullyShardedDataParallel(model, auto_wrap_policy=by_class(GivesView))
        for block in model.blocks:
            md.fully_shard(block)
        return md.fully_shard(model)

    def run():
        model, plain = pair(lambda: ChangedInPlace(view).double(), shard)
        try:
            squares(model, dist.get_rank(), 0).backward()
        except RuntimeError as error:
            return "is a view and its base" in str(error)
        for each in range(2):
            (squares(plain, each, 0) / 2).backward()
        ours, theirs = ([p.grad for p in m.parameters()] for m in (model, plain))
        pairs = zip(ours, theirs, strict=True)
        return max(md.parity.relative_difference(p.full_tensor(), q) for p, q in pairs) < 1e-12

    assert pools(2)(run) == [True] * 2


def test_a_copy_of_a_model_whose_user_says_what_to_prefetch(pools):
    def run():
        torch.manual_seed(0)
        model = double(6, 6, 6)
        for unit in (model[0], model[2], model):
            md.fully_shard(unit)
        model[0].set_modules_to_forward_prefetch([model[2]])
        model[2].set_modules_to_backward_prefetch([model[0]])
        copied = copy.deepcopy(model)
        for m in (model, copied):
            squares(m, dist.get_rank(), 0).backward()
        pairs = zip(model.parameters(), copied.parameters(), strict=True)
        return max(float((p.grad - q.grad).to_local().abs().max()) for p, q in pairs)

    assert pools(2)(run) == [0.0] * 2


@pytest.mark.parametrize(
    "precision", [{"param_dtype": torch.bfloat16}, {"buffer_dtype": torch.bfloat16}]
)
def test_a_batch_norm_of_two_names_keeps_its_precision(pools, precision):
    def run():
        block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model = md.FullyShardedDataParallel(
            nn.Sequential(block, block), mixed_precision=MixedPrecision(**precision)
        )
        model(torch.randn(3, 4)).float().sum().backward()
        return block[1].running_mean.dtype

    assert pools(2)(run) == [torch.float32] * 2


def units_of_two_meshes(rank):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    inner = md.FullyShardedDataParallel(nn.Linear(4, 4))
    model = md.FullyShardedDataParallel(nn.Sequential(inner, nn.Linear(4, 4)), device_mesh=mesh)
    model(torch.randn(3, 4)).pow(2).sum().backward()
    model.clip_grad_norm_(1e-3)


def told(fault):
    """On a rank: what `fault` raises."""
    try:
        fault(dist.get_rank())
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def backward_within(rank):
    model = wrapped(double(6, 4))
    with model.summon_full_params():
        model(share(rank)).sum().backward()


def step_within(rank):
    model = wrapped(double(6, 4))
    model(share(rank)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with model.summon_full_params():
        optimizer.step()


def summoned_twice(rank):
    model = wrapped(double(6, 4))
    with model.summon_full_params(), model.summon_full_params():
        pass


def summoned_on_one_rank(rank):
    with wrapped(double(6, 4)).summon_full_params(rank0_only=True):
        pass


def grad_of_pieces(rank):
    model = wrapped(double(6, 4))
    torch.autograd.grad(model(share(rank)).sum(), list(model.parameters()))


class BackwardInForward(Forces):
    def forward(self, x):
        self.energy(x).sum().backward()
        return self.last(x)


def saved_by_torch(rank):
    import io

    torch.save(wrapped(double(6, 4)), io.BytesIO())


def given(**options):
    return lambda rank: wrapped(double(6, 4), **options)


REFUSED = {
    "torch.save": (saved_by_torch, "save its state_dict()"),
    "NO_SHARD": (
        given(sharding_strategy=ShardingStrategy.NO_SHARD),
        "That is DistributedDataParallel",
    ),
    "HYBRID_SHARD": (
        given(sharding_strategy=ShardingStrategy.HYBRID_SHARD),
        "a device_mesh of two",
    ),
    "no strategy": (given(sharding_strategy="full"), "is a ShardingStrategy, not 'full'"),
    "BACKWARD_POST": (
        given(backward_prefetch=BackwardPrefetch.BACKWARD_POST),
        "take backward_prefetch=<BackwardPrefetch.BACKWARD_POST: 2>: here",
    ),
    "cpu_offload": (given(cpu_offload=True), "cpu_offload is a CPUOffload, not True"),
    "mixed_precision": (
        given(mixed_precision=torch.half),
        "is a MixedPrecision",
    ),
    "low precision gradients": (
        given(mixed_precision=MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)),
        "keep_low_precision_grads",
    ),
    "another device": (given(device_id=torch.device("meta")), "device_id is meta"),
    "ignored twice": (given(ignored_modules=[], ignored_states=[]), "not both"),
    "ignored names": (given(ignored_states=["0.weight"]), "modules or parameters, not str"),
    "unknown": (given(sharding=1), "has no argument sharding"),
    "backward with full parameters": (backward_within, "within summon_full_params"),
    "grad of pieces": (grad_of_pieces, "appears to not have been used in the graph"),
    "clipping on two meshes": (units_of_two_meshes, "must have the same mesh"),
    "summoned twice": (summoned_twice, "within summon_full_params"),
    "a step with full parameters": (step_within, "shards have changed within summon_full_params"),
    "summoned on one rank, written": (summoned_on_one_rank, "rank0_only"),
    "a method of torch's": (
        lambda rank: md.FullyShardedDataParallel.full_optim_state_dict(wrapped(double(6, 4))),
        "full_optim_state_dict: call optim_state_dict(optimizer)",
    ),
    "local states": (
        lambda rank: wrapped(double(6, 4)).set_state_dict_type(StateDictType.LOCAL_STATE_DICT),
        "SHARDED_STATE_DICT",
    ),
    "backward in forward": (
        lambda rank: md.FullyShardedDataParallel(BackwardInForward())(share(rank)),
        "within the forward pass",
    ),
}


METHODS = {
    "register_comm_hook",
    *("full_optim_state_dict", "sharded_optim_state_dict", "shard_full_optim_state_dict"),
    *("flatten_sharded_optim_state_dict", "scatter_full_optim_state_dict"),
    *("rekey_optim_state_dict", "get_state_dict_type"),
}
KINDS = ("RuntimeError", "TypeError", "ValueError", "RefusedError")


@pytest.mark.newer_torch("methods")
def test_each_method_of_torchs_classes_is_there_or_refused_with_a_reason(pools):
    def reasons():
        units = {
            torch.distributed.fsdp.FSDPModule: md.fully_shard(double(6, 4)),
            torch.distributed.fsdp.FullyShardedDataParallel: wrapped(double(6, 4)),
        }
        found = []
        for theirs, ours in units.items():
            for name in vars(theirs):
                if name.startswith("_") or hasattr(nn.Module, name):
                    continue
                try:
                    method = getattr(ours, name)
                    if isinstance(ours, md.FullyShardedDataParallel) and name in METHODS:
                        method()
                except RefusedError as error:
                    assert re.match(rf"{name}: \w.{{20}}", str(error)), error
                    found.append(name)
        return found

    (found,) = pools(1)(reasons)
    assert {"reset_iter_state", "set_symm_mem_for_comm", *METHODS} < set(found)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(pools, name):
    fault, words = REFUSED[name]
    for found in pools(2)(told, fault):
        assert found is not None and found[0] in KINDS and words in found[1], found
