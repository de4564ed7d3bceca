"""ZeRO: ranks that share out optimizer states, and gradients, train as one process does. Held
against one process, and against the formulas, in bytes."""

import contextlib
import copy
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
from minidist.parity.snapshot import state_of

ADAM = torch.optim.Adam, {"lr": 1e-3}
SGD = torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}
KINDS = [
    ADAM,
    SGD,
    (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}),
    (torch.optim.Adagrad, {}),  # makes its states at once
    (torch.optim.Rprop, {}),
]
TINY = 200  # bytes of a bucket, so that small models have several
LARGE = 25 * 2**20


def zero(params, optimizer_class=torch.optim.Adam, group=None, cap=LARGE, **options):
    """cap: bytes of a bucket."""
    mb = cap / 2**20
    return md.ZeroRedundancyOptimizer(params, optimizer_class, group, bucket_cap_mb=mb, **options)


def stage1(module, kind, params=None, wrap=md.DistributedDataParallel, cap=TINY, group=None):
    optimizer_class, options = kind
    model = wrap(module, process_group=group)
    params = list(module.parameters()) if params is None else params
    return model, zero(params, optimizer_class, group, cap, **options)


def stage2(module, kind, params=None, cap=TINY, group=None, **arguments):
    optimizer_class, options = kind
    params = list(module.parameters()) if params is None else params
    optimizer = zero(params, optimizer_class, group, cap, **options)
    return md.ShardedDataParallel(module, optimizer, **arguments), optimizer


stage1_torch = partial(stage1, wrap=TorchDDP)
BOTH = pytest.mark.parametrize("stage", [stage1, stage2])


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


@pytest.mark.parametrize("stage", [stage1, stage1_torch, stage2], ids=["1", "1, torch", "2"])
def test_parity_with_one_process(pools, stage):
    make = partial(torch.optim.Adam, lr=1e-3)
    for world_size, cap in (2, LARGE), (3, 5000), (4, LARGE):
        strategy = partial(stage, kind=ADAM, cap=cap)
        parity = md.parity.check(strategy, optimizer=make, ranks=pools(world_size), steps=3)
        assert parity.largest <= 1e-12, world_size


def backward(model, batches, scale=1):
    """Of the mean of their losses."""
    for batch in batches:
        (loss_of(model(batch * scale)) / len(batches)).backward()


def without_averages(model, really=True):
    return model.no_sync() if really and hasattr(model, "no_sync") else contextlib.nullcontext()


def plainly(model, optimizer, batches, step=0):
    optimizer.zero_grad()
    backward(model, batches)
    optimizer.step()


def accumulate(model, optimizer, batches, step):
    optimizer.zero_grad()
    with without_averages(model):
        for scale in (1, 2):
            backward(model, batches, scale)
    backward(model, batches)
    optimizer.step()


def several_backward_passes(model, optimizer, batches, step):
    model.zero_grad()
    for scale in (1, 2):
        backward(model, batches, scale)
    optimizer.step()


def zeros_are_kept(model, optimizer, batches, step):
    if step == 2:  # a step with a gradient of zero: momentum goes on
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
    else:
        plainly(model, optimizer, batches)


def closed(model, optimizer, batches, step):
    def closure():
        optimizer.zero_grad()
        losses = [loss_of(model(batch)) / len(batches) for batch in batches]
        for loss in losses:
            loss.backward()
        return 7

    with torch.no_grad():
        assert optimizer.step(closure) == 7


def clipped(model, optimizer, batches, step, norm_type=2.0):
    optimizer.zero_grad()
    backward(model, batches)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-2, norm_type)
    optimizer.step()
    return {"norm": whole(norm)}


def whole(tensor):
    """A number that torch has found over all ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


LOOPS = [accumulate, several_backward_passes, zeros_are_kept, closed]
LOOPS += [clipped, partial(clipped, norm_type=1.0)]


class Odd(nn.Module):
    """Parameters of all layouts: transposed, channels last, with gaps, empty; shared."""

    def __init__(self):
        super().__init__()

        def p(tensor):
            return nn.Parameter(tensor.double())

        self.transposed = p(torch.randn(3, 6).t())
        self.channels_last = p(torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last))
        self.gaps = p(torch.randn(6, 8)[:, ::2])
        self.scalar = p(torch.tensor([1.5]))
        self.empty = p(torch.empty(0, 3))
        self.tied, self.first = net(6, 6), net(6, 6)
        self.tied[0].weight = self.first[0].weight

    def forward(self, x):
        x = self.tied(self.first(x)).tanh()
        x = (x @ self.transposed).sum() * self.channels_last.pow(2) * self.scalar
        return x.sum() + self.gaps.pow(3).sum() * x.sum() + self.empty.sum()


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


def groups(module):
    """Two groups, each with options of its own."""
    named = list(module.named_parameters())
    return [
        {"params": [p for name, p in named if "bias" not in name], "lr": 0.01},
        {"params": [p for name, p in named if "bias" in name], "weight_decay": 0.3},
    ]


def in_turns(stage, loop, make=net, kind=SGD, grouped=False, allowed=1e-12, **options):
    """On a rank: train by the loop, by the stage and then in one process, and what differs, after
    each step, of what the loop returns and of the weights and states. The loop gets this rank's
    examples, and in one process those of all ranks."""
    torch.manual_seed(0)
    module = make()
    plain = copy.deepcopy(module)

    def trained(model, optimizer, ranks):
        found = {}
        for step in range(4):
            now = loop(model, optimizer, [share(rank, step) for rank in ranks], step) or {}
            now = {**now, **state_of(model, optimizer)}
            found |= {f"{name}, step {step}": value.clone() for name, value in now.items()}
        return found

    params = groups(module) if grouped else None
    ours = trained(*stage(module, kind, params, **options), [dist.get_rank()])
    alone = kind[0](groups(plain) if grouped else plain.parameters(), **kind[1])
    return apart(ours, trained(plain, alone, range(dist.get_world_size())), allowed)


@BOTH
def test_any_loop(pools, stage):
    for loop in LOOPS:
        assert pools(3)(in_turns, stage, loop, kind=ADAM) == [[]] * 3, loop


MODELS = [(Odd, 1e-11), (Mixed, 1e-5), (Sometimes, 1e-12)]


@BOTH
def test_any_model(pools, stage):
    wrap = partial(md.DistributedDataParallel, find_unused_parameters=True)
    stage = partial(stage1, wrap=wrap) if stage is stage1 else partial(stage2, **wrap.keywords)
    for make, allowed in MODELS:
        for cap in TINY, LARGE:
            run = partial(in_turns, stage, plainly, make, ADAM, cap=cap, allowed=allowed)
            assert pools(2)(run) == [[]] * 2, (make, cap)


def scheduled(model, optimizer, batches, step):
    if step == 0:
        made = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.3, 0.2], total_steps=5)
        optimizer.schedule = made
    plainly(model, optimizer, batches)
    optimizer.schedule.step()
    return {"rates": torch.tensor([group["lr"] for group in optimizer.param_groups])}


@BOTH
def test_groups_with_options_of_their_own(pools, stage):
    for kind in KINDS:
        assert pools(2)(in_turns, stage, plainly, net, kind, grouped=True) == [[]] * 2, kind
    assert pools(2)(in_turns, stage, scheduled, net, SGD, grouped=True) == [[]] * 2


def scale_in_place(parameters):
    for parameter in parameters:
        parameter.grad.mul_(2).clamp_(-0.1, 0.1)


CLIPS = {
    "1-norm": partial(nn.utils.clip_grad_norm_, max_norm=0.1, norm_type=1.0),
    "2-norm": partial(nn.utils.clip_grad_norm_, max_norm=0.1),
    "each": partial(nn.utils.clip_grad_value_, clip_value=0.001),
    "2-norm, at once": partial(nn.utils.clip_grad_norm_, max_norm=0.1, foreach=True),
    "by hand": scale_in_place,
}


def test_torchs_clipping_is_right_in_stage_2(pools):
    """Also with passes that add up, in the shards and before they are cut."""

    def loop(clip, model, optimizer, batches, step):
        model.zero_grad(step % 2 == 0)
        for waits in (False, True, False):
            with without_averages(model, waits):
                backward(model, batches)
        norm = clip(model.parameters())
        assert norm is None or whole(norm) > 0.1
        optimizer.step()
        return {} if norm is None else {"norm": whole(norm)}

    for name, clip in CLIPS.items():
        assert pools(3)(in_turns, stage2, partial(loop, clip)) == [[]] * 3, name


@BOTH
def test_16_bits_and_a_group_of_some_ranks(pools, stage):
    def some():
        group = dist.new_group([0, 2])
        if dist.get_rank() == 1:
            return []
        module = net(dtype=torch.bfloat16)
        plain = copy.deepcopy(module)
        model, optimizer = stage(module, SGD, group=group)
        alone = SGD[0](plain.parameters(), **SGD[1])
        for step in range(2):
            shares = [share(rank, step, dtype=torch.bfloat16) for rank in range(2)]
            plainly(model, optimizer, [shares[dist.get_rank(group)]])
            plainly(plain, alone, shares)
        return apart(model.state_dict(), plain.state_dict(), 0.1)

    assert pools(3)(some) == [[]] * 3


# ---- bytes ------------------------------------------------------------------------------------


def measured(stage, cap, sizes=(64, 32, 10)):
    model, optimizer = stage(net(*sizes, dtype=torch.float32), ADAM, cap=cap)
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
    flats = [[len(block) for block in flat.blocks] for flat in optimizer._flats]
    return memory.after("backward"), memory.peak_of, traffic.calls, flats


ROWS = [(64 * 32, 32), (32, 32), (32 * 10, 10), (10, 10)]  # elements and rows of each parameter


@BOTH
@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_that_a_rank_holds(pools, stage, world_size):
    padded = sum(n // rows * -(-rows // world_size) * world_size for n, rows in ROWS)
    for rank, (live, _, _, _) in enumerate(pools(world_size)(measured, stage, LARGE)):
        each = [(n // rows, rows, -(-rows // world_size)) for n, rows in ROWS]
        own = sum(n * max(0, min(most, rows - rank * most)) for n, rows, most in each)
        assert live["parameters"] == 4 * padded
        assert live["gradients"] == 4 * (2410 if stage is stage1 else padded // world_size)
        assert live["optimizer states"] == 8 * own + 4 * len(ROWS)  # and a count of steps each


def test_the_whole_gradient_is_never_there(pools):
    layers = [64] * 17
    for live, peak, _, flats in pools(4)(measured, stage2, 4 * 64 * 65, layers):
        sizes = list(map(sum, flats))
        assert len(sizes) >= 16
        assert live["gradients"] == 4 * sum(sizes) // 4
        # One bucket fills, one travels, and a gradient is copied into its bucket; gloo's thread
        # keeps what it has sent a moment longer.
        most = 4 * (sum(sizes) // 4 + 5 * max(sizes))
        assert peak["gradients"] + peak["other"] <= most < 4 * sum(sizes)


@BOTH
@pytest.mark.parametrize("cap", [1000, LARGE])
def test_traffic(pools, stage, cap):
    """2Ψ(N-1)/N: a reduce_scatter and an all_gather of Ψ; gloo's are calls for each shard."""

    def counted():
        return dist.get_backend(), *measured(stage, cap)

    for backend, _, _, calls, flats in pools(2)(counted):
        n, nbytes = len(flats), 4 * sum(map(sum, flats))
        assert n == (1 if cap == LARGE else 2)
        gathered = {"gloo": ("broadcast", (2 * n, nbytes)), "shm": ("all_gather", (n, nbytes))}
        reduced = {"gloo": ("reduce", (2 * n, nbytes)), "shm": ("reduce_scatter", (n, nbytes))}
        other = ("all_reduce", (1, 4 * 2410)) if stage is stage1 else reduced[backend]
        assert calls == dict([gathered[backend], other])


# ---- checkpoints ------------------------------------------------------------------------------


def go_on(model, optimizer, steps, saved):
    if saved is not None:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    for step in steps:
        plainly(model, optimizer, [share(0, step)])


def on_ranks(stage, make, steps, saved=None):
    """Train, from a checkpoint if one is given. Returns another one, of rank 0's."""
    model, optimizer = stage(make(), ADAM)
    go_on(model, optimizer, steps, saved)
    states = tree_map_only(DTensor, DTensor.full_tensor, optimizer.state_dict())
    if dist.get_rank() == 0:
        return copy.deepcopy((dict(model.state_dict()), states))


def alone(make, steps, saved=None):
    model = make()
    optimizer = ADAM[0](model.parameters(), **ADAM[1])
    go_on(model, optimizer, steps, saved)
    return model.state_dict(), optimizer.state_dict()


def odd():
    torch.manual_seed(0)
    return Odd()


@pytest.mark.parametrize(("stage", "make"), [(stage1, net), (stage2, odd)])
def test_saved_at_4_ranks_loaded_at_any_number_and_without_minidist(pools, stage, make):
    def flat(model, optimizer):
        states = optimizer["state"].items()
        return {
            **model,
            **{f"{i}.{k}": torch.as_tensor(v) for i, s in states for k, v in s.items()},
        }

    first, later, wanted = range(3), range(3, 6), alone(make, range(6))
    saved, plain = pools(4)(on_ranks, stage, make, first)[0], alone(make, first)
    for states in plain[1]["state"].values():  # as a file may have them
        states |= {name: value.contiguous() for name, value in states.items()}
    trained = {
        "at 2": pools(2)(on_ranks, stage, make, later, saved)[0],
        "at 3": pools(3)(on_ranks, stage, make, later, saved)[0],
        "without minidist": alone(make, later, saved),
        "from without minidist": pools(2)(on_ranks, stage, make, later, plain)[0],
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
        return type(error).__name__, str(error)
    return None


def unfrozen(rank):
    module = net()
    module[0].bias.requires_grad_(False)
    optimizer = zero(module.parameters())
    module[0].bias.requires_grad_(True)
    module(share(rank)).sum().backward()
    optimizer.step()


def wrap(optimizer_of):
    module = net()
    md.ShardedDataParallel(module, optimizer_of(module))


def another_step(rank):
    module = net()
    model, _ = stage2(module, ADAM)
    loss_of(model(share(rank))).backward()
    torch.optim.SGD(module.parameters()).step()


MISTAKES = {
    "shapes": (
        lambda rank: zero(net(6, 5 + rank, 3).parameters()),
        "ValueError",
        "about parameter 0 of group 0: rank 0 says shape (5, 6), float64, rank 1 ",
    ),
    "rates": (
        lambda rank: zero(net().parameters(), lr=0.1 + rank),
        "ValueError",
        "disagree about the options of group 0",
    ),
    "LBFGS": (
        lambda rank: zero(net().parameters(), torch.optim.LBFGS),
        "TypeError",
        "LBFGS cannot train rows of parameters: it looks at more than one element at a time",
    ),
    "unfrozen": (unfrozen, "RuntimeError", "frozen when the optimizer was made"),
    "another optimizer": (
        lambda rank: wrap(lambda m: torch.optim.Adam(m.parameters())),
        "TypeError",
        "needs a ZeroRedundancyOptimizer, which has the rows, not Adam",
    ),
    "other parameters": (
        lambda rank: wrap(lambda m: zero((m if rank else net()).parameters())),
        "ValueError",
        "rank 0: the optimizer has other parameters than the module trains",
    ),
    "another step": (another_step, "RuntimeError", "got mixed torch.Tensor and DTensor"),
    "other models": (
        lambda rank: wrap(
            lambda m: zero(m.append(nn.BatchNorm1d(3 + rank, affine=False)) and m.parameters())
        ),
        "ValueError",
        "the ranks have different models",
    ),
}


def test_mistakes_are_told_on_every_rank(pools):
    for name, (fault, kind, words) in MISTAKES.items():
        for told in pools(2)(fails_with, fault):
            assert told is not None and told[0] == kind and words in told[1], (name, told)
    with pytest.raises(RuntimeError, match="there is none"):
        zero(net().parameters())
