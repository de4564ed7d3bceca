"""ZeRO: ranks that share out optimizer states, and gradients, train as one process does. Held
against one process, and against the formulas, in bytes."""

import contextlib
import copy
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from least import least_memory_of
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils._pytree import tree_map_only

import minidist as md
from minidist.instruments.parity.differences import differences

ADAM = torch.optim.Adam, {"lr": 1e-3}
SGD = torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}
TINY = 200 / 2**20  # MiB of a bucket, so that small models have several
LARGE = 25


class Declared(torch.optim.SGD):
    elementwise = True


KINDS = [
    ADAM,
    (torch.optim.Adagrad, {}),  # makes its states at once
    (Declared, {"lr": 0.1}),
]


def zero(params, kind=ADAM, cap=LARGE):
    optimizer_class, options = kind
    return md.ZeroRedundancyOptimizer(params, optimizer_class, bucket_cap_mb=cap, **options)


def stage1(module, kind=ADAM, params=None, cap=TINY, wrap=md.DistributedDataParallel, **arguments):
    return wrap(module, **arguments), zero(params or module.parameters(), kind, cap)


def stage2(module, kind=ADAM, params=None, cap=TINY, **arguments):
    optimizer = zero(params or module.parameters(), kind, cap)
    return md.ShardedDataParallel(module, optimizer, **arguments), optimizer


BOTH = pytest.mark.parametrize("stage", [stage1, stage2])


def net(*sizes, dtype=torch.float64):
    return md.zoo.mlp(*(sizes or (6, 5, 4, 3)), dtype=dtype)


def share(rank, step=0):
    """Examples of a rank, other ones on each rank and at each step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 6, dtype=torch.float64, generator=generator)


def loss_of(output):
    """A loss that weighs every element differently."""
    weights = torch.arange(1, output.numel() + 1, dtype=output.dtype).view(output.shape)
    return (output * weights).pow(2).sum() / output.numel()


def apart(ours, plain, allowed=1e-12):
    return [words for words, far in differences(ours, plain) if not far <= allowed]


# ---- one process ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stage", [stage1, partial(stage1, wrap=TorchDDP), stage2], ids=["1", "1, torch", "2"]
)
def test_parity_with_one_process(pools, stage):
    make = partial(torch.optim.Adam, lr=1e-3)
    for world_size, cap in (2, LARGE), (3, 0.005):
        strategy = partial(stage, cap=cap)
        parity = md.parity.check(strategy, optimizer=make, ranks=pools(world_size), steps=3)
        assert parity.largest <= 1e-12, world_size


def backward(model, batches, scale=1):
    """Of the mean of their losses."""
    for batch in batches:
        (loss_of(model(batch * scale)) / len(batches)).backward()


def without_averages(model):
    return model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext()


def plainly(model, optimizer, batches, step=0):
    optimizer.zero_grad()
    backward(model, batches)
    optimizer.step()


def accumulate(model, optimizer, batches, step):
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    with without_averages(model):
        backward(model, batches, 2)
    backward(model, batches)
    backward(model, batches, 3)
    optimizer.step()


def no_gradient_or_zeros(model, optimizer, batches, step):
    """Without gradients nothing moves; with zeros the momentum goes on."""
    if step in (1, 2):
        optimizer.zero_grad(set_to_none=step == 1)
        optimizer.step()
    else:
        plainly(model, optimizer, batches)


def scheduled(model, optimizer, batches, step):
    if step == 0:
        made = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.3, 0.2], total_steps=5)
        optimizer.schedule = made
    plainly(model, optimizer, batches)
    optimizer.schedule.step()


def clipped(model, optimizer, batches, step):
    """By torch's function, which takes DTensors. Passes add up, in the shards and before."""
    optimizer.zero_grad()
    with without_averages(model):
        backward(model, batches)
    backward(model, batches)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return {"norm": norm.full_tensor() if isinstance(norm, DTensor) else norm}


LOOPS = {
    "accumulate": accumulate,
    "no gradient, or zeros": no_gradient_or_zeros,
    "clipped": clipped,
}


class Layouts(nn.Module):
    """Parameters that are transposed, channels last, of one element, empty, and shared."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        image = torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last)
        made = [torch.randn(3, 6).t(), image, torch.tensor([1.5]), torch.empty(0, 3)]
        self.all = nn.ParameterList(tensor.double() for tensor in made)
        self.tied, self.first = net(6, 6), net(6, 6)
        self.tied[0].weight = self.first[0].weight

    def forward(self, x):
        turned, image, one, empty = self.all
        x = self.tied(self.first(x)).tanh() @ turned
        return x.sum() * image.pow(2) * one + empty.sum()


class Mixed(nn.Module):
    """Parameters of two dtypes; two are frozen, one never has a gradient."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = net(6, 4), net(4, 4, dtype=torch.float32), net(4, 3)
        self.unused = nn.Parameter(torch.ones(7, dtype=torch.float64))
        self.a[0].bias.requires_grad_(False)
        self.c[0].weight.requires_grad_(False)

    def forward(self, x):
        return self.c(self.b(self.a(x).float()).double())


class Sometimes(nn.Module):
    """Half of it is used for a part of the examples: on some ranks only."""

    def __init__(self):
        super().__init__()
        self.a, self.b = net(6, 3), net(6, 3)

    def forward(self, x):
        return self.a(x) + self.b(x) if (x[0, 0] * 1000).long() % 2 else self.a(x)


MODELS = [
    (Layouts, plainly, 1e-11),
    (Mixed, plainly, 1e-5),
    (Sometimes, accumulate, 1e-12),
    (partial(net, 6, 401, 401, 3), plainly, 1e-10),  # of 1 MiB: it travels alone
]


def groups(module):
    """Two groups, each with options of its own."""
    named = list(module.named_parameters())
    return [
        {"params": [p for name, p in named if "bias" not in name], "lr": 0.01},
        {"params": [p for name, p in named if "bias" in name], "weight_decay": 0.3},
    ]


def in_turns(stage, loop, make=net, kind=ADAM, grouped=False, allowed=1e-12, **options):
    """On a rank: train by the loop, by the stage and then in one process, and what differs, after
    each step, of what the loop returns and of the weights and states. The loop gets this rank's
    examples, and in one process those of all ranks."""
    module = make()
    plain = copy.deepcopy(module)

    def trained(model, optimizer, ranks):
        found = {}
        for step in range(4):
            now = loop(model, optimizer, [share(rank, step) for rank in ranks], step) or {}
            now = {**now, **flat(model.state_dict(), whole(optimizer))}
            found |= {f"{name}, step {step}": value.clone() for name, value in now.items()}
        return found

    params = groups(module) if grouped else None
    ours = trained(*stage(module, kind, params, **options), [dist.get_rank()])
    alone = kind[0](groups(plain) if grouped else plain.parameters(), **kind[1])
    return apart(ours, trained(plain, alone, range(dist.get_world_size())), allowed)


@BOTH
def test_any_loop(pools, stage):
    for name, loop in LOOPS.items():
        for kind in (ADAM, SGD) if loop is no_gradient_or_zeros else (ADAM,):
            assert pools(3)(in_turns, stage, loop, kind=kind) == [[]] * 3, name


@BOTH
def test_any_model(pools, stage):
    stage = partial(stage, find_unused_parameters=True)
    for make, loop, allowed in MODELS:
        for cap in TINY, LARGE:
            run = partial(in_turns, stage, loop, make, cap=cap, allowed=allowed)
            assert pools(2)(run) == [[]] * 2, (make, cap)


@BOTH
def test_groups_with_options_of_their_own(pools, stage):
    for kind in KINDS:
        assert pools(2)(in_turns, stage, plainly, net, kind, grouped=True) == [[]] * 2, kind
    assert pools(2)(in_turns, stage, scheduled, net, SGD, grouped=True) == [[]] * 2


# ---- bytes ------------------------------------------------------------------------------------


def measured(stage, cap, sizes=(64, 32, 10)):
    model, optimizer = stage(net(*sizes, dtype=torch.float32), cap=cap)
    x = torch.randn(4, 64)

    def step():
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    memory, traffic = least_memory_of(step, model, optimizer)
    if stage is stage2:
        assert memory.history["gradients"][-1] == 0  # after zero_grad
    (phase,) = [phase for phase in memory.phases if phase.name == "backward"]
    kinds = [memory.history[name] for name in ("gradients", "communication buffers", "other")]
    peak = max(map(sum, zip(*(kind[phase.start : phase.end + 1] for kind in kinds), strict=True)))
    return memory.after("backward"), peak, dist.get_backend(), traffic.calls


ROWS = [(64 * 32, 32), (32, 32), (32 * 10, 10), (10, 10)]  # elements and rows of each parameter


def padded(world_size):
    return sum(n // rows * -(-rows // world_size) * world_size for n, rows in ROWS)


@BOTH
@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_that_a_rank_holds(pools, stage, world_size):
    for rank, (live, *_) in enumerate(pools(world_size)(measured, stage, LARGE)):
        each = [(n // rows, rows, -(-rows // world_size)) for n, rows in ROWS]
        own = sum(n * max(0, min(most, rows - rank * most)) for n, rows, most in each)
        whole, part = padded(world_size), padded(world_size) // world_size
        assert live["parameters"] == 4 * whole
        assert live["gradients"] == 4 * (2410 if stage is stage1 else part)
        assert live["optimizer states"] == 8 * own + 4 * len(ROWS)  # and a count of steps each


def test_the_whole_gradient_is_never_there(pools):
    own, layers = 22 * 65, 16  # of 64 rows, and as many biases, three ranks have 22 each, padded
    for live, peak, *_ in pools(3)(measured, stage2, 4 * 64 * 65 / 2**20, [64] * (layers + 1)):
        assert live["gradients"] == 4 * layers * own
        # One bucket fills, one travels, and a gradient is copied into its bucket; gloo's thread
        # keeps what it has sent a moment longer.
        assert peak <= 4 * (layers + 4 * 3) * own


@BOTH
@pytest.mark.parametrize(("cap", "n"), [(1000 / 2**20, 2), (LARGE, 1)])
def test_traffic(pools, stage, cap, n):
    """2Ψ(N-1)/N: a reduce_scatter and an all_gather of Ψ; gloo's are calls for each shard."""
    nbytes = 4 * padded(2)
    for _, _, backend, calls in pools(2)(measured, stage, cap):
        gathered = {"gloo": ("broadcast", (2 * n, nbytes)), "shm": ("all_gather", (n, nbytes))}
        reduced = {"gloo": ("reduce", (2 * n, nbytes)), "shm": ("reduce_scatter", (n, nbytes))}
        other = ("all_reduce", (1, 4 * 2410)) if stage is stage1 else reduced[backend]
        assert calls == dict([gathered[backend], other])


# ---- checkpoints ------------------------------------------------------------------------------


def whole(optimizer):
    return tree_map_only(DTensor, DTensor.full_tensor, optimizer.state_dict())


def go_on(model, optimizer, steps, saved):
    if saved is not None:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    for step in steps:
        plainly(model, optimizer, [share(0, step)])
    return copy.deepcopy((dict(model.state_dict()), whole(optimizer)))


def on_ranks(stage, make, steps, saved=None):
    """Train, from a checkpoint if one is given. Returns another one."""
    return go_on(*stage(make()), steps, saved)


def alone(make, steps, saved=None):
    model = make()
    return go_on(model, ADAM[0](model.parameters(), **ADAM[1]), steps, saved)


def flat(model, optimizer):
    states = optimizer["state"].items()
    return {**model, **{f"{i}.{k}": torch.as_tensor(v) for i, s in states for k, v in s.items()}}


@pytest.mark.parametrize(("stage", "make"), [(stage1, net), (stage2, Layouts)])
def test_saved_and_loaded_at_any_number_of_ranks_and_without_minidist(pools, stage, make):
    first, later, wanted = range(3), range(3, 6), alone(make, range(6))
    at_2, at_3 = (pools(n)(on_ranks, stage, make, first)[0] for n in (2, 3))
    trained = {
        "from 3 to 2": pools(2)(on_ranks, stage, make, later, at_3)[0],
        "from 2 to 3": pools(3)(on_ranks, stage, make, later, at_2)[0],
        "without minidist": alone(make, later, at_3),
        "from without it": pools(2)(on_ranks, stage, make, later, alone(make, first))[0],
    }
    for how, found in trained.items():
        assert apart(flat(*found), flat(*wanted), 1e-9) == [], how
        assert found[1]["param_groups"] == wanted[1]["param_groups"], how


# ---- mistakes ---------------------------------------------------------------------------------


def fails_with(fault):
    """On a rank: what `fault` raises."""
    try:
        fault(dist.get_rank())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def wrap(optimizer_of):
    module = net()
    md.ShardedDataParallel(module, optimizer_of(module))


def of_another_model(rank):
    zero(net().parameters()).load_state_dict(alone(partial(net, 6, 4, 4, 3), [0])[1])


MISTAKES = {
    "shapes": (
        lambda rank: zero(net(6, 5 + rank, 3).parameters()),
        r"(?s)ValueError: .*\n  rank 0: parameter 0, shape \(5, 6\), .*\n  rank 1: ",
    ),
    "a scalar": (
        lambda rank: zero([nn.Parameter(torch.tensor(0.0))]),
        "ValueError: rank 0: a parameter has no rows",
    ),
    "Adafactor": (
        lambda rank: zero(net().parameters(), (torch.optim.Adafactor, {})),
        "TypeError: .*Adafactor cannot train rows of parameters",
    ),
    "another optimizer": (
        lambda rank: wrap(lambda m: torch.optim.Adam(m.parameters())),
        "TypeError: ShardedDataParallel needs a ZeroRedundancyOptimizer, .* not Adam",
    ),
    "a hook": (
        lambda rank: stage2(net())[0].register_comm_hook(None, None),
        "NotImplementedError: ShardedDataParallel has no communication hooks",
    ),
    "another model's states": (of_another_model, "ValueError: .* is of another model"),
}


def test_mistakes_are_told_on_every_rank(pools):
    for name, (fault, words) in MISTAKES.items():
        for told in pools(2)(fails_with, fault):
            assert re.match(words, told), (name, told)
    with pytest.raises(RuntimeError, match="there is none"):
        zero(net().parameters())
