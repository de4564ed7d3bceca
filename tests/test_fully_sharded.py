"""Lesson 9: ranks of which none has a whole model train as one process does. Held against one
process, against torch's fully_shard, and against the formulas, in bytes."""

import contextlib
import copy
import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from least import least_memory_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, MixedPrecision, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.utils.checkpoint import checkpoint

import minidist as md
from minidist.fully_sharded import NaiveFullySharded, by_class, by_size
from minidist.fully_sharded.fsdp_module import groups_in
from minidist.parity.snapshot import state_of

ADAM = torch.optim.Adam, {"lr": 1e-3}
ADAMW = torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}
SGD = torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}
LAYERS = by_class(nn.Linear)
wrapped = partial(md.FullyShardedDataParallel, auto_wrap_policy=LAYERS)


def flats_of(model):
    return [flat for group in groups_in(model) for flat in group.flats]


def net(*sizes, dtype=torch.float64):
    return md.zoo.mlp(*(sizes or (6, 5, 4, 3)), dtype=dtype)


def share(rank, step=0, n=5, dtype=torch.float64):
    """Examples of a rank, other ones on each rank and at each step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(n, 6, dtype=torch.float64, generator=generator).to(dtype)


def loss_of(output, step=0):
    """A loss that weighs every element differently."""
    weights = torch.arange(1, output.numel() + 1, dtype=output.dtype).view(output.shape) + step
    return (output * weights).pow(2).sum() / output.numel()


def apart(ours, plain, allowed=1e-12):
    found = [name for name in {**ours, **plain} if name not in ours or name not in plain]
    for name in ours.keys() & plain.keys():
        a, b = ours[name], plain[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            found.append(f"{name}: {a.shape} {a.dtype} and {b.shape} {b.dtype}")
        elif not md.parity.relative_difference(a, b) <= allowed:
            found.append(f"{name} differs by {md.parity.relative_difference(a, b):.1e}")
    return found


# ---- one process ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ADAM, ADAMW, SGD], ids=["Adam", "AdamW", "SGD"])
def test_parity_with_one_process(pools, kind):
    make = partial(kind[0], **kind[1])
    assert md.parity.check(wrapped, optimizer=make, ranks=pools(3)).largest <= 1e-12


@pytest.mark.parametrize("world_size", [1, 2, 4, 5])
def test_parity_of_any_number_of_ranks(pools, world_size):
    make = partial(torch.optim.Adam, lr=1e-3)
    md.parity.check(wrapped, optimizer=make, ranks=pools(world_size), steps=2)


def test_parity_of_a_transformer_and_of_batch_norm(pools):
    """The transformer's embedding and head are tied, in the root."""
    make = partial(torch.optim.Adam, lr=1e-3)
    check = partial(md.parity.check, optimizer=make, ranks=pools(2), steps=2)
    blocks = partial(md.FullyShardedDataParallel, auto_wrap_policy=by_class(md.zoo.Block))
    transformer = partial(md.zoo.Transformer, length=8, width=16, layers=2)
    check(blocks, model=transformer, data=md.zoo.text(8))
    check(partial(blocks, reshard_after_forward=False), model=transformer, data=md.zoo.text(8))
    check(md.FullyShardedDataParallel, model=md.zoo.convnet)


def test_the_naive_one(pools):
    """Trains as one process does; its full parameters are gathered again for the backward pass."""

    def run():
        torch.manual_seed(0)
        module = net(6, 5, 4)
        plain = copy.deepcopy(module)
        model = nn.Sequential(
            *[NaiveFullySharded(m) if len([*m.parameters()]) else m for m in module]
        )
        adam = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (model, plain)]
        rank, size = dist.get_rank(), dist.get_world_size()
        gathers = []
        for step in range(3):
            loss = loss_of(model(share(rank, step)))
            with md.measure.TrafficCounter() as traffic:
                loss.backward()
            calls = {"gloo": "broadcast", "shm": "all_gather"}[dist.get_backend()]
            gathers.append(traffic.calls[calls][0])
            for each in range(size):
                (loss_of(plain(share(each, step))) / size).backward()
            for optimizer in adam:
                optimizer.step()
                optimizer.zero_grad()
        held = sum(p.numel() for p in model.parameters())
        outputs = {"output": model(share(7))}, {"output": plain(share(7))}
        return apart(*outputs), held, min(gathers) > 0

    held = -(-(6 * 5 + 5) // 3) - (-(5 * 4 + 4) // 3)
    assert pools(3)(run) == [([], held, True)] * 3


def test_the_naive_one_gathers_once_forward_and_once_backward(pools):
    """However many of its weights autograd needs."""

    def run():
        model = NaiveFullySharded(net(4, 4, 4, 4))
        x = share(dist.get_rank(), 0)[:, :4].requires_grad_()
        with md.measure.TrafficCounter() as forward:
            loss = loss_of(model(x))
        with md.measure.TrafficCounter() as backward:
            loss.backward()
        name, each = {"gloo": ("broadcast", 3), "shm": ("all_gather", 1)}[dist.get_backend()]
        return [traffic.calls[name][0] / each for traffic in (forward, backward)]

    assert pools(3)(run) == [[1, 1]] * 3


def hybrid(module, **options):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    return wrapped(module, device_mesh=mesh, **options)


def test_parity_of_hybrid_sharding(pools):
    make = partial(torch.optim.Adam, lr=1e-3)
    assert md.parity.check(hybrid, optimizer=make, ranks=pools(4)).largest <= 1e-12


def test_every_rank_begins_with_what_rank_0_has(pools):
    def begun(wrap):
        torch.manual_seed(dist.get_rank())
        module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        module[1].running_mean += dist.get_rank()
        before = {name: value.clone() for name, value in module.state_dict().items()}
        return before, wrap(module).state_dict()

    for size, wrap in ((3, wrapped), (4, hybrid)):
        found = pools(size)(begun, wrap)
        first = found[0][0]
        assert apart(found[1][0], first) != []
        assert [apart(after, first, 0) for _, after in found] == [[]] * size


# ---- any loop ---------------------------------------------------------------------------------


def plainly(model, optimizer, batches, no_sync, clip, step):
    optimizer.zero_grad()
    for loss in (loss_of(model(batch), step) / len(batches) for batch in batches):
        loss.backward()
    optimizer.step()


def accumulate(model, optimizer, batches, no_sync, clip, step):
    optimizer.zero_grad()
    with no_sync():
        for scale in (1, 2):
            for batch in batches:
                (loss_of(model(batch * scale)) / len(batches)).backward()
    for batch in batches:
        (loss_of(model(batch)) / len(batches)).backward()
    optimizer.step()


def reduced_then_kept_then_reduced(model, optimizer, batches, no_sync, clip, step):
    optimizer.zero_grad()
    for block in (contextlib.nullcontext(), no_sync(), contextlib.nullcontext()):
        with block:
            for batch in batches:
                (loss_of(model(batch)) / len(batches)).backward()
    optimizer.step()


def forgotten(model, optimizer, batches, no_sync, clip, step, set_to_none=True):
    """What was kept without synchronization is zeroed: the whole of it must go."""
    with no_sync():
        for batch in batches:
            loss_of(model(batch)).backward()
    if set_to_none:
        plainly(model, optimizer, batches, no_sync, clip, step)
        return
    optimizer.zero_grad(set_to_none=False)
    for batch in batches:
        (loss_of(model(batch)) / len(batches)).backward()
    optimizer.step()


def several_backward_passes(model, optimizer, batches, no_sync, clip, step):
    model.zero_grad()
    for scale in (1, 2):
        for batch in batches:
            (loss_of(model(batch * scale)) / len(batches)).backward()
    optimizer.step()


def several_forward_passes(model, optimizer, batches, no_sync, clip, step):
    optimizer.zero_grad()
    for batch in batches:
        outputs = [model(batch * scale) for scale in (1, 2, 3)]
        with torch.no_grad():
            model(batch)
        model(batch)  # its output is not used
        (sum(loss_of(output) for output in (outputs[0], outputs[2])) / len(batches)).backward()
        (loss_of(outputs[1]) / len(batches)).backward()
    optimizer.step()


def one_backward_pass_for_both_kinds(model, optimizer, batches, no_sync, clip, step):
    """A forward pass outside of no_sync() is enough: what its backward pass has is reduced."""
    optimizer.zero_grad()
    for batch in batches:
        loss = loss_of(model(batch))
        with no_sync():
            loss = loss + loss_of(model(2 * batch))
        (loss / len(batches)).backward()
    optimizer.step()


def clipped(model, optimizer, batches, no_sync, clip, step, norm_type=2.0):
    optimizer.zero_grad()
    for batch in batches:
        (loss_of(model(batch)) / len(batches)).backward()
    model.last_norm = torch.as_tensor(clip(1e-2, norm_type)).double()
    optimizer.step()


def evaluated(model, optimizer, batches, no_sync, clip, step):
    """Without gradients, in eval mode, and under inference mode, between the steps."""
    model.eval()
    with torch.no_grad():
        before = model(batches[0])
    model.train()
    plainly(model, optimizer, batches, no_sync, clip, step)
    with torch.inference_mode():
        assert not torch.equal(before, model(batches[0]))


LOOPS = [plainly, accumulate, reduced_then_kept_then_reduced, forgotten]
LOOPS += [partial(forgotten, set_to_none=False), several_backward_passes, several_forward_passes]
LOOPS += [one_backward_pass_for_both_kinds, evaluated, clipped]
LOOPS += [partial(clipped, norm_type=float("inf")), partial(clipped, norm_type=1.0)]


def together(make, loop, kind=ADAM, wrap=wrapped, allowed=1e-12, grouped=None, freed=True):
    """On a rank: train sharded and alone, and return the first difference."""
    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    module = make()
    plain = copy.deepcopy(module)
    model = wrap(module)
    optimizer, alone = (
        kind[0](grouped(m) if grouped else m.parameters(), **kind[1]) for m in (model, plain)
    )

    def clip_plain(*args):
        return torch.nn.utils.clip_grad_norm_(plain.parameters(), *args)

    for step in range(3):
        loop(model, optimizer, [share(rank, step)], model.no_sync, model.clip_grad_norm_, step)
        shares = [share(rank, step) for rank in range(size)]
        loop(plain, alone, shares, contextlib.nullcontext, clip_plain, step)
        ours, wanted = state_of(model, optimizer), state_of(plain, alone)
        if hasattr(model, "last_norm"):
            ours["norm"], wanted["norm"] = model.last_norm, plain.last_norm
        if found := apart(ours, wanted, allowed):
            return f"step {step}: {found}"
        if freed and any(group.unsharded or group.readers for group in groups_in(model)):
            return f"step {step}: not all is freed"
    return None


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: getattr(loop, "__name__", "partial"))
def test_any_loop(pools, loop):
    assert pools(3)(together, net, loop) == [None] * 3


@pytest.mark.parametrize("loop", [accumulate, several_forward_passes, evaluated])
def test_any_loop_without_resharding_after_forward(pools, loop):
    run = partial(together, net, loop, wrap=partial(wrapped, reshard_after_forward=False))
    assert pools(2)(run, freed=False) == [None] * 2


def test_any_loop_without_prefetch(pools):
    run = partial(together, net, wrap=partial(wrapped, prefetch=False))
    for loop in (accumulate, several_forward_passes):
        assert pools(2)(run, loop) == [None] * 2


# ---- any model --------------------------------------------------------------------------------


class Odd(nn.Module):
    """Parameters of all layouts: transposed, channels last, with gaps, one number, empty; tied."""

    def __init__(self):
        super().__init__()

        def p(tensor):
            return nn.Parameter(tensor.double())

        self.transposed = p(torch.randn(3, 6).t())
        self.channels_last = p(torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last))
        self.gaps = p(torch.randn(6, 8)[:, ::2])
        self.number = p(torch.tensor([1.5]))
        self.empty = p(torch.empty(0, 3))
        self.several = nn.ParameterList([p(torch.randn(2)), p(torch.randn(1))])
        self.tied, self.first = net(6, 6), net(6, 6)
        self.tied[0].weight = self.first[0].weight

    def forward(self, x):
        x = self.tied(self.first(x)).tanh()
        x = (x @ self.transposed).sum() * self.channels_last.pow(2) * self.number
        x = x.sum() + self.gaps.pow(3).sum() * x.sum() + self.empty.sum()
        return x * sum(p.sum() for p in self.several)


class Mixed(nn.Module):
    """Parameters of two dtypes; some are frozen, one never has a gradient. A frozen layer stands
    before a trained one of the same unit."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = net(6, 4, 4), net(4, 4, dtype=torch.float32), net(4, 4, 3)
        self.unused = nn.Parameter(torch.ones(7, dtype=torch.float64))
        self.a[0].bias.requires_grad_(False)
        self.c[0].requires_grad_(False)

    def forward(self, x):
        return self.c(self.b(self.a(x).float()).double())


class Sometimes(nn.Module):
    """Half of it is used for a part of the examples: on some ranks only."""

    def __init__(self):
        super().__init__()
        self.a, self.b = net(6, 3), net(6, 3)

    def forward(self, x):
        return self.a(x) + self.b(x) if (x[0, 0] * 1000).long() % 2 else self.a(x)


class Twice(nn.Module):
    """One layer, used three times; another one by two names."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = net(6, 6)[0], net(6, 3)[0]
        self.again = self.layer

    def forward(self, x):
        return self.last(self.again(self.layer(self.layer(x).relu()) + x))


class Recurrent(nn.Module):
    """An LSTM, which has its parameters in a list as well."""

    def __init__(self):
        super().__init__()
        self.lstm, self.last = nn.LSTM(6, 4, dtype=torch.float64), net(4, 3)

    def forward(self, x):
        return self.last(self.lstm(x)[0])


class Kept(nn.Module):
    """Checkpoints: of layers within a unit, of units, or of all."""

    def __init__(self, what, reentrant):
        super().__init__()
        self.units = nn.Sequential(*[nn.Sequential(net(6, 6), nn.Tanh(), net(6, 6)) for _ in "123"])
        self.last, self.what, self.reentrant = net(6, 3), what, reentrant

    def forward(self, x):
        again = partial(checkpoint, use_reentrant=self.reentrant)
        x = x.clone().requires_grad_()
        for unit in self.units:
            x = again(unit, x) if self.what == "units" else unit(x)
        if self.what == "all":
            return again(self.last, again(self.units, x))
        return self.last(x)


class Inner(nn.Module):
    """Its two layers are computed again, one by one."""

    def __init__(self, reentrant):
        super().__init__()
        self.a, self.b, self.c, self.reentrant = net(6, 6), net(6, 6), net(6, 6), reentrant

    def forward(self, x):
        again = partial(checkpoint, use_reentrant=self.reentrant)
        return self.c(again(self.b, again(self.a, x))).tanh()


class Inside(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.last = net(6, 6), net(6, 3)
        self.blocks = nn.Sequential(Inner(reentrant), Inner(reentrant))

    def forward(self, x):
        return self.last(self.blocks(self.first(x)))


def around():
    module = net(6, 6)
    return nn.Sequential(module, nn.Tanh(), module)


def by_hand(module):
    """The first and the last are one unit; only the first is the wrapper."""
    module[0] = md.FullyShardedDataParallel(module[0])
    return md.FullyShardedDataParallel(module)


SEQUENCES = by_class(nn.Sequential)
MODELS = {
    "layouts": (Odd, md.FullyShardedDataParallel, 1e-11),
    "dtypes, frozen, unused": (Mixed, md.FullyShardedDataParallel, 1e-5),
    "frozen in units": (Mixed, partial(wrapped, auto_wrap_policy=SEQUENCES), 1e-5),
    "sometimes": (Sometimes, md.FullyShardedDataParallel, 1e-12),
    "twice": (Twice, wrapped, 1e-12),
    "twice, in one unit": (Twice, md.FullyShardedDataParallel, 1e-12),
    "recurrent": (Recurrent, partial(wrapped, auto_wrap_policy=by_class(nn.LSTM)), 1e-12),
    "a unit twice": (around, by_hand, 1e-12),
    **{
        f"checkpoints of {what}, {reentrant}": (
            partial(Kept, what, reentrant),
            partial(wrapped, auto_wrap_policy=by_size(70)),
            1e-12,
        )
        for what in ("units", "all")
        for reentrant in (False, True)
    },
    **{
        f"checkpoints in units, {reentrant}": (
            partial(Inside, reentrant),
            partial(wrapped, auto_wrap_policy=by_class(Inner)),
            1e-12,
        )
        for reentrant in (False, True)
    },
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MODELS)
def test_any_model(pools, name):
    make, wrap, allowed = MODELS[name]
    for loop in (plainly, accumulate):
        assert pools(2)(together, make, loop, ADAMW, wrap, allowed) == [None] * 2


# ---- bytes and traffic ------------------------------------------------------------------------


def measured(sizes=(64, 32, 10), steps=2, **options):
    model = wrapped(net(*sizes, dtype=torch.float32), **options)
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(4, sizes[0])

    def step():
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(steps):
        step()
    memory, traffic = least_memory_of(step, model, optimizer)
    pieces = len(list(model.parameters()))
    return memory.after("backward"), memory.peak_of, traffic.calls, pieces


@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_that_a_rank_holds(pools, world_size):
    """16Ψ/N: the rows of parameters, gradients and two states. The rows of a parameter are padded
    so that all ranks have as many."""
    shapes = [(32, 64), (32, 1), (10, 32), (10, 1)]
    shard = sum(-(-rows // world_size) * width for rows, width in shapes)
    for rank, (live, _, _, pieces) in enumerate(pools(world_size)(measured)):
        own = 0  # without the padding
        for rows, width in shapes:
            each = -(-rows // world_size)
            own += max(0, min(each, rows - rank * each)) * width
        assert live["parameters"] == live["gradients"] == 4 * shard
        assert live["optimizer states"] == 8 * own + 4 * pieces  # and a count of steps each


@pytest.mark.parametrize("prefetch", [False, True])
def test_the_whole_model_is_never_there(pools, prefetch):
    """At most the shards, the unit that computes and the one that comes next; of gradients, those
    of a unit that are made, and those of one that travel."""
    sizes = [(a, b) for a, b in zip((64, 80, 64, 96, 64), (80, 64, 96, 64, 32), strict=True)]
    units = [a * b + b for a, b in sizes]
    run = partial(measured, (64, 80, 64, 96, 64, 32), prefetch=prefetch)
    for _, peak, calls, _ in pools(2)(run):
        two = sum(sorted(units)[-2:])
        assert peak["parameters"] == 4 * (sum(units) // 2 + (two if prefetch else max(units)))
        # Gloo's thread may give back one message more late.
        most = sum(sorted(units)[-3:]) if "broadcast" in calls else two
        assert max(units) <= peak["communication buffers"] / 4 <= most


class Seen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, see):
        see("forward")
        ctx.see = see
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.see("backward")
        return gradient, None


class Watched(nn.Linear):
    def forward(self, x):
        return Seen.apply(super().forward(x), self.see)


@pytest.mark.parametrize("prefetch", [True, False])
def test_the_next_unit_is_gathered_while_one_computes(pools, prefetch):
    def there():
        model = nn.Sequential(*[Watched(6, 6) for _ in range(4)])
        model = wrapped(model, auto_wrap_policy=by_class(Watched), prefetch=prefetch)
        units, found = list(model.module), []
        for unit in units:
            unit.see = lambda when: found.append(
                (when, [i for i, each in enumerate(units) if each.fsdp_group.unsharded])
            )
        for _ in range(2):  # the first finds out the order
            found.clear()
            model(share(0, dtype=torch.float32)).sum().backward()
        return found

    ahead = [[0, 1], [1, 2], [2, 3], [3]], [[2, 3], [1, 2], [0, 1], [0]]
    alone = [[0], [1], [2], [3]], [[3], [2], [1], [0]]
    forward, backward = ahead if prefetch else alone
    wanted = [("forward", each) for each in forward] + [("backward", each) for each in backward]
    assert pools(2)(there) == [wanted] * 2


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, second):
        x = self.first(x)
        return self.second(x) if second else x


def test_what_was_gathered_ahead_for_nothing_is_freed(pools):
    def there():
        model = wrapped(Branches())
        found = []
        for second in (True, False):
            model(share(0, dtype=torch.float32), second)
            found.append([f.full.untyped_storage().nbytes() for f in flats_of(model)])
        return found

    for found in pools(2)(there):
        assert not any(itertools.chain(*found)), found


@pytest.mark.parametrize("reshard", [True, False])
def test_traffic(pools, reshard):
    """3Ψ(N-1)/N: two all_gathers and a reduce_scatter of Ψ; gloo's are calls for each shard."""

    def counted():
        return dist.get_backend(), *measured(reshard_after_forward=reshard)

    nbytes, gathers, flags = 4 * (64 * 32 + 32 + 32 * 10 + 10), 1 + reshard, 4
    for backend, _, _, calls, _ in pools(2)(counted):
        names = {"gloo": ("broadcast", "reduce"), "shm": ("all_gather", "reduce_scatter")}
        each = 2 if backend == "gloo" else 1
        gather, reduce = names[backend]
        assert calls == {
            gather: (2 * each * gathers, gathers * nbytes),
            reduce: (2 * each, nbytes),
            "all_reduce": (1, flags),  # which parameters have a gradient, a byte each
        }


class Nested(nn.Module):
    """A unit with a unit within it, before whose backward pass its own begins."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = net(6, 6, dtype=torch.float32), nn.Linear(6, 6)

    def forward(self, x):
        return x + self.outer(self.inner(x)).tanh()


def test_units_within_units_are_gathered_no_more_often(pools):
    """A gather ahead is of what comes next, in backward too: else it was for nothing."""

    def gathers():
        module = nn.Sequential(Nested(), Nested(), Nested(), nn.Linear(6, 3))
        model = md.FullyShardedDataParallel(module, auto_wrap_policy=by_class(Nested, nn.Linear))
        for _ in range(3):
            with md.measure.TrafficCounter() as traffic:
                model(share(0, dtype=torch.float32)).sum().backward()
        return sum(
            nbytes
            for name, (_, nbytes) in traffic.calls.items()
            if "gather" in name or "broadcast" in name
        )

    nbytes = 4 * (6 * 42 + 4 * 7)  # of the last layer's three rows, padded
    assert pools(2)(gathers) == [2 * nbytes] * 2


# ---- torch's own ------------------------------------------------------------------------------


def test_the_same_as_torchs_own(pools):
    def both():
        module = net(dtype=torch.float32)
        theirs = copy.deepcopy(module)
        mesh = init_device_mesh("cpu", (2,))
        for layer in theirs:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(theirs, mesh=mesh)
        model = wrapped(module)
        optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (model, theirs)]
        for step in range(4):
            x = share(dist.get_rank(), step, dtype=torch.float32)
            for m, optimizer in zip((model, theirs), optimizers, strict=True):
                plainly(m, optimizer, [x], None, None, step)
        wanted = theirs.state_dict()
        found = apart(model.state_dict(), {k: v.full_tensor() for k, v in wanted.items()}, 1e-6)
        model.load_state_dict(wanted)  # of DTensors, to the bit
        with model.state_dict_type(StateDictType.SHARDED_STATE_DICT):
            ours = model.state_dict()
        theirs.load_state_dict(ours)
        for name, value in wanted.items():
            if not torch.equal(value.to_local(), ours[name].to_local()):
                found.append(name)
        return found

    assert pools(2)(both) == [[]] * 2


@pytest.mark.parametrize(
    "policy, expected",
    [
        (by_class(nn.Linear), ["module.0.0", "module.1.0.0", "module.2.0"]),
        (ModuleWrapPolicy({nn.Linear}), ["module.0.0", "module.1.0.0", "module.2.0"]),
        (by_size(20), ["module.0.0", "module.1.0.0"]),
        (partial(size_based_auto_wrap_policy, min_num_params=20), ["module.0.0", "module.1.0.0"]),
        (None, ["module.0.module", "module.1.0.0.module"]),
    ],
    ids=["class", "torch's class", "size", "torch's size", "by hand"],
)
def test_what_is_wrapped(pools, policy, expected):
    def units():
        module = nn.Sequential(net(6, 5), nn.ModuleList([net(5, 4)]), net(4, 2))
        if policy is None:
            module[0] = md.FullyShardedDataParallel(module[0])
            module[1][0][0] = md.FullyShardedDataParallel(module[1][0][0])
        model = md.FullyShardedDataParallel(module, auto_wrap_policy=policy)
        assert [name for name, _ in model.named_parameters()] == list(model.state_dict())
        return [name for name, each in model.named_modules() if "fsdp_group" in vars(each)]

    assert pools(2)(units) == [["module", *expected]] * 2


# ---- what a wrapper does ----------------------------------------------------------------------


def test_whole_parameters_for_a_moment(pools):
    def summoned():
        module = net()
        plain = copy.deepcopy(module)
        model = wrapped(module)
        with model.summon_full_params():
            found = apart(dict(model.named_parameters()), dict(plain.named_parameters()), 0)
            for p in model.parameters():
                p.data.mul_(2)
        with model.summon_full_params(writeback=False):
            for p in model.parameters():
                p.data.mul_(2)
        wanted = {name: 2 * value for name, value in plain.state_dict().items()}
        return found + apart(model.state_dict(), wanted, 0)

    assert pools(2)(summoned) == [[]] * 2


def test_mixed_precision(pools):
    """Compute and communication in bfloat16, shards and sums in float32."""

    def mixed():
        torch.manual_seed(0)
        policy = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
        module = nn.Sequential(*net(6, 8, dtype=torch.float32), nn.BatchNorm1d(8), nn.Linear(8, 3))
        plain = copy.deepcopy(module)
        model = wrapped(module, mixed_precision=policy)
        optimizer, alone = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, plain))
        x = share(0, dtype=torch.float32)  # the same on all ranks, for the batch norm
        dtypes = set()
        model.module[-1].register_forward_hook(lambda _, x, y: dtypes.update([x[0].dtype, y.dtype]))
        with md.measure.TrafficCounter() as traffic:
            for m, o in ((model, optimizer), (plain, alone)):
                loss_of(m(x).float()).backward()
                o.step()
        assert dtypes == {torch.bfloat16}
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        assert module[1].running_mean.dtype == torch.float32  # as torch keeps batch norms
        parameters = [(n, p) for n, p in plain.named_parameters()]
        wholes = [flat.full for flat in flats_of(model)]
        assert {w.dtype for w in wholes} == {torch.bfloat16, torch.float32}
        gathered = 2 * sum(w.numel() * w.dtype.itemsize for w in wholes)  # forward and backward
        reduced = sum(4 * w.numel() for w in wholes)
        sent = {name: nbytes for name, (_, nbytes) in traffic.calls.items()}
        sizes = sorted(v for k, v in sent.items() if k != "all_reduce")
        found = apart(
            {n: p.detach() for n, p in parameters},
            {n: v for n, v in model.state_dict().items() if n in dict(parameters)},
            0.05,
        )
        return found, sizes == [reduced, gathered]

    assert pools(2)(mixed) == [([], True)] * 2


class Plain(nn.Linear):
    pass


class Table(nn.Module):
    """Parameters and a buffer of its own, with tied layers."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.b.weight = self.a.weight
        self.table = nn.Parameter(torch.empty(3, 6))
        self.register_buffer("scale", torch.empty(1))

    def reset_parameters(self):
        nn.init.normal_(self.table)
        self.scale.fill_(2)

    def forward(self, x):
        return self.b(self.a(x)) @ self.table.t() * self.scale


def test_a_model_that_no_rank_could_hold(pools):
    def born():
        torch.manual_seed(dist.get_rank())
        peaks = []
        for _ in range(5):  # gloo's thread may give back what it has sent late
            with torch.device("meta"):
                widths = 6, 128, 128, 128, 6
                layers = [Plain(a, b) for a, b in zip(widths, widths[1:], strict=False)]
                module = nn.Sequential(*layers, Table())
            units = by_class(Plain, Table)
            with md.measure.MemoryTracker(module) as memory:
                model = md.FullyShardedDataParallel(module, auto_wrap_policy=units)
            peaks.append(memory.peak)
        held = sum(flat.shard.nbytes for flat in flats_of(model))
        loss_of(model(share(dist.get_rank(), dtype=torch.float32))).backward()
        state = model.state_dict()
        assert all(value.isfinite().all() for value in state.values())
        assert state["4.scale"] == 2 and torch.equal(state["4.a.weight"], state["4.b.weight"])
        assert len(list(model.parameters())) == 12  # one is tied
        states = [None] * 2
        dist.all_gather_object(states, state)
        return apart(*states, 0), held, min(peaks)

    sizes = [7 * 128, 129 * 128, 129 * 128, 129 * 6, 36 + 12 + 4 * 6]  # three rows, padded
    for found, held, peak in pools(2)(born):
        assert found == []
        assert held == 4 * sum(sizes) // 2
        # Beside the shards one unit, which is there twice while it is laid out.
        assert peak <= held + 2 * 4 * max(sizes)


def test_initial_values_for_what_is_on_meta(pools):
    def init(module):
        if hasattr(module, "weight"):
            module.to_empty(device="cpu", recurse=False)
            nn.init.constant_(module.weight, 3)
            nn.init.constant_(module.bias, 4)

    def born():
        with torch.device("meta"):
            module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        state = wrapped(module, param_init_fn=init).state_dict()
        return {name.split(".")[1]: set(value.flatten().tolist()) for name, value in state.items()}

    assert pools(2)(born) == [{"weight": {3}, "bias": {4}}] * 2


def test_initial_values_that_one_rank_cannot_make(pools):
    """All ranks hear of it; the others do not wait for that one."""

    def init(module):
        if dist.get_rank() == 1:
            raise OSError("no such file: values.pt")
        module.to_empty(device="cpu", recurse=False)

    def born():
        with torch.device("meta"):
            module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        with pytest.raises(RuntimeError, match="rank 1.*no such file: values.pt"):
            wrapped(module, param_init_fn=init)

    assert pools(2)(born) == [None] * 2


def test_offloaded_parameters(pools):
    """Here the CPU computes, too: nothing must change."""
    wrap = partial(wrapped, cpu_offload=CPUOffload(offload_params=True))
    for loop in (accumulate, clipped):
        assert pools(2)(together, net, loop, wrap=wrap) == [None] * 2


def by_name(model):
    """Two groups, each with options of its own; by the names of the bare module."""
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if not name.endswith("bias")], "lr": 0.01},
        {"params": [p for name, p in named if name.endswith("bias")], "weight_decay": 0.3},
    ]


def test_groups_with_options_of_their_own(pools):
    assert pools(2)(together, net, plainly, ADAMW, grouped=by_name) == [None] * 2


def test_accumulation_and_clipping_with_hybrid_sharding(pools):
    for loop in (accumulate, clipped):
        assert pools(4)(together, net, loop, wrap=hybrid) == [None] * 4


class Fails(nn.Module):
    """Forward or backward pass fail where they are told to."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.fails = net(6, 6), net(6, 3), None

    def forward(self, x):
        x = self.a(x)
        if self.fails == "forward":
            raise KeyError("forward")
        if self.fails == "backward":
            x.register_hook(lambda _: {}["backward"])
        return self.b(x)


@pytest.mark.parametrize("where", ["forward", "backward", "loss"])
def test_training_goes_on_after_a_failure(pools, where):
    def failing(model, optimizer, batches, no_sync, clip, step):
        module = getattr(model, "module", model)
        module.fails = where
        with raises(KeyError):
            for batch in batches:
                loss = loss_of(model(batch))
                if where == "loss":
                    raise KeyError
                loss.backward()
        module.fails = None
        plainly(model, optimizer, batches, no_sync, clip, step)

    assert pools(2)(together, Fails, failing) == [None] * 2


@contextlib.contextmanager
def raises(kind):
    try:
        yield
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


# ---- checkpoints ------------------------------------------------------------------------------


def some_steps(steps, folder=None, load=None, whole=None, wrap=wrapped, make=net):
    """Train, from a checkpoint if there is one. Writes one, and returns a whole one."""
    torch.manual_seed(0)
    model = wrap(make())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    if load:
        with md.saving.Checkpoints(load) as checkpoints:
            assert checkpoints.load(model=model, optimizer=optimizer) == 1
    if whole:
        model.load_state_dict(whole[0])
        model.load_optim_state_dict(optimizer, whole[1])
    for step in steps:
        plainly(model, optimizer, [share(0, step)], None, None, step)
    if folder:
        with md.saving.Checkpoints(folder) as checkpoints:
            checkpoints.save(1, model=model, optimizer=optimizer)
    return copy.deepcopy((dict(model.state_dict()), model.optim_state_dict(optimizer)))


def alone_for(steps, state=None, make=net):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    if state is not None:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
    for step in steps:
        plainly(model, optimizer, [share(0, step)], None, None, step)
    return model.state_dict(), optimizer.state_dict()


def differ(a, b):
    """Between two checkpoints."""
    flat = [
        {**m, **{f"{i}.{k}": v for i, s in o["state"].items() for k, v in s.items()}}
        for m, o in (a, b)
    ]
    return apart(*flat, 1e-11)


@pytest.mark.parametrize("make, wrap", [(net, wrapped), (Odd, md.FullyShardedDataParallel)])
def test_saved_whole_at_4_ranks_loaded_at_any_number_and_without_minidist(pools, make, wrap):
    run = partial(some_steps, make=make, wrap=wrap)
    saved = pools(4)(run, range(3))[0]
    wanted = alone_for(range(6), make=make)
    assert differ(pools(3)(run, range(3, 6), whole=saved)[0], wanted) == []
    assert differ(alone_for(range(3, 6), saved, make), wanted) == []
    plain = alone_for(range(3), make=make)
    assert differ(pools(2)(run, range(3, 6), whole=plain)[0], wanted) == []


@pytest.mark.parametrize("make, wrap", [(Twice, wrapped), (Odd, md.FullyShardedDataParallel)])
def test_saved_in_shards_at_4_ranks_loaded_at_any_number(pools, tmp_path, make, wrap):
    wanted = alone_for(range(6), make=make)
    pools(4)(some_steps, range(3), folder=tmp_path, make=make, wrap=wrap)
    run = partial(some_steps, range(3, 6), load=tmp_path, make=make)  # in one unit
    for size in (2, 3):
        assert differ(pools(size)(run, wrap=md.FullyShardedDataParallel)[0], wanted) == []


def test_saved_with_hybrid_sharding_and_buffers(pools, tmp_path):
    def normed():  # before the layers: a bias before it has gradients of mere rounding errors
        return nn.Sequential(nn.BatchNorm1d(6, dtype=torch.float64), net(6, 4))

    wanted = alone_for(range(4), make=normed)
    pools(4)(some_steps, range(2), folder=tmp_path, wrap=hybrid, make=normed)
    assert differ(pools(2)(some_steps, range(2, 4), load=tmp_path, make=normed)[0], wanted) == []


# ---- mistakes ---------------------------------------------------------------------------------


def fails_with(fault):
    """On a rank: what `fault` raises."""
    try:
        fault(dist.get_rank())
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def other_layers_by_hand(rank):
    module = net(4, 4, 4)
    module[2 * rank] = md.FullyShardedDataParallel(module[2 * rank])
    md.FullyShardedDataParallel(module)


def outside(rank):
    model = wrapped(net())
    model(share(rank))
    model.module[0](share(rank))


def optimizer_before(rank, zero=False):
    module = net()
    optimizer = torch.optim.Adam(module.parameters())
    model = wrapped(module)
    model(share(rank)).sum().backward()
    (optimizer.zero_grad if zero else optimizer.step)()


def tied_between_units(rank):
    module = net(6, 6, 6)
    module[2].weight = module[0].weight
    if rank is None:
        module[0] = md.FullyShardedDataParallel(module[0])
        md.FullyShardedDataParallel(module)
    wrapped(module)


def around_ddp(rank):
    md.FullyShardedDataParallel(nn.Sequential(md.DistributedDataParallel(net())))


def around_stages(rank):
    md.FullyShardedDataParallel(md.Pipeline(nn.Sequential(net(), net()), 2))


def around_a_mesh(rank):
    whole = md.mixed.mesh(data=dist.get_world_size())
    md.FullyShardedDataParallel(md.mixed.MixedParallel(nn.Sequential(net()), whole, 2))


def stepped_between(rank):
    model = wrapped(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(share(rank)).sum()
    model(share(rank)).sum().backward()
    optimizer.step()
    loss.backward()


def changed(change):
    def train(rank):
        model = wrapped(net())
        model(share(rank)).sum().backward()
        change(model.module)
        with torch.no_grad():
            model(share(rank))
        model(share(rank))

    return train


def replace_data(module):
    for p in module.parameters():
        p.data = p.data.clone()


def on_meta(rank):
    with torch.device("meta"):
        module = Table()
    del Table.reset_parameters
    md.FullyShardedDataParallel(module)


def load(*sizes, **options):
    return lambda rank: wrapped(net()).load_state_dict(net(*sizes).state_dict(), **options)


def double_backward(rank):
    x = share(rank).requires_grad_()
    (g,) = torch.autograd.grad(wrapped(net())(x).pow(2).sum(), x, create_graph=True)
    g.sum().backward()


def sparse(rank):
    module = nn.Sequential(nn.Embedding(4, 3, sparse=True))
    md.FullyShardedDataParallel(module)(torch.tensor([rank])).sum().backward()


MISTAKES = {
    "other models": (lambda rank: wrapped(net(6, 5 + rank, 3)), "ValueError", "different models"),
    "other policies": (
        lambda rank: wrapped(net(), auto_wrap_policy=LAYERS if rank else by_size(30)),
        "ValueError",
        "different models",
    ),
    "one has no policy": (
        lambda rank: wrapped(net(), auto_wrap_policy=LAYERS if rank else None),
        "ValueError",
        "unit 0",
    ),
    "a policy that fails": (
        lambda rank: wrapped(net(), auto_wrap_policy=lambda **_: {}[rank]),
        "RuntimeError",
        "rank 0: KeyError",
    ),
    "other layers by hand": (other_layers_by_hand, "ValueError", "unit 0.module, sharded already"),
    "outside of the root": (outside, "RuntimeError", "outside of the forward pass of its root"),
    "optimizer before": (optimizer_before, "RuntimeError", "optimizer after sharding"),
    "optimizer before, zero_grad": (
        partial(optimizer_before, zero=True),
        "RuntimeError",
        "optimizer after sharding",
    ),
    "tied": (tied_between_units, "ValueError", "must be in the same unit"),
    "tied, by hand": (
        lambda rank: tied_between_units(None),
        "ValueError",
        "must be in the same unit",
    ),
    "around DDP": (around_ddp, "ValueError", "0 is a DistributedDataParallel"),
    "around stages": (around_stages, "ValueError", "the module is a Pipeline, which sees to its"),
    "around a mesh": (around_a_mesh, "ValueError", "the module is a MixedParallel, which sees to"),
    "stepped between": (stepped_between, "RuntimeError", "changed since the forward pass"),
    "added": (
        changed(lambda m: m.append(nn.Linear(3, 3).double())),
        "RuntimeError",
        "parameter 5.weight has been added since it was wrapped",
    ),
    "replaced": (
        changed(lambda m: setattr(m[0], "bias", nn.Parameter(m[0].bias.detach().clone()))),
        "RuntimeError",
        "parameter 0.bias has been replaced since it was wrapped",
    ),
    "replaced .data": (
        changed(replace_data),
        "RuntimeError",
        "has been given other memory, by p.data",
    ),
    "double backward": (double_backward, "RuntimeError", "create_graph=True"),
    "sparse": (sparse, "RuntimeError", "sparse=False"),
    "meta": (on_meta, "ValueError", "pass param_init_fn"),
    "another shape": (load(6, 4, 4, 3), "RuntimeError", "size mismatch for 0.weight"),
    "missing": (load(6, 5, 4), "RuntimeError", 'Missing key(s) in state_dict: "4.weight"'),
    "more": (load(6, 5, 4, 3, 2), "RuntimeError", 'Unexpected key(s) in state_dict: "6.weight"'),
    "twice": (lambda rank: wrapped(wrapped(net()).module), "ValueError", "is sharded already"),
    "a number": (
        lambda rank: md.FullyShardedDataParallel(nn.ParameterList([torch.tensor(1.0)])),
        "ValueError",
        "parameter 0 has no dimension, and so no rows to divide",
    ),
    "a mesh of three axes": (
        lambda rank: wrapped(net(), device_mesh=init_device_mesh("cpu", (1, 1, 2))),
        "ValueError",
        "at most 2 axes",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told_on_every_rank(pools, name):
    fault, kind, words = MISTAKES[name]
    for told in pools(2)(fails_with, fault):
        assert told is not None and told[0] == kind and words in told[1], told


def test_no_process_group():
    with pytest.raises(RuntimeError, match="there is none"):
        md.FullyShardedDataParallel(net())
