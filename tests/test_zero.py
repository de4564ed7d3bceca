"""ZeRO: ranks that share out optimizer states, and gradients, train as one process does. Held
against one process, against torch's ZeroRedundancyOptimizer, and against the formulas, in bytes."""

import contextlib
import copy
import inspect
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from least import least_memory_of
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minidist as md
from minidist.parity.snapshot import state_of
from minidist.zero import sharded_ddp
from minidist.zero.shards import reduce_scatter

ADAM = torch.optim.Adam, {"lr": 1e-3}
ADAMW = torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}
SGD = torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}
TINY = 200  # bytes of a bucket, so that small models have several
LARGE = 25 * 2**20


def sharded(params, optimizer_class, group=None, cap=LARGE, **options):
    """cap: bytes of a bucket."""
    mb = cap / 2**20
    return md.ZeroRedundancyOptimizer(params, optimizer_class, group, bucket_cap_mb=mb, **options)


def stage1(module, kind, params=None, wrap=md.DistributedDataParallel, cap=TINY, group=None):
    optimizer_class, options = kind
    model = wrap(module, process_group=group)
    params = list(module.parameters()) if params is None else params
    return model, sharded(params, optimizer_class, group, cap, **options)


def stage2(module, kind, params=None, cap=TINY, group=None):
    optimizer_class, options = kind
    params = list(module.parameters()) if params is None else params
    optimizer = sharded(params, optimizer_class, group, cap, **options)
    return md.ShardedDataParallel(module, optimizer), optimizer


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


def whole(model, optimizer):
    """Weights, buffers and optimizer states, whole: by name."""
    return state_of(model, optimizer)


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
@pytest.mark.parametrize("stage", [stage1, stage1_torch, stage2], ids=["1", "1, torch", "2"])
def test_parity_with_one_process(pools, stage, kind):
    make = partial(kind[0], **kind[1])
    strategy = partial(stage, kind=kind, cap=5000)
    assert md.parity.check(strategy, optimizer=make, ranks=pools(3)).largest <= 1e-12


@BOTH
@pytest.mark.parametrize("world_size", [1, 2, 4, 5])
def test_parity_of_any_number_of_ranks(pools, stage, world_size):
    make = partial(torch.optim.Adam, lr=1e-3)
    strategy = partial(stage, kind=ADAM, cap=LARGE)
    md.parity.check(strategy, optimizer=make, ranks=pools(world_size), steps=2)


@BOTH
def test_parity_of_a_transformer_and_of_batch_norm(pools, stage):
    make = partial(torch.optim.Adam, lr=1e-3)
    strategy = partial(stage, kind=ADAM, cap=10_000)
    check = partial(md.parity.check, strategy, optimizer=make, ranks=pools(2), steps=2)
    check(model=partial(md.zoo.Transformer, length=8, width=16, layers=1), data=md.zoo.text(8))
    check(model=md.zoo.convnet)


def backward(model, batches, scale=1):
    """Of the mean of their losses."""
    for batch in batches:
        (loss_of(model(batch * scale)) / len(batches)).backward()


def module_of(model):
    return getattr(model, "module", model)


def without_averages(model, really=True):
    return model.no_sync() if really and hasattr(model, "no_sync") else contextlib.nullcontext()


def clip_by(norm, model, max_norm=0.1, norm_type=2.0):
    if norm == "the model's" and isinstance(model, md.ShardedDataParallel):
        return model.clip_grad_norm_(max_norm, norm_type)
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type) if norm else None


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


def clipped(model, optimizer, batches, step, norm_type=2.0):
    optimizer.zero_grad()
    backward(model, batches)
    norm = clip_by("the model's", model, 1e-2, norm_type)
    optimizer.step()
    return {"norm": norm.double()}


def closed(model, optimizer, batches, step):
    def closure():
        optimizer.zero_grad()
        losses = [loss_of(model(batch)) / len(batches) for batch in batches]
        for loss in losses:
            loss.backward()
        return 7

    with torch.no_grad():
        assert optimizer.step(closure) == 7


LOOPS = [plainly, accumulate, several_backward_passes, zeros_are_kept, closed]
LOOPS += [clipped, partial(clipped, norm_type=float("inf")), partial(clipped, norm_type=1.0)]


class Odd(nn.Module):
    """Parameters of all layouts: transposed, channels last, with gaps, 0-dim, empty; shared."""

    def __init__(self):
        super().__init__()

        def p(tensor):
            return nn.Parameter(tensor.double())

        self.transposed = p(torch.randn(3, 6).t())
        self.channels_last = p(torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last))
        self.gaps = p(torch.randn(6, 8)[:, ::2])
        self.scalar = p(torch.tensor(1.5))
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


def in_turns(stage, train, make=net, kind=SGD, grouped=False, allowed=1e-12, **options):
    """On a rank: `train(model, optimizer, batches)` by the stage, then in one process, and what
    differs of what it returns and of the weights and states. batches(step): this rank's examples,
    and in one process those of all ranks."""
    torch.manual_seed(0)
    module = make()
    plain = copy.deepcopy(module)

    def trained(model, optimizer, ranks):
        def batches(step=0):
            return [share(rank, step) for rank in ranks]

        return {**(train(model, optimizer, batches) or {}), **whole(model, optimizer)}

    params = groups(module) if grouped else None
    ours = trained(*stage(module, kind, params, **options), [dist.get_rank()])
    alone = kind[0](groups(plain) if grouped else plain.parameters(), **kind[1])
    return apart(ours, trained(plain, alone, range(dist.get_world_size())), allowed)


def each_step(loop):
    """To train by the loop: what is there after each step."""

    def train(model, optimizer, batches):
        found = {}
        for step in range(4):
            now = {**(loop(model, optimizer, batches(step), step) or {}), **whole(model, optimizer)}
            found |= {f"{name}, step {step}": value.clone() for name, value in now.items()}
            if isinstance(model, md.ShardedDataParallel):
                left = [p.grad for p in model.parameters() if p.grad is not None]
                assert not any(gradient.untyped_storage().nbytes() for gradient in left)
        return found

    return train


@BOTH
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: getattr(loop, "__name__", "clipped"))
def test_any_loop(pools, stage, loop):
    assert pools(3)(in_turns, stage, each_step(loop), kind=ADAM) == [[]] * 3


MODELS = {
    "layouts": (Odd, 1e-11),
    "dtypes, frozen": (Mixed, 1e-5),
    "sometimes": (Sometimes, 1e-12),
}


@BOTH
@pytest.mark.parametrize("cap", [TINY, LARGE])
@pytest.mark.parametrize("name", MODELS)
def test_any_model(pools, stage, name, cap):
    make, allowed = MODELS[name]
    if stage is stage1:  # DDP wants to be told
        stage = partial(
            stage1, wrap=partial(md.DistributedDataParallel, find_unused_parameters=True)
        )
    run = partial(in_turns, stage, each_step(plainly), make, ADAM, cap=cap, allowed=allowed)
    assert pools(2)(run) == [[]] * 2


def test_gradients_of_another_layout(pools):
    def contiguous():
        torch.manual_seed(0)
        module = Odd()
        plain = copy.deepcopy(module)
        optimizers = [zero(module.parameters()), torch.optim.Adam(plain.parameters())]
        for model, optimizer in zip((module, plain), optimizers, strict=True):
            for p in model.parameters():
                p.grad = torch.arange(float(p.numel()), dtype=p.dtype).view(p.shape)
            optimizer.step()
            model.zero_grad()
            optimizer.step()  # without gradients it passes over all
        return apart(whole(module, optimizers[0]), whole(plain, optimizers[1]))

    assert pools(2)(contiguous) == [[]] * 2


@BOTH
@pytest.mark.parametrize("kind", [ADAM, SGD, (torch.optim.NAdam, {}), (torch.optim.Rprop, {})])
def test_groups_with_options_of_their_own(pools, stage, kind):
    assert pools(2)(in_turns, stage, each_step(plainly), net, kind, grouped=True) == [[]] * 2


class Momentum(torch.optim.Optimizer):
    """It makes its states at once, as Adagrad does."""

    elementwise = True

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["momentum"] = torch.ones_like(p)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * self.state[p]["momentum"].add_(p.grad)


@pytest.mark.parametrize("stage", [stage1, stage2], ids=["1", "2"])
def test_states_that_an_optimizer_makes_at_once(pools, stage):
    run = partial(in_turns, stage, each_step(plainly), kind=(Momentum, {}))
    assert pools(2)(run) == [[]] * 2


@BOTH
def test_learning_rate_schedulers(pools, stage):
    def scheduled():
        module = net()
        plain = copy.deepcopy(module)
        model, optimizer = stage(module, SGD, groups(module))
        alone = SGD[0](groups(plain), **SGD[1])
        schedulers = [
            torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[0.3, 0.2], total_steps=5)
            for o in (optimizer, alone)
        ]
        for step in range(4):
            shares = [share(rank, step) for rank in range(2)]
            plainly(model, optimizer, [shares[dist.get_rank()]])
            plainly(plain, alone, shares)
            for scheduler in schedulers:
                scheduler.step()
        rates = [[g["lr"] for g in o.param_groups] for o in (optimizer, alone)]
        return rates[0] == rates[1], apart(whole(model, optimizer), whole(plain, alone))

    assert pools(2)(scheduled) == [(True, [])] * 2


def add_a_group(optimizer, module):
    optimizer.add_param_group({"params": list(module[4:].parameters()), "lr": 0.1})


def unfreeze(optimizer, module):
    frozen, group = module[0].bias, optimizer.param_groups[0]
    group["params"] = [each for each in group["params"] if each is not frozen]
    frozen.requires_grad_(True)
    optimizer.add_param_group({"params": [frozen]})


def remove_a_parameter(optimizer, module):
    del optimizer.param_groups[0]["params"][0]


def remove_a_group(optimizer, module):
    optimizer.param_groups.pop()


def move_a_parameter(optimizer, module):
    moved = optimizer.param_groups[0]["params"].pop(0)
    optimizer.add_param_group({"params": [moved], "lr": 1e-3})


def another_state(groups):
    """Of an Adam that has had other gradients for these parameters."""
    other = torch.optim.Adam([{"params": each["params"], "lr": 0.0} for each in groups])
    for number, p in enumerate(p for group in groups for p in group["params"]):
        p.grad = torch.full_like(p, number + 1.0) if p.requires_grad else None
    other.step()
    for number, group in enumerate(other.param_groups):
        group["lr"] = 1e-2 / (number + 1)
    return other.state_dict()


@pytest.mark.parametrize("loaded", [False, True], ids=["", "loaded"])
@pytest.mark.parametrize(
    "change", [add_a_group, remove_a_group, unfreeze, remove_a_parameter, move_a_parameter]
)
def test_groups_that_change(pools, change, loaded):
    def train():
        module = net()
        module[0].bias.requires_grad_(False)
        plain = copy.deepcopy(module)
        model = md.DistributedDataParallel(module)
        optimizer = sharded(module[:2].parameters(), torch.optim.Adam, lr=1e-2)
        alone = torch.optim.Adam(plain[:2].parameters(), lr=1e-2)
        for each, layers in (optimizer, module), (alone, plain):
            each.add_param_group({"params": list(layers[2:4].parameters()), "lr": 1e-3})
        for step in range(4):
            if step == 1:
                change(optimizer, module)
                change(alone, plain)
                model = md.DistributedDataParallel(module)  # which may train what was frozen
            if step == 1 and loaded:
                state = another_state(alone.param_groups)
                for each in optimizer, alone:
                    each.load_state_dict(copy.deepcopy(state))
            model.zero_grad()
            plain.zero_grad()
            shares = [share(rank, step) for rank in range(2)]
            plainly(model, optimizer, [shares[dist.get_rank()]])
            plainly(plain, alone, shares)
        if change in (remove_a_group, remove_a_parameter):  # then torch cannot save the states
            return apart(module.state_dict(), plain.state_dict())
        return apart(whole(model, optimizer), whole(plain, alone))

    assert pools(2)(train) == [[]] * 2


@pytest.mark.parametrize("loop", LOOPS[:2] + LOOPS[-2:], ids=["plain", "accumulate", "inf", "1"])
def test_gradients_of_several_optimizers(pools, loop):
    """One for the weights and one for the biases: of another kind."""

    class Both:
        """Used like one optimizer."""

        def __init__(self, module, make):
            named = dict(module.named_parameters())
            self.each = [
                make([p for name, p in named.items() if ("bias" in name) == biases], *kind)
                for biases, kind in ((False, ADAM), (True, SGD))
            ]

        def zero_grad(self):
            for each in self.each:
                each.zero_grad()

        def step(self):
            for each in self.each:
                each.step()

    def train():
        rank, size = dist.get_rank(), dist.get_world_size()
        module = net()
        plain = copy.deepcopy(module)
        both = Both(module, lambda p, kind, options: zero(p, kind, **options))
        alone = Both(plain, lambda p, kind, options: kind(p, **options))
        model = md.ShardedDataParallel(module, both.each)
        for step in range(3):
            loop(model, both, [share(rank, step)], step)
            loop(plain, alone, [share(r, step) for r in range(size)], step)
        return apart(model.state_dict(), plain.state_dict())

    assert pools(2)(train) == [[], []]


class Scaled(torch.optim.SGD):
    """Its step takes more than a closure."""

    elementwise = True

    @torch.no_grad()
    def step(self, closure=None, *, scale=1.0):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * scale * p.grad


CLIPS = {
    "1-norm": partial(nn.utils.clip_grad_norm_, max_norm=0.1, norm_type=1.0),
    "2-norm": partial(nn.utils.clip_grad_norm_, max_norm=0.1),
    "largest": partial(nn.utils.clip_grad_norm_, max_norm=0.1, norm_type=float("inf")),
    "each": partial(nn.utils.clip_grad_value_, clip_value=0.001),
    "2-norm, at once": partial(nn.utils.clip_grad_norm_, max_norm=0.1, foreach=True),
    "each, at once": partial(nn.utils.clip_grad_value_, clip_value=0.001, foreach=True),
}


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("size", [2, 4])
def test_torchs_clipping_is_right_in_stage_2(pools, size, clip):
    """Also with passes that add up, in the shards and before they are cut."""

    def loop(model, optimizer, batches, step):
        model.zero_grad(step % 2 == 0)
        for waits in (False, True, False):
            with without_averages(model, waits):
                backward(model, batches)
        norm = CLIPS[clip](model.parameters())
        assert norm is None or norm > 0.1
        if isinstance(model, md.ShardedDataParallel):
            with pytest.raises(RuntimeError, match="gradient is in shards, one on each rank"):
                print(next(model.parameters()).grad + 1)
        optimizer.step()
        return {} if norm is None else {"norm": norm}

    assert pools(size)(in_turns, stage2, each_step(loop)) == [[]] * size


def test_a_later_pass_may_leave_out_what_is_in_shards(pools):
    """`Sometimes` uses one half at the first of two passes alone."""
    run = partial(in_turns, stage2, each_step(several_backward_passes), Sometimes)
    assert pools(2)(run) == [[]] * 2


def test_gradients_of_the_bare_module_add_up_with_those_in_shards(pools):
    """Of the same examples on every rank, as a penalty may be. Two steps, without zero_grad."""

    def train(model, optimizer, batches):
        backward(model, batches())
        loss_of(module_of(model)(share(7))).backward()
        for _ in range(2):
            optimizer.step()

    assert pools(2)(in_turns, stage2, train) == [[]] * 2


REMOVALS = {
    "the module's": lambda model: module_of(model).zero_grad(),
    "the wrapper's": lambda model: model.zero_grad(),
    "one by one": lambda model: [setattr(p, "grad", None) for p in model.parameters()],
    "the last one's": lambda model: setattr([*model.parameters()][-1], "grad", None),
}


@pytest.mark.parametrize("when", ["before a pass", "before a step"])
@pytest.mark.parametrize("how", REMOVALS)
@BOTH
def test_a_gradient_that_is_set_to_none_is_none(pools, stage, how, when):
    def train(model, optimizer, batches):
        for step in range(3):
            backward(model, batches(step))
            if step == 1:
                REMOVALS[how](model)
            if when != "before a pass" or step == 2:
                optimizer.step()

    assert pools(2)(in_turns, stage, train) == [[]] * 2


NORMS = pytest.mark.parametrize("norm", ["", "torch's", "the model's"])


@pytest.mark.parametrize("another", [False, True], ids=["", "another pass"])
@NORMS
@BOTH
def test_a_gradient_that_is_replaced_is_the_new_one(pools, stage, norm, another):
    def replace(model, step):
        for number, parameter in enumerate(model.parameters()):
            if number % 2 == step % 2:
                parameter.grad = torch.full_like(parameter, 0.3)

    def train(model, optimizer, batches):
        for step in range(4):
            optimizer.zero_grad()
            backward(model, batches(step))
            replace(model, step)
            if another:
                backward(model, batches(step + 1))
            clip_by(norm, model)
            optimizer.step()

    assert pools(2)(in_turns, stage, train) == [[]] * 2


@NORMS
@pytest.mark.parametrize("others", [0, 1], ids=["", "others are new"])
@BOTH
def test_a_gradient_that_is_put_back(pools, stage, norm, others):
    """After a pass that was not averaged."""

    def train(model, optimizer, batches):
        backward(model, batches())
        # DistributedDataParallel lets the next pass take a gradient's memory.
        stays = isinstance(model, md.ShardedDataParallel)
        kept = [p.grad if stays else p.grad.clone() for p in model.parameters()]
        optimizer.zero_grad()
        with without_averages(model):
            backward(model, batches(3))
        for number, (p, gradient) in enumerate(zip(model.parameters(), kept, strict=True)):
            p.grad = torch.full_like(p, 0.3) if others and number % 2 else gradient
        clip_by(norm, model)
        optimizer.step()

    assert pools(2)(in_turns, stage, train) == [[]] * 2


def beside(model, own, **options):
    """A pass that is not averaged: of the module itself, or one of the wrapper's own. It is of the
    same examples on all ranks."""
    with without_averages(model, own):
        loss_of((model if own else module_of(model))(share(5))).backward(**options)


BESIDE = pytest.mark.parametrize("own", [True, False], ids=["no_sync", "of the module"])


@pytest.mark.parametrize("another", [False, True], ids=["", "another pass"])
@pytest.mark.parametrize("then", ["zeros", "a new gradient", "a graph"])
@BESIDE
@BOTH
def test_a_gradient_beside_one_in_shards(pools, stage, own, then, another):
    def train(model, optimizer, batches):
        backward(model, batches())
        for graph in [False, True] if then == "a graph" else [False]:
            beside(model, own, create_graph=graph)
        if then == "zeros":
            optimizer.zero_grad(set_to_none=False)
        elif then == "a new gradient":
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.3)
        if another:
            backward(model, batches(1))
        optimizer.step()

    assert pools(2)(in_turns, stage, train) == [[]] * 2


@BESIDE
def test_torchs_clipping_of_gradients_with_none_in_shards(pools, own):
    """Those of the same examples on all ranks are whole."""

    def train(model, optimizer, batches):
        beside(model, own)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    assert pools(2)(in_turns, stage2, train) == [[]] * 2


@BESIDE
def test_clipping_with_gradients_beside_shards(pools, own):
    def train(model, optimizer, batches):
        backward(model, batches())
        beside(model, own)
        if isinstance(model, md.ShardedDataParallel):
            with pytest.raises(RuntimeError, match="call the model's clip_grad_norm_ in place of"):
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        norms = [clip_by("the model's", model)]
        beside(model, own)  # more, to what has been clipped
        norms.append(clip_by("the model's", model))
        optimizer.step()
        return {"norms": torch.stack(norms)}

    assert pools(2)(in_turns, stage2, train) == [[]] * 2


@BESIDE
def test_a_pass_that_fails_leaves_what_it_and_others_have_given(pools, own):
    """As in one process: a hook raises, the last one of a pass that is not averaged."""

    def train(model, optimizer, batches):
        failing = []

        def fails(_):
            if failing:
                raise ZeroDivisionError

        module_of(model)[0].weight.register_post_accumulate_grad_hook(fails)
        module_of(model)[0].bias.register_post_accumulate_grad_hook(fails)
        for step in range(2):
            backward(model, batches(step))
        failing.append(True)
        with pytest.raises(ZeroDivisionError):
            beside(model, own)
        failing.clear()
        backward(model, batches(1))
        optimizer.step()

    assert pools(2)(in_turns, stage2, train) == [[]] * 2


@contextlib.contextmanager
def failing(register):
    """By a hook that raises, which this function registers."""
    hook = register(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        yield
    hook.remove()


EACH_ALONE = 1  # byte of a bucket


@pytest.mark.parametrize("cap", [EACH_ALONE, TINY])
@pytest.mark.parametrize("last", [0, 1, 2], ids=lambda layer: f"in layer {layer}")
@pytest.mark.parametrize("node", [False, True], ids=["", "of the node"])
def test_an_averaged_pass_that_fails_leaves_what_is_in_shards(pools, node, last, cap):
    """Also of the buckets that have travelled. The hook of a node comes after ours."""

    def train(model, optimizer, batches):
        backward(model, batches())
        alone = not isinstance(model, md.ShardedDataParallel)
        before = [p.grad.clone() if alone else p.grad for p in model.parameters()]
        bias = module_of(model)[2 * last].bias
        gradient = get_gradient_edge(bias).node
        with failing(gradient.register_prehook if node else bias.register_hook):
            backward(model, batches(1))
        if alone:
            for p, gradient in zip(model.parameters(), before, strict=True):
                p.grad = gradient
        optimizer.step()

    assert pools(2)(in_turns, stage2, train, cap=cap) == [[]] * 2


@pytest.mark.parametrize("cap", [EACH_ALONE, TINY])
@pytest.mark.parametrize("averaged", [True, False], ids=["", "no_sync"])
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_gradient_that_is_set_after_a_pass_that_failed(pools, kind, averaged, cap):
    def train(model, optimizer, batches):
        backward(model, batches())
        bias = module_of(model)[2].bias
        with failing(getattr(bias, kind)), without_averages(model, not averaged):
            backward(model, batches(1))
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.3)
        optimizer.step()

    assert pools(2)(in_turns, stage2, train, cap=cap) == [[]] * 2


def test_clipping_leaves_a_gradient_that_the_user_keeps(pools):
    def train():
        model, optimizer = stage2(net(), SGD)
        kept = [torch.full_like(p, 0.3) for p in model.parameters()]
        for parameter, gradient in zip(model.parameters(), kept, strict=True):
            parameter.grad = gradient
        assert model.clip_grad_norm_(0.1) > 0.1
        held = {shard.grad.untyped_storage().data_ptr() for shard in optimizer.shards}
        kept_there = [g for g in kept if g.untyped_storage().data_ptr() in held]
        return kept_there, [g for g in kept if (g != 0.3).any()]

    assert pools(2)(train) == [([], [])] * 2


def test_gradients_that_are_kept_and_their_data(pools):
    """In stage 2: an earlier pass's gradients are added to those of the next one."""

    def train(model, optimizer, batches):
        kept, norms = [], []
        for step in range(2):
            optimizer.zero_grad()
            backward(model, batches(step))
            kept.append([p.grad for p in model.parameters()])
        for early, late in zip(*kept, strict=True):
            late.data.mul_(0.5).add_(early.detach())
            norms.append(late.data.norm())
        optimizer.step()
        return {"norms": torch.stack(norms)}

    assert pools(2)(in_turns, stage2, train) == [[]] * 2


ELEMENTS = {
    "a number": lambda g, p: g.mul_(2).clamp_(-0.1, 0.1),
    "noise": lambda g, p: g.add_(torch.arange(p.numel()).view(p.shape), alpha=0.1),
    "decay": lambda g, p: g.lerp_(p.detach(), 0.1),
    "a mask": lambda g, p: g.masked_fill_(p.detach() > 0, 0),
    "columns": lambda g, p: g.mul_(torch.arange(p.shape[-1])),
    "all at once": lambda g, p: torch._foreach_add_([g, g], [p.detach(), p.detach()]),
}


@pytest.mark.parametrize("how", ELEMENTS)
@BOTH
def test_what_is_done_to_each_element_of_a_gradient(pools, stage, how):
    def transposed():
        module = net()
        module[0].weight.data = module[0].weight.data.t().contiguous().t()
        return module

    def train(model, optimizer, batches):
        backward(model, batches())
        for parameter in model.parameters():
            ELEMENTS[how](parameter.grad, parameter)
        optimizer.step()

    assert pools(2)(in_turns, stage, train, transposed) == [[]] * 2


def test_what_autograd_grad_computes_leaves_gradients_in_their_shards(pools):
    def train():
        module = net()
        model, optimizer = stage2(module, SGD)
        output = model(share(dist.get_rank()))
        loss_of(output).backward(retain_graph=True)
        before = [shard.grad.clone() for shard in optimizer.shards]
        torch.autograd.grad(output.sum(), list(module.parameters()))
        weights = copy.deepcopy(module.state_dict())
        optimizer.step()
        moved = apart(module.state_dict(), weights, 0)
        after = [shard.grad for shard in optimizer.shards]
        return all(map(torch.equal, before, after)) and len(moved) == len(weights)

    assert all(pools(2)(train))


@BOTH
def test_states_that_are_removed_begin_anew(pools, stage):
    """As for a warm restart. Of one parameter, or of all."""

    def train(model, optimizer, batches):
        for step in range(4):
            optimizer.zero_grad()
            backward(model, batches(step))
            if step == 1:
                optimizer.state.clear()
            if step == 3:
                first = module_of(model)[0]
                optimizer.state.pop(first.weight, None)
                optimizer.state[first.bias] = {}
            optimizer.step()

    assert pools(2)(in_turns, stage, train) == [[]] * 2


def test_what_the_optimizers_own_step_takes(pools):
    def train():
        module = net()
        plain = copy.deepcopy(module)
        optimizer, alone = (
            zero(module.parameters(), Scaled, lr=0.1),
            Scaled(plain.parameters(), 0.1),
        )

        def closure():
            loss_of(module(share(0))).backward()
            return 3

        assert optimizer.step(closure, scale=0.5) == 3
        loss_of(plain(share(0))).backward()
        alone.step(scale=0.5)
        return apart(module.state_dict(), plain.state_dict())

    assert pools(2)(train) == [[], []]


def test_states_on_all_ranks_at_once(pools):
    def train():
        module = net()
        model, optimizer = stage1(module, ADAM)
        plainly(model, optimizer, [share(dist.get_rank())])
        optimizer.consolidate_state_dict(to=None)
        at_once = optimizer.state_dict()["state"]
        found = []
        for to in range(2):
            optimizer.consolidate_state_dict(to)
            if to == dist.get_rank():
                for number, states in optimizer.state_dict()["state"].items():
                    found += [torch.equal(states[name], at_once[number][name]) for name in states]
        return len(found) == len(at_once) * 3 and all(found)

    assert pools(2)(train) == [True, True]


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_and_a_group_of_some_ranks(pools, stage, dtype):
    def some():
        group = dist.new_group([0, 2])
        if dist.get_rank() == 1:
            with pytest_raises(ValueError):
                md.ZeroRedundancyOptimizer(net().parameters(), torch.optim.Adam, group)
            return []
        module = net(dtype=dtype)
        plain = copy.deepcopy(module)
        model, optimizer = stage(module, SGD, group=group)
        alone = SGD[0](plain.parameters(), **SGD[1])
        for step in range(2):
            shares = [share(rank, step, dtype=dtype) for rank in range(2)]
            plainly(model, optimizer, [shares[dist.get_rank(group)]])
            plainly(plain, alone, shares)
        allowed = 0.1 if dtype is torch.bfloat16 else 1e-4
        return apart(model.state_dict(), plain.state_dict(), allowed)

    assert pools(3)(some) == [[]] * 3


@contextlib.contextmanager
def pytest_raises(kind):
    try:
        yield
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


# ---- torch's own ------------------------------------------------------------------------------


def test_the_arguments_are_torchs_in_torchs_order():
    with warnings.catch_warnings(action="ignore"):  # it imports torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

    *theirs, _ = inspect.signature(TorchZero).parameters
    assert list(inspect.signature(md.ZeroRedundancyOptimizer).parameters)[: len(theirs)] == theirs


@pytest.mark.parametrize("views", [False, True])
def test_it_trains_with_torchs_arguments(pools, views):
    def make(module):
        parameters = module.parameters()
        adam = md.ZeroRedundancyOptimizer(parameters, torch.optim.Adam, None, views, False, lr=1e-3)
        return md.DistributedDataParallel(module), adam

    def run():
        (model, ours), (other, usual) = make(net()), stage1(net(), ADAM, cap=LARGE)
        for step in range(2):
            for each, optimizer in (model, ours), (other, usual):
                plainly(each, optimizer, [share(dist.get_rank(), step)])
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        return [torch.equal(a, b) for a, b in pairs], list(ours.defaults) == list(usual.defaults)

    assert pools(2)(run) == [([True] * 6, True)] * 2


@BOTH
def test_the_same_as_torchs_own(pools, stage):
    def both():
        with warnings.catch_warnings(action="ignore"):  # it imports torch.jit
            from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

        module = net(dtype=torch.float32)
        theirs = TorchDDP(copy.deepcopy(module))
        their = TorchZero(theirs.parameters(), torch.optim.Adam, lr=1e-3)
        model, optimizer = stage(module, ADAM)
        for step in range(3):
            x = share(dist.get_rank(), step, dtype=torch.float32)
            plainly(model, optimizer, [x])
            plainly(theirs, their, [x])
        their.consolidate_state_dict()
        box = [their.state_dict() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(box)
        names = [name for name, _ in module.named_parameters()]
        wanted = {
            f"{key} of {names[i]}": value
            for i, state in box[0]["state"].items()
            for key, value in state.items()
        }
        found = apart(whole(model, optimizer), {**wanted, **theirs.module.state_dict()}, 1e-6)
        optimizer.load_state_dict(box[0])  # to the bit
        return found + apart(whole(model, optimizer), {**wanted, **model.state_dict()}, 0)

    assert pools(2)(both) == [[]] * 2


# ---- bytes ------------------------------------------------------------------------------------


def measured(stage, cap, sizes=(64, 32, 10), passes=1):
    model, optimizer = stage(net(*sizes, dtype=torch.float32), ADAM, cap=cap)
    x = torch.randn(4, 64)

    def step():
        for _ in range(passes):
            model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    memory, traffic = least_memory_of(step, model, optimizer)
    flats = [len(flat.flat) for flat in optimizer._flats]
    return memory.after("backward"), memory.peak_of, traffic.calls, flats, len(optimizer.shards)


@BOTH
@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_that_a_rank_holds(pools, stage, world_size):
    elements = 64 * 32 + 32 + 32 * 10 + 10  # Ψ = 2410
    padded = -(-elements // world_size) * world_size  # one bucket
    shard = padded // world_size
    for rank, (live, _, _, _, pieces) in enumerate(pools(world_size)(measured, stage, LARGE)):
        own = min(shard, elements - rank * shard)  # the last rank's, without the padding
        assert live["parameters"] == 4 * padded
        assert live["gradients"] == 4 * (elements if stage is stage1 else shard)
        assert live["optimizer states"] == 8 * own + 4 * pieces  # and a count of steps each


@pytest.mark.parametrize("passes", [1, 2])
def test_the_whole_gradient_is_never_there(pools, passes):
    layers = [64] * 17
    for live, peak, _, flats, _ in pools(4)(measured, stage2, 4 * 64 * 65, layers, passes):
        assert len(flats) >= 16
        assert live["gradients"] == 4 * sum(flats) // 4
        # One bucket fills, one travels, and a gradient is copied into its bucket; gloo's thread
        # keeps what it has sent a moment longer.
        most = 4 * (passes * sum(flats) // 4 + 5 * max(flats))
        assert peak["gradients"] + peak["other"] <= most < 4 * sum(flats)


@pytest.mark.parametrize("how", ["zero_grad", "step", "kept"])
def test_no_memory_is_held_for_gradients_that_are_gone(pools, how):
    """By none of their pieces, of which some have no elements."""

    def are_gone():
        shards = []

        def noted(x, group):
            arrive = reduce_scatter(x, group)

            def wait():
                shard = arrive()
                shards.append(StorageWeakRef(shard.untyped_storage()))
                return shard

            return wait

        sharded_ddp.reduce_scatter = noted
        try:
            model, optimizer = stage2(net(*[64] * 5), SGD, cap=LARGE)
            model(torch.ones(4, 64).double()).sum().backward()
        finally:
            sharded_ddp.reduce_scatter = reduce_scatter
        first = next(model.parameters())  # the last rank's
        kept = first.grad if how == "kept" else None
        REMOVALS["the module's"](model)
        optimizer.zero_grad() if how == "zero_grad" else optimizer.step()
        return [shard.expired() for shard in shards], isinstance(kept, torch.Tensor)

    kept = how == "kept"
    assert pools(3)(are_gone) == [([True], kept), ([True], kept), ([not kept], kept)]


@BOTH
@pytest.mark.parametrize("cap", [1000, LARGE])
def test_traffic(pools, stage, cap):
    """2Ψ(N-1)/N: a reduce_scatter and an all_gather of Ψ; gloo's are calls for each shard."""

    def counted():
        return dist.get_backend(), *measured(stage, cap)

    for backend, _, _, calls, flats, _ in pools(2)(counted):
        n, nbytes = len(flats), 4 * sum(flats)
        assert n == (1 if cap == LARGE else 2)
        gathered = {"gloo": ("broadcast", (2 * n, nbytes)), "shm": ("all_gather", (n, nbytes))}
        reduced = {"gloo": ("reduce", (2 * n, nbytes)), "shm": ("reduce_scatter", (n, nbytes))}
        expected = dict([gathered[backend]])
        if stage is stage1:
            expected["all_reduce"] = 1, 4 * 2410
        else:  # and which parameters have a gradient, a byte each
            expected |= dict([reduced[backend]]) | {"all_reduce": (1, 4)}
        assert calls == expected


@BOTH
def test_no_list_of_shards_travels(pools, stage):
    """NCCL would copy each of them once more."""

    def train():
        def refuse(*args, **options):
            raise AssertionError("a list of tensors")

        model, optimizer = stage(net(), ADAM)
        functions = dist.all_gather, dist.reduce_scatter
        dist.all_gather = dist.reduce_scatter = refuse
        try:
            plainly(model, optimizer, [share(dist.get_rank())])
        finally:
            dist.all_gather, dist.reduce_scatter = functions

    assert pools(2)(train) == [None, None]


# ---- checkpoints ------------------------------------------------------------------------------


def some_steps(stage, steps, make=net, state=None, kind=ADAM):
    """Train, from a checkpoint if one is given. Returns another one, of rank 0's."""
    model, optimizer = stage(make(), kind)
    if state is not None:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
        assert all(states["step"].ndim == 0 for states in optimizer.state.values())
    for step in steps:
        plainly(model, optimizer, [share(0, step)])
    optimizer.consolidate_state_dict()
    if dist.get_rank() == 0:
        return copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))


def alone_for(steps, make=net, state=None, kind=ADAM):
    model = make()
    optimizer = kind[0](model.parameters(), **kind[1])
    if state is not None:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
    for step in steps:
        plainly(model, optimizer, [share(0, step)])
    return model.state_dict(), optimizer.state_dict()


def seeded(make):
    torch.manual_seed(0)
    return make()


def differ(a, b):
    """Between two checkpoints."""
    flat = [
        {
            **m,
            **{f"{i}.{k}": torch.as_tensor(v) for i, s in o["state"].items() for k, v in s.items()},
        }
        for m, o in (a, b)
    ]
    same = [a[1]["param_groups"] == b[1]["param_groups"]]
    return apart(*flat, 1e-9) + [f"options {a[1]['param_groups']}"] * (not all(same))


@BOTH
@pytest.mark.parametrize("make", [net, partial(seeded, Odd)], ids=["net", "layouts"])
def test_saved_at_4_ranks_loaded_at_any_number_and_without_minidist(pools, stage, make):
    if make is not net:
        stage = stage2
    saved = pools(4)(some_steps, stage, range(3), make)[0]
    wanted = alone_for(range(6), make)
    for world_size in (2, 3):
        on = pools(world_size)(some_steps, stage, range(3, 6), make, saved)[0]
        assert differ(on, wanted) == []
    assert differ(alone_for(range(3, 6), make, saved), wanted) == []
    plain = alone_for(range(3), make)
    assert differ(pools(2)(some_steps, stage, range(3, 6), make, plain)[0], wanted) == []


def test_hooks_before_a_load_may_change_the_states(pools):
    def run():
        model, optimizer = stage1(net(), ADAM)
        model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
        optimizer.step()
        optimizer.consolidate_state_dict(None)

        def double(_, state):
            states = {n: {k: 2 * v for k, v in each.items()} for n, each in state["state"].items()}
            return {**state, "state": states}

        before = {n: s["exp_avg"].clone() for n, s in optimizer.state_dict()["state"].items()}
        optimizer.register_load_state_dict_pre_hook(double)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.consolidate_state_dict(None)
        after = optimizer.state_dict()["state"]
        return [torch.equal(2 * value, after[n]["exp_avg"]) for n, value in before.items()]

    assert all(map(all, pools(2)(run)))


# ---- mistakes ---------------------------------------------------------------------------------


class Norm(torch.optim.SGD):
    """As LARS: the step depends on the norm of the parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.norm() * p.grad


def fails_with(fault):
    """On a rank: what `fault` raises."""
    try:
        fault(dist.get_rank())
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def zero(params, optimizer_class=torch.optim.Adam, **options):
    return md.ZeroRedundancyOptimizer(params, optimizer_class, **options)


def other_shapes(rank):
    zero(net(6, 5 + rank, 3).parameters())


def one_less(rank):
    zero(list(net().parameters())[rank:])


def nothing_on_one(rank):
    zero([] if rank else net().parameters())


def other_rates(rank):
    zero(net().parameters(), lr=0.1 + rank)


def another_model(rank):
    optimizer, other = (zero(net(*sizes).parameters()) for sizes in ((6, 5, 3), (6, 4, 3)))
    for parameter in (p for group in other.param_groups for p in group["params"]):
        parameter.grad = torch.ones_like(parameter)
    other.step()
    for to in range(2):
        other.consolidate_state_dict(to)
    optimizer.load_state_dict(other.state_dict())


def other_groups(rank):
    optimizer = zero(net().parameters())
    state = torch.optim.Adam(list(net().parameters())[1:]).state_dict()
    optimizer.load_state_dict(state)


def not_consolidated(rank):
    optimizer = zero(net().parameters())
    for to in range(2):
        optimizer.consolidate_state_dict(to)
    optimizer.state_dict()
    optimizer.step()
    optimizer.state_dict()


def converted(rank):
    module = net()
    optimizer = zero(module.parameters())
    module.float()
    optimizer.step()


def unfrozen(rank):
    module = net()
    module[0].bias.requires_grad_(False)
    optimizer = zero(module.parameters())
    module[0].bias.requires_grad_(True)
    module(share(rank)).sum().backward()
    optimizer.step()


def by_hand(rank):
    module = net()
    optimizer = zero(module[0].parameters())
    optimizer.param_groups[0]["params"].append(module[2].weight)
    module(share(rank)).sum().backward()
    optimizer.step()


def sparse(rank, clip=False):
    """Rank 0 has no part of the embedding."""
    module = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 9))
    optimizer = zero(module.parameters())
    model = md.ShardedDataParallel(module, optimizer) if clip else module
    module(torch.tensor([rank])).sum().backward()
    model.clip_grad_norm_(0.1) if clip else optimizer.step()


def of_rows(rank):
    """As to train some rows of a table alone."""
    module = net()
    model, _ = stage2(module, ADAM)
    loss_of(model(share(rank))).backward()
    module[0].weight.grad[torch.tensor([0, 1])] = 0


def norms_of_rows(rank):
    module = net()
    model, _ = stage2(module, ADAM)
    loss_of(model(share(rank))).backward()
    module[0].weight.grad.norm(dim=1)


def sharing_memory(rank):
    module = net(6, 6)
    module.append(nn.Linear(6, 6).double())[-1].weight.data = module[0].weight.data.t()
    zero(module.parameters())


def wrap(optimizer_of):
    module = net()
    md.ShardedDataParallel(module, optimizer_of(module))


def another_step(rank, **options):
    module = net()
    model, _ = stage2(module, ADAM)
    loss_of(model(share(rank))).backward()
    torch.optim.SGD(module.parameters(), **options).step()


MISTAKES = {
    "shapes": (
        other_shapes,
        "ValueError",
        "about parameter 0 of group 0: rank 0 says shape (5, 6), float64, rank 1 ",
    ),
    "one less": (one_less, "ValueError", "disagree about the number of parameters in group 0"),
    "nothing on one": (nothing_on_one, "ValueError", "rank 1: optimizer got an empty parameter"),
    "rates": (other_rates, "ValueError", "disagree about the options of group 0"),
    "no optimizer": (
        lambda rank: zero(net().parameters(), nn.Linear),
        "TypeError",
        "optimizer_class must be an optimizer, not <class",
    ),
    "an instance": (
        lambda rank: zero(net().parameters(), torch.optim.SGD(net().parameters())),
        "TypeError",
        "optimizer_class must be an optimizer, not SGD",
    ),
    "other buckets": (
        lambda rank: zero(net().parameters(), bucket_cap_mb=25 - rank),
        "ValueError",
        "disagree about bucket_cap_mb: rank 0 says 25, rank 1 says 24",
    ),
    "no buckets": (
        lambda rank: zero(net().parameters(), bucket_cap_mb=0),
        "ValueError",
        "bucket_cap_mb must be more than 0, not 0",
    ),
    "a step within backward": (
        lambda rank: zero(net().parameters(), overlap_with_ddp=True),
        "ValueError",
        "not take overlap_with_ddp=True: here a step begins when the backward pass has ended",
    ),
    "an option": (lambda rank: zero(net().parameters(), lr=-1), "ValueError", "Invalid learning"),
    "LBFGS": (
        lambda rank: zero(net().parameters(), torch.optim.LBFGS),
        "TypeError",
        "LBFGS cannot train shards",
    ),
    "Adafactor": (
        lambda rank: zero(net().parameters(), torch.optim.Adafactor),
        "TypeError",
        "Adafactor cannot train shards of parameters: it looks at more than one element at a time",
    ),
    "norms": (
        lambda rank: zero(net().parameters(), Norm),
        "TypeError",
        "Norm cannot train shards of parameters: it may look at more than one element at a time. "
        "Give ZeroRedundancyOptimizer an elementwise one, such as Adam; if this is one, let its "
        "class say elementwise = True",
    ),
    "another model": (another_model, "ValueError", "of another model: exp_avg of parameter 0"),
    "groups": (other_groups, "ValueError", "doesn't match the size"),
    "not consolidated": (not_consolidated, "RuntimeError", "consolidate_state_dict(to="),
    "converted": (converted, "RuntimeError", "moved or converted since"),
    "unfrozen": (unfrozen, "RuntimeError", "frozen when the optimizer was made"),
    "a parameter by hand": (by_hand, "RuntimeError", "into a group by hand: use add_param_group"),
    "sparse": (sparse, "RuntimeError", "a sparse gradient cannot be cut into shards: sparse=True"),
    "sparse, clipped": (partial(sparse, clip=True), "RuntimeError", "a sparse gradient cannot be"),
    "shared memory": (sharing_memory, "ValueError", "rank 0: two parameters share memory, of"),
    "another optimizer": (
        lambda rank: wrap(lambda m: torch.optim.Adam(m.parameters())),
        "TypeError",
        "needs a ZeroRedundancyOptimizer",
    ),
    "other parameters": (
        lambda rank: wrap(lambda m: zero((m if rank else net()).parameters())),
        "ValueError",
        "rank 0: the optimizer does not have the module's parameter 0.weight",
    ),
    "two owners": (
        lambda rank: wrap(lambda m: [zero(m.parameters()), zero(m[0].parameters())]),
        "ValueError",
        "2 parameters are in two optimizers: each needs one owner",
    ),
    "no optimizers": (lambda rank: wrap(lambda m: []), "TypeError", "not list"),
    "one of another kind": (
        lambda rank: wrap(lambda m: [zero(m.parameters()), torch.optim.SGD(m.parameters())]),
        "TypeError",
        "needs a ZeroRedundancyOptimizer, which knows who owns what, not SGD",
    ),
    "copied": (
        lambda rank: copy.deepcopy(stage2(net(), ADAM)[0]),
        "TypeError",
        "a ShardedDataParallel cannot be copied or saved: its optimizer has its gradients. Copy",
    ),
    "the optimizer copied": (
        lambda rank: copy.deepcopy(stage2(net(), ADAM)[1]).step(),
        "TypeError",
        "a ZeroRedundancyOptimizer cannot be copied or saved: it has a shard of parameters. "
        "Save its state_dict()",
    ),
    "another step": (another_step, "RuntimeError", "gradient is in shards, one on each rank"),
    "another step, one by one": (
        lambda rank: another_step(rank, foreach=False),
        "RuntimeError",
        "The optimizer that takes steps is the one of the ShardedDataParallel",
    ),
    "norms of rows": (norms_of_rows, "RuntimeError", "so there is no linalg_vector_norm of it"),
    "rows of a gradient": (of_rows, "RuntimeError", "so there is no index_put_ of it"),
    "more parameters": (
        lambda rank: wrap(lambda m: zero([*m.parameters(), *net(6, 3).parameters()])),
        "ValueError",
        "2 parameters that the module does not train",
    ),
    "other models": (
        lambda rank: wrap(
            lambda m: zero(m.append(nn.BatchNorm1d(3 + rank, affine=False)) and m.parameters())
        ),
        "ValueError",
        "the ranks have different models",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told_on_every_rank(pools, name):
    fault, kind, words = MISTAKES[name]
    for told in pools(2)(fails_with, fault):
        assert told is not None and told[0] == kind and words in told[1], told


def test_no_process_group():
    with pytest.raises(RuntimeError, match="there is none"):
        zero(net().parameters())
