"""`md.fully_shard` and torch's own tools: what a script does with a model after sharding it. Held
against one process, with different data on each rank. Lesson: fully_sharded"""

import contextlib
import copy
from functools import partial

import fsdp_model
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_model import Block, apart, is_sharded, pair, weighed
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint

import minidist as md

WIDTH = 7  # of which no number of ranks here gets even rows
share = partial(fsdp_model.share, width=WIDTH)


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


def loss_of(model, ranks, step=0):
    """The mean of the losses on these ranks' examples."""
    return sum(weighed(model(share(rank, step)), step) for rank in ranks) / len(ranks)


def held(case, make=Net, shard=sharded, frees=True):
    return fsdp_model.held(case, lambda: make().double(), shard, frees=frees)


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
def optimizers(model, ranks):
    kinds = torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam
    fused = partial(torch.optim.AdamW, fused=True, amsgrad=True)
    for kind in (*kinds, fused, partial(torch.optim.AdamW, foreach=True)):
        train(model, ranks, kind(model.parameters(), lr=1e-2), range(2))


@case
def grad_scaler(model, ranks):
    """One rank has inf: all pass over the step."""
    optimizer, out = sgd(model), {}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=2)
    for step in range(5):
        loss = loss_of(model, ranks, step)
        if step == 2 and 1 in ranks:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        out[f"scale {step}"] = scaler.get_scale()
    return out


@case
def averaged(model, ranks):
    """EMA by torch in a deep copy, which is trained on."""
    ema = swa_utils.get_ema_multi_avg_fn(0.9)
    other = swa_utils.AveragedModel(model, multi_avg_fn=ema, use_buffers=True)
    optimizer = adam(model)
    for step in range(3):
        train(model, ranks, optimizer, [step])
        other.update_parameters(model)
    with torch.no_grad():
        out = {"output": other(share(9))}
    out |= {f"averaged {k}": v for k, v in copy.deepcopy(other.state_dict()).items()}
    train(other, ranks, steps=[4, 5])
    train(model, ranks, steps=[6])
    return out | {f"trained {k}": v for k, v in other.state_dict().items()}


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


def partly_frozen():
    net = Net()
    net.blocks[0].requires_grad_(False)
    net.head.bias.requires_grad_(False)
    return net


@case(make=partly_frozen)
def freezing(model, ranks):
    """What was frozen when it was sharded is trained; then another part is frozen."""
    optimizer = sgd(model)
    train(model, ranks, optimizer, [0])
    model.requires_grad_(True)
    train(model, ranks, optimizer, [1, 2])
    model.blocks[1].requires_grad_(False)
    model.head.bias.requires_grad_(False)
    train(model, ranks, optimizer, [3])


@case
def written(model, ranks):
    """Under no_grad, and by p.data."""
    optimizer = sgd(model)
    train(model, ranks, optimizer, [0])
    for p in model.parameters():
        p.data.clamp_(-0.2, 0.2)
    train(model, ranks, optimizer, [1])
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p * 0.9)
        out = {"output": model(share(9))}
    train(model, ranks, optimizer, [2])
    return out


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


def _parity(name, make, function=train, shard=sharded, frees=True):
    CASES[name] = partial(held, function, make, shard, frees)


class Inside(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def around(reentrant, model, x):
    x = model.first(x)
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=reentrant)
    return model.head(x)


_parity("checkpoints within units", with_blocks(Inside))
_parity("checkpoints around units", with_blocks(Block, lambda *of: around(False, *of)))
_parity("reentrant checkpoints", with_blocks(Block, lambda *of: around(True, *of)))


def twice(model, x):
    x = model.first(x)
    for block in (*model.blocks, *model.blocks[:2], model.blocks[1]):
        x = block(x)
    return model.head(x)


_parity("used twice", with_blocks(Block, twice))


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


def ahead(model):
    """As torch's tutorial: it says what is gathered early, and keeps a unit."""
    first, second, third = sharded(model).blocks
    model.set_modules_to_forward_prefetch([first, second])
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])
    second.set_reshard_after_backward(False)
    model.unshard(async_op=True)
    return model


_parity("gathered ahead", Net, shard=ahead, frees=False)


def from_meta(model, **options):
    """As torchtitan does: shard, then memory, then values."""
    state = model.state_dict()
    with torch.device("meta"):
        new = sharded(Net().double(), **options)
    new.to_empty(device="cpu")
    set_model_state_dict(
        new,
        state if dist.get_rank() == 0 else {},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    return new


_parity("from meta", Net, shard=from_meta)
_parity("from meta, offloaded", Net, shard=partial(from_meta, offload_policy=CPUOffloadPolicy()))


@pytest.mark.parametrize("name", CASES)
def test_as_one_process(pools, name):
    assert pools(3)(CASES[name]) == [{}] * 3


def test_compiled(pools):
    """Blocks of one class are compiled once."""

    def compiled(model, ranks):
        torch._dynamo.reset()
        counter = CompileCounter()
        if not is_sharded(model):
            return train(model, ranks) | {"frames": 1}
        for block in model.blocks:
            block.compile(backend=counter)
        return train(model, ranks) | {"frames": counter.frame_count}

    assert pools(3)(held, compiled) == [{}] * 3


# ---- states -----------------------------------------------------------------------------------


STATES = {
    "of rows": {},
    "whole": {"full_state_dict": True},
    "whole, on rank 0": {"full_state_dict": True, "broadcast_from_rank0": True},
}


@pytest.mark.parametrize("name", STATES)
def test_states_by_torchs_functions(pools, name):
    def loaded(model, ranks):
        optimizer = adam(model)
        train(model, ranks, optimizer)
        full = StateDictOptions(full_state_dict=STATES[name].get("full_state_dict", False))
        states = [
            copy.deepcopy(get_model_state_dict(model, options=full)),
            copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=full)),
        ]
        options = StateDictOptions(**STATES[name]) if is_sharded(model) else full
        if options.broadcast_from_rank0 and dist.get_rank():
            states = [{}, {}]
        other = sharded(Net().double()) if is_sharded(model) else Net().double()
        another = adam(other)
        set_model_state_dict(other, states[0], options=options)
        set_optimizer_state_dict(other, another, states[1], options=options)
        train(other, ranks, another, [5, 6])
        return {f"other {k}": v for k, v in other.state_dict().items()}

    assert pools(3)(held, loaded) == [{}] * 3


def state_of(model, optimizer):
    return {
        "model": get_model_state_dict(model),
        "states": get_optimizer_state_dict(model, optimizer),
    }


def test_torchs_checkpoints_at_another_number_of_ranks(pools, tmp_path):
    def saved():
        model, _ = pair(lambda: Net().double(), sharded)
        optimizer = adam(model)
        train(model, [0, 1], optimizer)
        dcp.save(state_of(model, optimizer), checkpoint_id=tmp_path)

    def resumed():
        model, plain = pair(lambda: Net().double(), sharded)
        optimizer, alone = adam(model), adam(plain)
        train(plain, [0, 1], alone)
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=tmp_path)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["states"])
        train(model, [dist.get_rank()], optimizer, [5, 6])
        train(plain, range(dist.get_world_size()), alone, [5, 6])
        return apart(model.state_dict(), plain.state_dict())

    pools(2)(saved)
    assert pools(3)(resumed) == [{}] * 3
