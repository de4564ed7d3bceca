"""`md.fully_shard` and torch's own tools: what a script does with a model after sharding it. Held
against one process, with different data on each rank. Lesson: fully_sharded"""

import contextlib
import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_model import Block
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer, swa_utils
from torch.utils.checkpoint import checkpoint

import minidist as md

LIMIT = 1e-12
WIDTH = 7  # of which no number of ranks here gets even rows


class Net(nn.Module):
    """Blocks, and parameters of the root's own."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sharded(model, **options):
    for block in getattr(model, "blocks", ()):
        md.fully_shard(block, **options)
    return md.fully_shard(model, **options)


def share(rank, step=0):
    """Examples of a rank, other ones on each rank and at each step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, WIDTH, dtype=torch.float64, generator=generator)


def loss_of(model, ranks, step=0):
    """The mean of the losses on these ranks' examples."""
    return sum((model(share(r, step)) - step).pow(2).mean() for r in ranks) / len(ranks)


def whole(value):
    if isinstance(value, DTensor):
        return value.full_tensor()
    return value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)


def apart(ours, plain, allowed=LIMIT):
    assert ours.keys() == plain.keys()
    ours = {name: whole(value) for name, value in ours.items()}
    far = {n: md.parity.relative_difference(ours[n], whole(v)) for n, v in plain.items()}
    return {name: d for name, d in far.items() if not d <= allowed}


def held(case, make=Net, shard=sharded, allowed=LIMIT):
    """On a rank: in what a sharded model and one process part, after `case(model, ranks)`: on the
    examples of these ranks. It returns what to compare besides the model's state."""
    torch.manual_seed(0)
    plain = make().double()
    model = shard(copy.deepcopy(plain))
    ours = case(model, [dist.get_rank()]) or {}
    theirs = case(plain, range(dist.get_world_size())) or {}
    return apart(model.state_dict() | ours, plain.state_dict() | theirs, allowed)


def is_sharded(model):
    return isinstance(next(model.parameters()), DTensor)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model, ranks, optimizer=None, steps=range(3), between=None):
    optimizer = optimizer or adam(model)
    out = {}
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, ranks, step).backward()
        if between:
            out[f"at {step}"] = between()
        optimizer.step()
    return out


CASES = {}  # name: what `held` takes


def case(function=None, **how):
    """A decorator: hold this against one process."""
    if function is None:
        return partial(case, **how)
    CASES[function.__name__] = partial(held, function, **how)
    return function


# ---- gradients and optimizers -----------------------------------------------------------------


@case
def clip(model, ranks):
    def between():
        return nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    return train(model, ranks, between=between)


@case
def clip_changed_gradients(model, ranks):
    def between():
        for p in model.parameters():
            p.grad = torch.zeros_like(p).add_(p.grad.clone())
        nn.utils.clip_grad_value_(model.parameters(), 0.03)
        return nn.utils.clip_grad_norm_(model.parameters(), 0.02, norm_type=float("inf"))

    return train(model, ranks, between=between)


@case
def penalty(model, ranks):
    """On the weights, in the loss; and alone, before it."""
    out, optimizer = {}, sgd(model)
    for step in range(4):
        much = sum(0.05 * p.norm() + 0.1 * p.pow(2).sum() for p in model.parameters())
        much = whole(much)
        if step % 2:
            much.backward()
            much = 0
        (loss_of(model, ranks, step) + much).backward()
        out[f"norm {step}"] = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return out


class Lamb(torch.optim.Optimizer):
    """You et al. (arXiv 1904.00962): the step of each tensor is as long as the tensor."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                update = state["m"] / (state["v"].sqrt() + 1e-6) + 0.01 * p
                p.sub_(update * p.norm() / update.norm() * group["lr"])


@case
def lamb(model, ranks):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)
    return train(model, ranks, Lamb(model.parameters()))


def _optimizer(name, **options):
    def run(model, ranks):
        kind = getattr(torch.optim, name)
        return train(model, ranks, kind(model.parameters(), lr=1e-2, **options))

    CASES[" ".join((name, *options))] = partial(held, run)


for name in ("Adadelta", "Adagrad", "NAdam", "RMSprop"):
    _optimizer(name)
_optimizer("AdamW", foreach=True)
_optimizer("AdamW", fused=True, amsgrad=True)


@case
def grad_scaler(model, ranks):
    """One rank has inf: all pass over the step."""
    optimizer, out = sgd(model), {}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=2)
    for step in range(5):
        if is_sharded(model):
            model.set_requires_gradient_sync(step != 3)
        loss = loss_of(model, ranks, step)
        if step in (2, 3) and 1 in ranks:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        out[f"scale {step}"] = scaler.get_scale()
    return out


@case
def averaged(model, ranks):
    """EMA by torch, and a mean."""
    ema = swa_utils.get_ema_multi_avg_fn(0.9)
    models = [
        swa_utils.AveragedModel(model, multi_avg_fn=ema, use_buffers=True),
        swa_utils.AveragedModel(model),
    ]
    optimizer = adam(model)
    for step in range(3):
        train(model, ranks, optimizer, [step])
        for each in models:
            each.update_parameters(model)
    with torch.no_grad():
        out = {"output": models[0](share(9))}
    return out | {f"{i} {k}": v for i in range(2) for k, v in models[i].state_dict().items()}


@case
def a_copy_trained_too(model, ranks):
    train(model, ranks)
    other = copy.deepcopy(model)
    train(other, ranks, steps=[4, 5])
    train(model, ranks, steps=[6])
    train(other, ranks, steps=[7])
    return {f"copy {k}": v for k, v in other.state_dict().items()}


@case
def deep_copies_of_tensors(model, ranks):
    loss_of(model, ranks).backward()
    gradients = copy.deepcopy([p.grad for p in model.parameters()])
    state = {f"copy {k}": v for k, v in copy.deepcopy(model.state_dict()).items()}
    train(model, ranks)
    return state | {f"grad {i}": gradient for i, gradient in enumerate(gradients)}


def named(model):
    for p in model.parameters():
        p._no_weight_decay = p.ndim == 1
    return model


@case(shard=lambda model: sharded(named(model)))
def groups_by_an_attribute(model, ranks):
    if not is_sharded(model):
        named(model)
    groups = [
        {
            "params": [p for p in model.parameters() if p._no_weight_decay == none],
            "weight_decay": 0.0 if none else 0.5,
        }
        for none in (False, True)
    ]
    return train(model, ranks, torch.optim.AdamW(groups, lr=1e-2))


def hooked(model):
    def after(p):
        p.grad.mul_(0.5).add_(0.01)

    for p in model.parameters():
        p.register_hook(lambda gradient: 2 * gradient)
        p.register_post_accumulate_grad_hook(after)
    return model


@case(shard=lambda model: sharded(hooked(model)))
def hooks_from_before(model, ranks):
    return train(model if is_sharded(model) else hooked(model), ranks, sgd(model))


@case
def hooks_from_after(model, ranks):
    return train(hooked(model), ranks, sgd(model))


@case
def hooks_that_remove_themselves(model, ranks):
    def once(p, handles):
        p.grad.mul_(0.5)
        handles.pop().remove()

    for p in model.parameters():
        handles = []
        handles.append(p.register_post_accumulate_grad_hook(partial(once, handles=handles)))
        p.register_post_accumulate_grad_hook(lambda p: None)
    return train(model, ranks)


@case
def optimizer_in_backward(model, ranks):
    each = {p: torch.optim.Adam([p], lr=1e-2) for p in model.parameters()}

    def step(p):
        each[p].step()
        each[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for number in range(3):
        loss_of(model, ranks, number).backward()


@case
def freezing(model, ranks):
    optimizer = sgd(model)
    train(model, ranks, optimizer, [0])
    model.blocks[0].requires_grad_(False)
    model.head.bias.requires_grad_(False)
    train(model, ranks, optimizer, [1])
    model.requires_grad_(True)
    train(model, ranks, optimizer, [2])


@case
def freezing_between_forward_and_backward(model, ranks):
    loss = loss_of(model, ranks)
    model.head.requires_grad_(False)
    loss.backward()
    model.head.requires_grad_(True)
    train(model, ranks, sgd(model))


def partly_frozen():
    net = Net()
    net.blocks[0].requires_grad_(False)
    net.head.bias.requires_grad_(False)
    return net


@case(make=partly_frozen)
def unfreezing(model, ranks):
    """Of what was frozen when it was sharded."""
    optimizer = sgd(model)
    train(model, ranks, optimizer, [0])
    model.requires_grad_(True)
    train(model, ranks, optimizer, [1, 2])


@case
def written(model, ranks):
    """Under no_grad, by p.data, and by the local tensor; also of units that stay gathered."""
    optimizer = sgd(model)
    if is_sharded(model):
        model.blocks[1].set_reshard_after_backward(False)
    train(model, ranks, optimizer, [0])
    for p in model.parameters():
        p.data.clamp_(-0.2, 0.2)
    train(model, ranks, optimizer, [1])
    loss_of(model, ranks, 2).backward()
    with torch.no_grad():
        for p in model.parameters():
            (p.to_local() if is_sharded(model) else p).mul_(0.5)
        out = {"output": model(share(9))}
        for p in model.parameters():
            p.copy_(p * 0.9)
    train(model, ranks, optimizer, [2])
    return out


# ---- accumulation -----------------------------------------------------------------------------


def _accumulate(name, which, syncs, each=None, step_at=2, make=sgd):
    """Passes of which `syncs(number)` says whether they reduce; a step after each third one."""

    def run(model, ranks):
        optimizer, out = make(model), {}
        for number in range(6):
            if is_sharded(model):
                which(model).set_requires_gradient_sync(syncs(number % 3))
            loss_of(model, ranks, number).backward()
            if each:
                out[f"{number}"] = each(model, number % 3)
            if number % 3 == step_at:
                optimizer.step()
                optimizer.zero_grad()
        return out

    CASES[f"accumulation {name}"] = partial(held, run)
    return run


def clipped(model, number):
    return nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def forgotten(model, number):
    """Of some parameters, or of all."""
    if number == 0:
        model.zero_grad()
    model.head.weight.grad = None
    return 0.0


accumulate = _accumulate("of the root", lambda model: model, lambda number: number == 2)
_accumulate("of a block", lambda model: model.blocks[1], lambda number: number == 2)
_accumulate("clipped", lambda model: model, lambda number: number == 2, clipped)
_accumulate("forgotten", lambda model: model, lambda number: number == 2, forgotten)
_accumulate("after a mean", lambda model: model, lambda number: number != 1)
_accumulate("step without", lambda model: model, lambda number: number == 0)
_accumulate("none", lambda model: model, lambda number: False, clipped, make=adam)


# ---- forward and backward ---------------------------------------------------------------------


def with_blocks(kind, forward=None):
    """A `Net` of blocks of this class, and with this forward pass."""

    class Other(Net):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([kind(WIDTH) for _ in range(3)])

    if forward:
        Other.forward = forward
    return Other


def _parity(name, make, function=train, shard=sharded):
    CASES[name] = partial(held, function, make, shard)


def _checkpoints(name, **options):
    class Inside(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, **options)

    def around(model, x):
        x = model.first(x)
        for block in model.blocks:
            x = checkpoint(block, x, **options)
        return model.head(x)

    _parity(f"checkpoints within units, {name}", with_blocks(Inside))
    _parity(f"checkpoints around units, {name}", with_blocks(Block, around))


_checkpoints("reentrant", use_reentrant=True)
_checkpoints("not reentrant", use_reentrant=False)


def twice(model, x):
    x = model.first(x)
    for block in (*model.blocks, *model.blocks[:2], model.blocks[1]):
        x = block(x)
    return model.head(x)


_parity("used twice", with_blocks(Block, twice))


@case
def two_forward_passes(model, ranks):
    """One backward pass of the sum; two, in either order; one only; with another in between."""
    optimizer = sgd(model)
    for step in range(5):
        a, b = loss_of(model, ranks, step), loss_of(model, ranks, step + 10)
        for loss in ([a + b], [a, b], [b, a], [a], [b])[step]:
            with torch.no_grad():
                model(share(8))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@case
def twice_through_a_graph(model, ranks):
    optimizer = sgd(model)
    for step in range(3):
        loss = loss_of(model, ranks, step)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@case
def gradients_of_inputs(model, ranks):
    """Adversarial examples."""
    optimizer, out = sgd(model), {}
    for step in range(3):
        x = share(7, step).requires_grad_()
        (out[f"{step}"],) = torch.autograd.grad(model(x).pow(2).sum(), x)
        (model(share(7) + 0.1 * out[f"{step}"].sign()).pow(2).mean()).backward()
        train(model, ranks, optimizer, [step])
    return out


def all_outputs(model, x):
    outputs = [model.first(x)]
    for block in model.blocks:
        outputs.append(block(outputs[-1]))
    return model.head(outputs[-1]), outputs


@case(make=with_blocks(Block, all_outputs))
def blocks_left_out_of_a_loss(model, ranks):
    """Others on each rank, with a forward pass in between that nobody uses."""
    optimizer = sgd(model)
    for step in range(6):
        loss = 0
        for rank in ranks:
            output, inner = model(share(rank, step))
            unused = model(share(rank, step + 20)) if step > 2 else None
            used = inner[(rank + step) % 3 + 1] if (rank + step) % 2 else output
            loss = loss + used.pow(2).mean() / len(ranks)
        loss.backward()
        del unused
        optimizer.step()
        optimizer.zero_grad()


class Giving(Block):
    def forward(self, x):
        return super().forward(x), self.up.weight, self.down.weight.view(-1), self.up.bias[2:4]


def given(model, x):
    x, much = model.first(x), 0
    for block in model.blocks:
        x, weight, view, part = block(x)
        much = much + weight.pow(2).sum() + view.sin().sum() + part.sum()
    return model.head(x) + 0.01 * much


_parity("gives parameters", with_blocks(Giving, given))
_parity(
    "gives what stays",
    with_blocks(Giving, given),
    shard=partial(sharded, reshard_after_forward=False),
)


class Hiding(Block):
    def forward(self, x):
        output = super().forward(x)
        self.loss = self.up(x).pow(2).mean()
        return lambda: output


def found(model, x):
    x = model.first(x)
    for block in model.blocks:
        x = block(x)()
    return model.head(x) + sum(block.loss for block in model.blocks)


_parity("a closure, and a loss in an attribute", with_blocks(Hiding, found))


class Split(Block):
    def forward(self, x):
        return super().forward(x).split(2)


def changed(model, x):
    x = model.first(x)
    for block in model.blocks:
        output = torch.cat([part.clone().mul_(2) for part in block(x)])
        output += x
        x = output
    return model.head(x)


_parity("views copied, then changed in place", with_blocks(Split, changed))


class Parts(Net):
    """An LSTM, tied weights, a module that is there twice, embeddings, a buffer, empty parameters,
    some that are frozen, some that are never used."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, bidirectional=True)
        self.down, self.again = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.first.weight
        self.same = self.again
        self.embedding = nn.Embedding(11, WIDTH, padding_idx=0)
        self.empty, self.flat = nn.Parameter(torch.empty(0, 4)), nn.Parameter(torch.empty(3, 0))
        self.one = nn.Parameter(torch.ones(1))
        self.register_buffer("two", torch.tensor([2.0]))
        self.first.bias.requires_grad_(False)
        self.blocks[1].requires_grad_(False)
        self.blocks[2].never = nn.Linear(2, 2)

    def forward(self, x):
        x = self.embedding((5 * x[:, 0].abs()).long() % 11) + self.again(x) * self.one
        x = self.down(self.lstm(x[None])[0])[0] * self.two
        return super().forward(x) + self.empty.sum() + self.flat.sum()


_parity("parts of all kinds", Parts)


@case
def evaluated(model, ranks):
    optimizer, out = sgd(model), {}
    for step in range(2):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                output = model(share(7, step))
            out[f"{mode.__name__} {step}"] = output.clone()
        state = {name: p.clone() for name, p in model.state_dict().items()}
        train(model, ranks, optimizer, [step])
        if step:
            with torch.inference_mode():
                model.load_state_dict(state)
    train(model, ranks, optimizer, [2])
    return out


def ruined(value):
    raise ArithmeticError


@case
def errors_in_between(model, ranks):
    """In forward, and in backward."""
    optimizer = sgd(model)
    train(model, ranks, optimizer, [0])
    for hook in (ruined, lambda output: output.register_hook(ruined)):
        handle = model.blocks[1].register_forward_hook(
            lambda _, x, y, hook=hook: [hook(y), None][1]
        )
        with contextlib.suppress(ArithmeticError):
            model(share(0)).sum().backward()
        handle.remove()
    optimizer.zero_grad()
    train(model, ranks, optimizer, [1, 2])


# ---- units ------------------------------------------------------------------------------------


@case
def unsharded_by_hand(model, ranks):
    optimizer, out = sgd(model), {}
    for step in range(4):
        loss_of(model, ranks, step).backward()
        if is_sharded(model):
            if step % 2:
                model.unshard()
            handles = [block.unshard(async_op=True) for block in model.blocks]
            handles[0].wait()
        if step == 1:
            out["weight"] = model.head.weight.clone()
        if step == 3 and is_sharded(model):
            model.reshard()
        optimizer.step()  # what is gathered is stale now
        optimizer.zero_grad()
    return out | {"output": model(share(9))}


def gathering(order):
    def shard(model):
        first, second, third = sharded(model).blocks
        {"ahead": ahead, "wrong": wrong, "kept": kept}[order](model, first, second, third)
        return model

    def ahead(model, first, second, third):
        model.set_modules_to_forward_prefetch([first, second])
        first.set_modules_to_forward_prefetch([second, third])
        third.set_modules_to_backward_prefetch([second, first])

    def wrong(model, first, second, third):
        model.set_modules_to_forward_prefetch([third])
        second.set_modules_to_backward_prefetch([third, model])

    def kept(model, first, second, third):
        model.set_reshard_after_backward(False)
        second.set_reshard_after_forward(False)

    return shard


for order in ("ahead", "wrong", "kept"):
    _parity(f"gathered, {order}", Net, shard=gathering(order))


@case
def converted(model, ranks):
    optimizer = sgd(model)
    loss_of(model, ranks, 5).backward()
    model.double()
    model.blocks[1].to(torch.float64)
    model.head.cpu()
    optimizer.step()
    model.float().double()
    train(model, ranks, optimizer)


def from_meta(model, empty=True, **options):
    """As torchtitan does: shard, then memory, then values; or torch's function gives memory."""
    state = model.state_dict()
    with torch.device("meta"):
        new = sharded(Net().double(), **options)
    if empty:
        new.to_empty(device="cpu")
    set_model_state_dict(
        new,
        state if dist.get_rank() == 0 else {},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    return new


_parity("from meta", Net, shard=from_meta)
_parity("from meta, offloaded", Net, shard=partial(from_meta, offload_policy=CPUOffloadPolicy()))
_parity("from meta, assigned", Net, shard=partial(from_meta, empty=False))


def initialized():
    torch.manual_seed(dist.get_rank())
    model = sharded(nn.Linear(64, 63, bias=False))
    nn.init.kaiming_uniform_(model.weight, a=5**0.5)
    weight = whole(model.weight)
    return weight.unique().numel(), 0.95 < weight.std() * 8 * 3**0.5 < 1.05


def test_initialized_after_sharding(pools):
    """By the whole shape, whatever rows a rank has."""
    assert all(number > 4000 and right for number, right in pools(2)(initialized))


def over_two_axes(model):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    return sharded(model, mesh=mesh)


class With(Block):
    def other(self, x):
        return self.up(x).mean(1, keepdim=True) + x


def by_method(model, x):
    for block in model.blocks:
        x = block.other(block(x))
    return model.head(x)


def with_methods(model):
    sharded(model)
    for block in model.blocks:
        md.fully_sharded.register_fsdp_forward_method(block, "other")
    return model


_parity("another method", with_blocks(With, by_method), shard=with_methods)


# ---- states -----------------------------------------------------------------------------------


def _states(name, full, broadcast=False):
    def run(model, ranks):
        optimizer = adam(model)
        train(model, ranks, optimizer)
        options = StateDictOptions(full_state_dict=full)
        states = [
            copy.deepcopy(get_model_state_dict(model, options=options)),
            copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options)),
        ]
        if broadcast and is_sharded(model):
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            if dist.get_rank():
                states = [{}, {}]
        other = sharded(Net().double()) if is_sharded(model) else Net().double()
        another = adam(other)
        set_model_state_dict(other, states[0], options=options)
        set_optimizer_state_dict(other, another, states[1], options=options)
        train(other, ranks, another, [5, 6])
        return {f"other {k}": v for k, v in other.state_dict().items()}

    CASES[f"states {name}"] = partial(held, run)


_states("of rows", False)
_states("whole", True)
_states("whole, on rank 0", True, True)


def saved(folder):
    torch.manual_seed(0)
    model = sharded(Net().double())
    optimizer = adam(model)
    train(model, [0, 1], optimizer)
    state = {"model": get_model_state_dict(model)}
    dcp.save(state | {"states": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)


def resumed(folder):
    torch.manual_seed(0)
    plain = Net().double()
    alone = adam(plain)
    train(plain, [0, 1], alone)
    model = sharded(Net().double())
    optimizer = adam(model)
    state = {
        "model": get_model_state_dict(model),
        "states": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["states"])
    train(model, [dist.get_rank()], optimizer, [5, 6])
    train(plain, range(dist.get_world_size()), alone, [5, 6])
    return apart(model.state_dict(), plain.state_dict())


def test_torchs_checkpoints_at_another_number_of_ranks(pools, tmp_path):
    pools(2)(saved, tmp_path)
    assert pools(3)(resumed, tmp_path) == [{}] * 3


# ---- all of them ------------------------------------------------------------------------------


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name, size", [(name, 2 + i % 2) for i, name in enumerate(CASES)])
def test_as_one_process(pools, name, size):
    assert pools(size)(CASES[name]) == [{}] * size


OPTIMIZERS = [
    each
    for each in vars(torch.optim).values()
    if isinstance(each, type) and issubclass(each, Optimizer)
    if each not in (Optimizer, torch.optim.SparseAdam)  # the latter wants sparse gradients
]
NOT_FOR_DTENSORS = torch.optim.Rprop, torch.optim.Adafactor, torch.optim.LBFGS
RPROP = pytest.mark.newer_torch("index_put_")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "kind",
    [pytest.param(each, marks=RPROP if each is torch.optim.Rprop else ()) for each in OPTIMIZERS],
    ids=lambda kind: kind.__name__,
)
def test_torchs_optimizers(pools, kind):
    """What does not work with torch's own sharding raises here, too."""

    def trained(shard):
        torch.manual_seed(0)
        layers = nn.Linear(WIDTH, 6, bias=False), nn.Tanh(), nn.Linear(6, WIDTH, bias=False)
        model = nn.Sequential(*layers).double()  # Muon takes matrices only
        for unit in (model[0], model[2], model) if shard else ():
            shard(unit)
        ranks = [dist.get_rank()] if shard else range(dist.get_world_size())
        optimizer = kind(model.parameters(), lr=0.01)
        for step in range(4):

            def closure(step=step):
                optimizer.zero_grad()
                loss_of(model, ranks, step).backward()
                return torch.zeros(())

            optimizer.step(closure)
        return {k: whole(v).detach() for k, v in model.named_parameters()}

    def run():
        return apart(trained(md.fully_shard), trained(None)), apart(
            trained(md.fully_shard), trained(torch_fully_shard)
        )

    if kind in NOT_FOR_DTENSORS:
        for shard in (md.fully_shard, torch_fully_shard):
            with pytest.raises(md.RankError, match="placement|Sharding propagation"):
                pools(3)(trained, shard)
        return
    for of_one_process, of_torch in pools(3)(run):
        assert of_torch == {}
        assert of_one_process == {} or kind is torch.optim.Muon  # in bfloat16, by other sums


OVER_TWO_AXES = (clip, accumulate, a_copy_trained_too)


def test_hybrid(pools):
    def run():
        return [held(each, shard=over_two_axes) for each in OVER_TWO_AXES]

    assert pools(4)(run) == [[{}] * 3] * 4


def compiled(how):
    def run(model, ranks):
        torch._dynamo.reset()
        counter = CompileCounter()
        if not is_sharded(model):
            return train(model, ranks) | {"frames": 1}
        if how == "model":
            model = torch.compile(model, backend=counter)
        else:
            for block in model.blocks:
                block.compile(backend=counter)
        return train(model, ranks) | {"frames": counter.frame_count}

    return held(run)


@pytest.mark.parametrize("how", ["model", "blocks"])
def test_compiled(pools, how):
    """Blocks of one class are compiled once."""
    assert pools(2)(compiled, how) == [{}] * 2


class Impatient(nn.Linear):
    """Goes backward within its forward pass, once."""

    patient = False

    def forward(self, x):
        y = super().forward(x)
        if not self.patient:
            self.patient = True
            y.sum().backward()
        return y


def going_on_after_a_refusal():
    """Who keeps the error, as a notebook does, goes on all the same."""
    model = md.fully_shard(nn.Sequential(md.fully_shard(Impatient(4, 4))))
    with pytest.raises(RuntimeError, match="within the forward pass") as kept:
        model(torch.ones(2, 4))
    model(torch.ones(2, 4)).sum().backward()
    return all(p.grad is not None for p in model.parameters()), kept is not None


def going_on_without_a_unit():
    """A model that catches what a unit raises."""

    class Failing(nn.Linear):
        def forward(self, x):
            raise KeyError

    class Catching(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = md.fully_shard(Failing(4, 4))

        def forward(self, x):
            with contextlib.suppress(KeyError):
                self.part(x)
            return x

    model = md.fully_shard(Catching())
    with torch.no_grad():
        model(torch.ones(2, 4))
    return is_sharded(model.part), "weight" not in vars(model.part)


def a_method_of_a_copy():
    """It computes with the copy's parameters."""

    class Encoder(nn.Linear):
        def encode(self, x):
            return super().forward(x)

    model = md.fully_shard(Encoder(4, 4))
    md.fully_sharded.register_fsdp_forward_method(model, "encode")
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for p in copied.parameters():
            p.zero_()
    x = torch.ones(2, 4)
    return not copied.encode(x).any(), bool(model.encode(x).any())


@pytest.mark.parametrize(
    "what", [going_on_after_a_refusal, going_on_without_a_unit, a_method_of_a_copy]
)
def test_after_what_is_unusual(pools, what):
    assert pools(2)(what) == [(True, True)] * 2


# ---- what is refused --------------------------------------------------------------------------


def replaced(model):
    model.head = nn.Linear(WIDTH, 5).double()


def adapter_added(model):
    model.blocks[0].up.lora = nn.Parameter(torch.ones(2, dtype=torch.float64))


def parameter_replaced(model):
    model.head.weight = nn.Parameter(torch.ones(5, WIDTH, dtype=torch.float64))


def frozen_parameter_replaced(model):
    parameter_replaced(model)
    model.head.weight.requires_grad_(False)


def data_given(model):
    for p in model.parameters():
        p.data = p.data * 0.5


def part_moved(model):
    model.blocks[0].up.to_empty(device="cpu")


def functional(model):
    half = {name: p * 0.5 for name, p in model.named_parameters()}
    torch.func.functional_call(model, half, (share(0),))


def gradients_by_func(model):
    torch.func.grad(lambda x: model(x).sum())(share(0))


def second_order(model):
    x = share(0).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    gradient.sum().backward()


REFUSED = {
    replaced: "parameter head.weight has been replaced",
    adapter_added: "parameter blocks.0.up.lora has been added",
    parameter_replaced: "parameter head.weight has been replaced",
    frozen_parameter_replaced: "parameter head.weight has been re",
    data_given: "parameter first.weight has been given other memory, by p.data",
    part_moved: "parameter blocks.0.up.weight has been given other memory",
    functional: "parameter first.weight has been replaced",
    gradients_by_func: "cannot be called within torch.func's transforms",
    second_order: "gradients of gradients",
}


def refused(change, context):
    torch.manual_seed(0)
    model = sharded(Net().double())
    try:
        with context():
            change(model)
            output = model(share(dist.get_rank()))
        if output.requires_grad:
            output.sum().backward()
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad])
def test_what_is_refused(pools, change, context):
    if context is torch.no_grad and change in (replaced, adapter_added, second_order):
        return  # nothing is trained: right as it is
    for told in pools(2)(refused, change, context):
        assert told is not None and REFUSED[change] in told, told
