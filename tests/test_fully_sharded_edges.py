"""Fully sharded training at its edges: what autograd does not show, ranks that differ, loops of
other scripts. Held against one process. Lesson: fully_sharded"""

import contextlib
import copy
import gc
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import minidist as md
from minidist.fully_sharded import by_class

LAYERS = by_class(nn.Linear)
wrapped = partial(md.FullyShardedDataParallel, auto_wrap_policy=LAYERS)


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


def trained(make, wrap, loss_of, steps=2, **options):
    """On a rank: some steps, sharded and in one process. What differs, and the bytes not freed.
    `loss_of(model, rank, step)` is the loss of this rank's share."""
    torch.manual_seed(0)
    module = make()
    plain = copy.deepcopy(module)
    model = wrap(module, **options)
    ours, alone = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain))
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(steps):
        for m, optimizer, ranks in ((model, ours, [rank]), (plain, alone, range(size))):
            optimizer.zero_grad()
            for each in ranks:
                (loss_of(m, each, step) / len(ranks)).backward()
            optimizer.step()
    wholes = [flat.whole.untyped_storage().nbytes() for flat in model._schedule.flats]
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
        assert told is not None and "FullParameters" in told, told


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
            return [live_after(steps) for steps in (1, 3, 6)]
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
    return md.FullyShardedDataParallel(module, mesh=mesh, **options)


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


@pytest.mark.parametrize(
    "use", [lambda rank, k: rank == k % 2, lambda rank, k: rank == 0 and k == 0]
)
def test_what_one_rank_lacks_within_no_sync(pools, use):
    """In a pass that is kept, and not in the one that is reduced."""

    def run():
        torch.manual_seed(0)
        module = Prompted("layer")
        plain = copy.deepcopy(module)
        model = md.FullyShardedDataParallel(module, auto_wrap_policy=by_class(nn.Linear, Prompt))
        rank, size = dist.get_rank(), dist.get_world_size()
        for k in range(3):
            with model.no_sync() if k < 2 else contextlib.nullcontext():
                model(share(rank, k), use(rank, k)).pow(2).mean().backward()
            for each in range(size):
                (plain(share(each, k), use(each, k)).pow(2).mean() / size).backward()
        sgd = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
        for optimizer in sgd:
            optimizer.step()
        return apart(model.state_dict(), plain.state_dict())

    assert pools(2)(run) == [{}] * 2


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
        torch.manual_seed(0)
        module = Generates()
        plain = copy.deepcopy(module)
        model = md.FullyShardedDataParallel(module, auto_wrap_policy=policy)
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


def scaled_in_no_sync(rank, replace=False):
    model = wrapped(double(6, 4))
    with model.no_sync():
        model(share(rank)).sum().backward()
    for p in model.parameters():
        if replace:
            p.grad = p.grad * 0.5
        else:
            p.grad *= 0.5
    model(share(rank)).sum().backward()


def clipped_in_no_sync(rank):
    model = wrapped(double(6, 4))
    with model.no_sync():
        model(share(rank)).sum().backward()
        model.clip_grad_norm_(1.0)


def clipped_by_torch(rank, foreach=None):
    model = wrapped(double(6, 4))
    model(share(rank)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)


def clipped_by_hand(rank):
    model = wrapped(double(6, 4))
    model(share(rank)).sum().backward()
    torch.stack([p.grad.detach().norm() for p in model.parameters()]).norm()


def grad_of_pieces(rank):
    model = wrapped(double(6, 4))
    torch.autograd.grad(model(share(rank)).sum(), list(model.parameters()))


class BackwardInForward(Forces):
    def forward(self, x):
        self.energy(x).sum().backward()
        return self.last(x)


REFUSED = {
    "backward with full parameters": (backward_within, "within summon_full_params"),
    "scaled in no_sync": (scaled_in_no_sync, "was changed after a pass within no_sync()"),
    "replaced in no_sync": (
        partial(scaled_in_no_sync, replace=True),
        "was changed after a pass within no_sync()",
    ),
    "clipped in no_sync": (clipped_in_no_sync, "after no_sync()"),
    "clipped by torch": (clipped_by_torch, "clip_grad_norm_ of the FullyShardedDataParallel"),
    "clipped by torch, foreach": (
        partial(clipped_by_torch, foreach=True),
        "clip_grad_norm_ of the FullyShardedDataParallel",
    ),
    "clipped by hand": (clipped_by_hand, "clip_grad_norm_ of the FullyShardedDataParallel"),
    "grad of pieces": (grad_of_pieces, "call backward()"),
    "backward in forward": (
        lambda rank: md.FullyShardedDataParallel(BackwardInForward())(share(rank)),
        "within the forward pass",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(pools, name):
    fault, words = REFUSED[name]
    for found in pools(2)(told, fault):
        assert found is not None and found[0] == "RuntimeError" and words in found[1], found
