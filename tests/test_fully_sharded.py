"""Lesson 9: ranks of which none has a whole model train as one process does. Held against one
process, against torch's fully_shard, and against the formulas, in bytes."""

import contextlib
import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from fsdp_model import apart, bytes_gathered, held, is_sharded, loss_of, pair, share, told, weighed
from least import least_memory_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

import minidist as md
from minidist.fully_sharded import FSDPModule, NaiveFullySharded, by_class, by_size

LAYERS = by_class(nn.Linear)
wrapped = partial(md.FullyShardedDataParallel, auto_wrap_policy=LAYERS)
as_one = md.FullyShardedDataParallel  # one unit


def hybrid(module, **options):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    return wrapped(module, device_mesh=mesh, **options)


def net(*sizes, dtype=torch.float64):
    return md.zoo.mlp(*(sizes or (6, 5, 4, 3)), dtype=dtype)


def floats(rank):
    return share(rank).float()


def units_of(model):
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


# ---- one process ------------------------------------------------------------------------------


def test_parity_with_one_process(pools):
    check = partial(md.parity.check, optimizer=partial(torch.optim.Adam, lr=1e-3), steps=2)
    assert check(wrapped, ranks=pools(3)).largest <= 1e-12
    assert check(hybrid, ranks=pools(4)).largest <= 1e-12


def test_the_naive_one(pools):
    """Trains as one process does. It gathers once forward and once backward, however many of its
    weights autograd needs."""

    def run():
        module = net(6, 5, 4, 4)
        plain = copy.deepcopy(module)
        parts = NaiveFullySharded(module[:3]), module[3], NaiveFullySharded(module[4])
        model = nn.Sequential(*parts)
        adam = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (model, plain)]
        rank, size, found = dist.get_rank(), dist.get_world_size(), {}
        name, each = {"gloo": ("broadcast", size), "shm": ("all_gather", 1)}[dist.get_backend()]
        for step in range(3):
            with md.measure.TrafficCounter() as forward:
                loss = loss_of(model, [rank], step)
            with md.measure.TrafficCounter() as backward:
                loss.backward()
            gathers = [traffic.calls[name][0] / each for traffic in (forward, backward)]
            loss_of(plain, range(size), step).backward()
            for optimizer in adam:
                optimizer.step()
                optimizer.zero_grad()
            found |= apart({f"output {step}": model(share(7))}, {f"output {step}": plain(share(7))})
        return found, sum(p.numel() for p in model.parameters()), gathers

    numbers = -(-(6 * 5 + 5 + 5 * 4 + 4) // 3) - (-(4 * 4 + 4) // 3)
    assert pools(3)(run) == [({}, numbers, [2, 2])] * 3


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
        assert apart(found[1][0], first) != {}
        assert [apart(after, first, 0) for _, after in found] == [{}] * size


# ---- any loop ---------------------------------------------------------------------------------


def unsynchronized(model):
    return model.no_sync() if is_sharded(model) else contextlib.nullcontext()


def plainly(model, ranks, step):
    loss_of(model, ranks, step).backward()


def accumulate(model, ranks, step):
    with unsynchronized(model):
        for number in (1, 2):
            loss_of(model, ranks, step + number).backward()
    loss_of(model, ranks, step).backward()


def forgotten(model, ranks, step):
    """What was kept without synchronization is zeroed: the whole of it must go."""
    with unsynchronized(model):
        loss_of(model, ranks, step + 1).backward()
    model.zero_grad(set_to_none=step == 1)
    loss_of(model, ranks, step).backward()


def several_passes(model, ranks, step):
    """Forward and backward, in another order."""
    losses = [loss_of(model, ranks, step + number) for number in range(3)]
    with torch.no_grad():
        model(share(0))
    model(share(1))  # its output is not used
    (losses[0] + losses[2]).backward()
    losses[1].backward()


def clipped(model, ranks, step, norm_type=2.0, by_torch=False):
    loss_of(model, ranks, step).backward()
    if is_sharded(model) and not by_torch:
        return model.clip_grad_norm_(1e-2, norm_type)
    return nn.utils.clip_grad_norm_(model.parameters(), 1e-2, norm_type, foreach=by_torch)


def evaluated(model, ranks, step):
    """Without gradients, in eval mode, and under inference mode, between the steps."""
    model.eval()
    with torch.no_grad():
        before = model(share(9))
    model.train()
    loss_of(model, ranks, step).backward()
    with torch.inference_mode():
        assert torch.equal(before, model(share(9)))
    return before


def decayed(model):
    """Two groups, by the names of the bare module, each with options of its own."""
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if not name.endswith("bias")], "lr": 0.01},
        {"params": [p for name, p in named if name.endswith("bias")], "weight_decay": 0.3},
    ]


def loop_of(kind, parameters=nn.Module.parameters):
    """What `held` takes: three steps, with this between `zero_grad` and `step`."""

    def train(model, ranks):
        optimizer, out = torch.optim.AdamW(parameters(model), lr=1e-3, weight_decay=0.1), {}
        for step in range(3):
            optimizer.zero_grad()
            given = kind(model, ranks, step)
            optimizer.step()
            if given is not None:
                out[f"given at {step}"] = given
        return out

    return train


LOOPS = {
    "accumulation": (accumulate, {}),
    "accumulation, kept after forward": (accumulate, {"reshard_after_forward": False}),
    "accumulation, without prefetch": (accumulate, {"prefetch": False}),
    "forgotten": (forgotten, {}),
    "several passes": (several_passes, {}),
    "several passes, kept after forward": (several_passes, {"reshard_after_forward": False}),
    "several passes, without prefetch": (several_passes, {"prefetch": False}),
    "evaluated, kept after forward": (evaluated, {"reshard_after_forward": False}),
    "clipped": (clipped, {}),
    "clipped by the largest": (partial(clipped, norm_type=float("inf")), {}),
    "clipped by torch": (partial(clipped, by_torch=True), {}),
    "clipped by torch, sums": (partial(clipped, norm_type=1.0, by_torch=True), {}),
    "clipped, on the CPU": (clipped, {"cpu_offload": CPUOffload(offload_params=True)}),
}


@pytest.mark.parametrize("name", LOOPS)
def test_any_loop(pools, name):
    """Of three ranks the last has no rows of the middle layer."""
    kind, options = LOOPS[name]
    frees = options.get("reshard_after_forward", True)
    run = partial(held, loop_of(kind), net, partial(wrapped, **options), frees=frees)
    assert pools(3)(run) == [{}] * 3


def test_groups_and_hybrid_sharding(pools):
    assert pools(3)(held, loop_of(plainly, decayed), net, wrapped) == [{}] * 3
    for kind in (accumulate, clipped, partial(clipped, by_torch=True)):
        assert pools(4)(held, loop_of(kind), net, hybrid) == [{}] * 4, kind


# ---- any model --------------------------------------------------------------------------------


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


def test_any_model(pools):
    blocks = partial(wrapped, auto_wrap_policy=by_class(nn.Sequential))
    for make, wrap, allowed in ((Mixed, blocks, 1e-5), (Sometimes, as_one, 1e-12)):
        for kind in (plainly, accumulate):
            assert pools(2)(held, loop_of(kind), make, wrap, allowed) == [{}] * 2, (make, kind)


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
    return memory.after("backward"), memory.peak_of, traffic.calls, len(list(model.parameters()))


def test_bytes_that_a_rank_holds(pools):
    """16Ψ/N: the rows of parameters, gradients and two states. The rows of a parameter are padded
    so that all ranks have as many."""
    shapes = [(32, 64), (32, 1), (10, 32), (10, 1)]
    shard = sum(-(-rows // 4) * width for rows, width in shapes)
    for rank, (live, _, _, pieces) in enumerate(pools(4)(measured)):
        own = 0  # without the padding
        for rows, width in shapes:
            each = -(-rows // 4)
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
                (when, [i for i, each in enumerate(units) if bytes_gathered(each)])
            )
        for _ in range(2):  # the first finds out the order
            found.clear()
            model(floats(0)).sum().backward()
        return found

    ahead = [[0, 1], [1, 2], [2, 3], [3]], [[2, 3], [1, 2], [0, 1], [0]]
    alone = [[0], [1], [2], [3]], [[3], [2], [1], [0]]
    forward, backward = ahead if prefetch else alone
    wanted = [("forward", each) for each in forward] + [("backward", each) for each in backward]
    assert pools(2)(there) == [wanted] * 2


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


# ---- what a wrapper does ----------------------------------------------------------------------


POLICIES = {
    "class": by_class(nn.Linear),
    "torch's class": ModuleWrapPolicy({nn.Linear}),
    "size": by_size(20),
    "torch's size": partial(size_based_auto_wrap_policy, min_num_params=20),
    "by hand": None,
}


def test_what_is_wrapped(pools):
    def units(policy):
        module = nn.Sequential(net(6, 5), nn.ModuleList([net(5, 4)]), net(4, 2))
        if policy is None:
            module[0] = as_one(module[0])
            module[1][0][0] = as_one(module[1][0][0])
        model = as_one(module, auto_wrap_policy=policy)
        assert [name for name, _ in model.named_parameters()] == list(model.state_dict())
        return [name for name, each in model.named_modules() if isinstance(each, FSDPModule)]

    by_hand, large = ["module.0.module", "module.1.0.0.module"], ["module.0.0", "module.1.0.0"]
    for name, policy in POLICIES.items():
        wanted = by_hand if policy is None else large + ["module.2.0"] * ("class" in name)
        assert pools(2)(units, policy) == [["module", *wanted]] * 2, name


def test_mixed_precision(pools):
    """Compute and communication in bfloat16, shards and sums in float32."""

    def make():
        layers = *net(6, 8, dtype=torch.float32), nn.Linear(8, 3)
        return nn.Sequential(*layers)

    def mixed():
        policy = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
        model, plain = pair(make, partial(wrapped, mixed_precision=policy))
        dtypes = set()
        model.module[-1].register_forward_hook(lambda _, x, y: dtypes.update([x[0].dtype, y.dtype]))
        with md.measure.TrafficCounter() as traffic:
            for m in (model, plain):
                weighed(m(floats(0)).float()).backward()
                torch.optim.SGD(m.parameters(), lr=0.01).step()
        assert dtypes == {torch.bfloat16}
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        wholes = [full for unit in units_of(model) for full in unit.unsharded]
        assert {w.dtype for w in wholes} == {torch.bfloat16}
        gathered = 2 * sum(w.numel() * w.dtype.itemsize for w in wholes)  # forward and backward
        reduced = sum(4 * w.numel() for w in wholes)
        sent = {name: nbytes for name, (_, nbytes) in traffic.calls.items()}
        sizes = sorted(v for k, v in sent.items() if k != "all_reduce")
        return apart(model.state_dict(), plain.state_dict(), 0.05), sizes == [reduced, gathered]

    assert pools(2)(mixed) == [({}, True)] * 2


def test_a_model_that_no_rank_could_hold(pools):
    widths = 6, 128, 128, 128, 6

    def born():
        torch.manual_seed(dist.get_rank())
        peaks = []
        for _ in range(5):  # gloo's thread may give back what it has sent late
            with torch.device("meta"):
                module = net(*widths, dtype=torch.float32)
            with md.measure.MemoryTracker(module) as memory:
                model = wrapped(module)
            peaks.append(memory.peak)
        weighed(model(floats(dist.get_rank()))).backward()
        states = [None] * 2
        dist.all_gather_object(states, state := model.state_dict())
        assert all(value.isfinite().all() for value in state.values())
        kept = sum(shard.nbytes for unit in units_of(model) for shard, _ in unit.flat_shards)
        return apart(*states, 0), kept, min(peaks)

    sizes = [(a + 1) * b for a, b in zip(widths, widths[1:], strict=False)]
    for found, kept, peak in pools(2)(born):
        assert found == {} and kept == 4 * sum(sizes) // 2
        # Beside the shards one unit, which is there twice while it is laid out.
        assert peak <= kept + 2 * 4 * max(sizes)


def test_initial_values_for_what_is_on_meta(pools):
    """If one rank cannot make them, all hear of it; the others do not wait for that one."""

    def init(fails, module):
        if fails and dist.get_rank() == 1:
            raise OSError("no such file: values.pt")
        if hasattr(module, "weight"):
            module.to_empty(device="cpu", recurse=False)
            nn.init.constant_(module.weight, 3)
            nn.init.constant_(module.bias, 4)

    def born(fails):
        with torch.device("meta"):
            module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        state = wrapped(module, param_init_fn=partial(init, fails)).state_dict()
        return {name.split(".")[1]: set(value.flatten().tolist()) for name, value in state.items()}

    assert pools(2)(born, False) == [{"weight": {3}, "bias": {4}}] * 2
    for words in pools(2)(lambda: told(lambda: born(True))):
        assert "RuntimeError" in words and "rank 1" in words and "values.pt" in words, words


# ---- checkpoints ------------------------------------------------------------------------------


def some_steps(steps, folder=None, load=None, given=None, wrap=wrapped, make=net):
    """Train, from a checkpoint if there is one. Writes one, and returns a whole one."""
    torch.manual_seed(0)
    model = wrap(make())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    if load:
        with md.saving.Checkpoints(load) as checkpoints:
            assert checkpoints.load(model=model, optimizer=optimizer) == 1
    if given:
        model.load_state_dict(given[0])
        model.load_optim_state_dict(optimizer, given[1])
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, [0], step).backward()
        optimizer.step()
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
        optimizer.zero_grad()
        loss_of(model, [0], step).backward()
        optimizer.step()
    return model.state_dict(), optimizer.state_dict()


def differ(a, b):
    """Between two checkpoints."""
    flat = [
        {**m, **{f"{i}.{k}": v for i, s in o["state"].items() for k, v in s.items()}}
        for m, o in (a, b)
    ]
    return apart(*flat, 1e-11)


def test_saved_whole_at_4_ranks_loaded_at_any_number_and_without_minidist(pools):
    saved = pools(4)(some_steps, range(3))[0]
    wanted = alone_for(range(6))
    assert differ(pools(3)(some_steps, range(3, 6), given=saved)[0], wanted) == {}
    assert differ(alone_for(range(3, 6), saved), wanted) == {}
    plain = alone_for(range(3))
    assert differ(pools(2)(some_steps, range(3, 6), given=plain)[0], wanted) == {}


def normed():  # before the layers: a bias before it has gradients of mere rounding errors
    return nn.Sequential(nn.BatchNorm1d(6, dtype=torch.float64), net(6, 4))


def test_saved_in_shards_at_4_ranks_loaded_at_any_number(pools, tmp_path):
    wanted = alone_for(range(6), make=normed)
    pools(4)(some_steps, range(3), folder=tmp_path, make=normed, wrap=hybrid)
    run = partial(some_steps, range(3, 6), load=tmp_path, make=normed, wrap=as_one)
    for size in (2, 3):
        assert differ(pools(size)(run)[0], wanted) == {}


# ---- mistakes ---------------------------------------------------------------------------------


def other_layers_by_hand():
    module = net(4, 4, 4)
    module[2 * dist.get_rank()] = as_one(module[2 * dist.get_rank()])
    as_one(module)


def outside():
    model = wrapped(net())
    model(share(0))
    model.module[0](share(0))


def optimizer_before(method):
    module = net()
    optimizer = torch.optim.Adam(module.parameters())
    model = wrapped(module)
    model(share(dist.get_rank())).sum().backward()
    getattr(optimizer, method)()


def tied_between_units():
    module = net(6, 6, 6)
    module[2].weight = module[0].weight
    wrapped(module)


def stepped_between():
    model = wrapped(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(share(dist.get_rank())).sum()
    model(share(dist.get_rank())).sum().backward()
    optimizer.step()
    loss.backward()


def changed(change):
    def train():
        model = wrapped(net())
        change(model.module)
        model(share(dist.get_rank()))

    return train


def load(*sizes):
    return lambda: wrapped(net()).load_state_dict(net(*sizes).state_dict())


def double_backward():
    x = share(dist.get_rank()).requires_grad_()
    (g,) = torch.autograd.grad(wrapped(net())(x).pow(2).sum(), x, create_graph=True)
    g.sum().backward()


def by_rank():
    wrapped(net(), auto_wrap_policy=LAYERS if dist.get_rank() else None)


def replaced(module):
    module[0].bias = nn.Parameter(module[0].bias.detach().clone())


MISTAKES = {
    "other models": (lambda: wrapped(net(6, 5 + dist.get_rank(), 3)), "different models"),
    "one has no policy": (by_rank, "ValueError: the ranks have different models"),
    "other layers by hand": (other_layers_by_hand, "unit 0.module, sharded already"),
    "outside of the root": (outside, "outside of the forward pass of its root"),
    "optimizer before": (partial(optimizer_before, "step"), "optimizer after sharding"),
    "zeroed before": (partial(optimizer_before, "zero_grad"), "optimizer after sharding"),
    "tied": (tied_between_units, "must be in the same unit"),
    "around DDP": (lambda: as_one(md.DistributedDataParallel(net())), "DistributedDataParallel"),
    "stepped between": (stepped_between, "changed since the forward pass"),
    "added": (changed(lambda m: m.append(net(3, 3))), "parameter 5.0.weight was added, replaced"),
    "replaced": (changed(replaced), "parameter 0.bias was added, replaced"),
    "double backward": (double_backward, "create_graph=True"),
    "another shape": (load(6, 4, 4, 3), "size mismatch for "),
    "missing": (load(6, 5, 4), "4.weight"),
    "twice": (lambda: wrapped(wrapped(net()).module), "is sharded already"),
}


def test_mistakes_are_told_on_every_rank(pools):
    for name, (fault, words) in MISTAKES.items():
        for found in pools(2)(told, fault):
            assert words in found, (name, found)
    with pytest.raises(RuntimeError, match="there is none"):
        as_one(net())
