"""Ranks of which none has a whole model train as one process does: both forms of FSDP, in the loops
of lessons and of ordinary scripts, with other examples on each rank. Lesson: fully_sharded"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from fsdp_model import (
    WIDTH,
    Block,
    Net,
    bytes_gathered,
    held,
    in_place,
    loss_of,
    plainly,
    share,
    steps_of,
    told,
    two_axes,
    units_of,
    unreduced,
    wrapped,
)
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy
from torch.utils.checkpoint import checkpoint

import minidist as md

# ---- any loop ---------------------------------------------------------------------------------


def accumulated(model, ranks, step):
    """Of three micro-batches the last is reduced, and what the others have left with it; and what
    one before them has reduced already."""
    if step == 2:
        loss_of(model, ranks, step + 3).backward()
    with unreduced(model):
        for number in (1, 2):
            loss_of(model, ranks, step + number).backward()
    loss_of(model, ranks, step).backward()


def each_reduced(model, ranks, step):
    for number in range(3):
        loss_of(model, ranks, step + number).backward()


def forgotten(model, ranks, step):
    """What a pass has left is zeroed before it is reduced."""
    with unreduced(model):
        loss_of(model, ranks, step + 1).backward()
        model.zero_grad(set_to_none=step == 1)
        loss_of(model, ranks, step + 2).backward()
    loss_of(model, ranks, step).backward()


def several_passes(model, ranks, step):
    """Forward, and backward in another order; two of them at once."""
    losses = [loss_of(model, ranks, step + number) for number in range(3)]
    with torch.no_grad():
        model(share(0))
    model(share(1))  # its output is not used
    (losses[0] + losses[2]).backward()
    losses[1].backward()


def clipped(model, ranks, step):
    loss_of(model, ranks, step).backward()
    return nn.utils.clip_grad_norm_(model.parameters(), 0.01, (2.0, 1.0, 2.0)[step])


def evaluated(model, ranks, step):
    """Between the steps. Nothing stays gathered."""
    model.eval()
    with torch.no_grad():
        output = model(share(9))
    assert bytes_gathered(model) == 0
    with torch.inference_mode():
        assert torch.equal(output, model(share(9)))
    assert bytes_gathered(model) == 0
    model.train()
    loss_of(model, ranks, step).backward()
    return output


def failed(model, ranks, step):
    """In the middle of forward, and of backward, where two units are reduced already."""

    def ruined(*_):
        raise ArithmeticError

    for hook in ruined, lambda _, x, y: [y.register_hook(ruined), None][1]:
        handle = model.blocks[0].register_forward_hook(hook)
        words = told(lambda: loss_of(model, ranks, step).backward())
        assert words.startswith("ArithmeticError"), words
        handle.remove()
    model.zero_grad()
    loss_of(model, ranks, step).backward()


LOOPS = [accumulated, each_reduced, forgotten, several_passes, clipped, evaluated, failed]
OFFLOAD = {"offload_policy": CPUOffloadPolicy()}


FORMS = {  # name: the number of ranks, and how a model is sharded
    "in place": (3, in_place),
    "in place, kept after forward": (3, partial(in_place, reshard_after_forward=False)),
    "in place, on the CPU": (2, partial(in_place, **OFFLOAD)),
    "in place, hybrid": (4, lambda model: in_place(model, mesh=two_axes())),
    "wrapped": (3, wrapped),
    "wrapped, without prefetch": (2, partial(wrapped, prefetch=False)),
    "wrapped, on the CPU": (3, partial(wrapped, cpu_offload=CPUOffload(offload_params=True))),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("loop", LOOPS)
def test_any_loop(pools, loop, form):
    size, shard = FORMS[form]
    assert pools(size)(held, steps_of(loop), Net, shard) == [{}] * size


# ---- any model --------------------------------------------------------------------------------


class Parts(Net):
    """An LSTM, tied weights, a module that is there twice, a buffer, frozen parameters, some that
    are never used."""

    def __init__(self):
        super().__init__()
        self.lstm, self.again = nn.LSTM(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.first.weight
        self.same = self.again
        self.register_buffer("two", torch.tensor([2.0]))
        self.first.bias.requires_grad_(False)
        self.blocks[1].requires_grad_(False)
        self.blocks[2].never = nn.Linear(2, 2)

    def forward(self, x):
        return super().forward(x + self.lstm(self.again(x))[0] * self.two)


class Sometimes(Block):
    """A half of it is used for a part of the examples: on some ranks only."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = super().forward(x)
        return x + self.extra(x) if x[0, 0] > 0 else x


class Within(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def around(reentrant, model, x):
    x = model.first(x)
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=reentrant)
    return model.head(x)


def twice(model, x):
    x = model.first(x)
    for block in (*model.blocks, *model.blocks[:2], model.blocks[1]):
        x = block(x)
    return model.head(x)


class Encoders(nn.Module):
    """Torch's layers read the parameters of their children, and in eval mode those of all."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 12, 0.0, batch_first=True)
        self.first, self.layers = nn.Linear(WIDTH, 6), nn.TransformerEncoder(layer, 2)

    def forward(self, x):
        return self.layers(self.first(x)[None])


MODELS = {
    "parts of all kinds": Parts,
    "used on some ranks": partial(Net, Sometimes),
    "checkpoints within units": partial(Net, Within),
    "checkpoints around units": partial(Net, forward=partial(around, False)),
    "reentrant checkpoints": partial(Net, forward=partial(around, True)),
    "used twice": partial(Net, forward=twice),
    "torch's encoder layers": Encoders,
}


@pytest.mark.parametrize("form", ["in place", "in place, hybrid", "wrapped"])
@pytest.mark.parametrize("name", MODELS)
def test_any_model(pools, name, form):
    def loop(model, ranks, step):
        return (evaluated, accumulated, plainly)[step](model, ranks, step)

    size, shard = FORMS[form]
    assert pools(size)(held, steps_of(loop), MODELS[name], shard) == [{}] * size


# ---- any script -------------------------------------------------------------------------------


def optimizers(model, ranks):
    """Those of torch that take all parameters at once."""
    for how in {"fused": True, "amsgrad": True}, {"foreach": True}:
        steps_of(plainly, range(2), torch.optim.AdamW, lr=1e-2, **how)(model, ranks)


def grad_scaler(model, ranks):
    """One rank has inf: all pass over the step."""
    optimizer, out = torch.optim.SGD(model.parameters(), lr=0.1), {}
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


def optimizer_in_backward(model, ranks):
    each = {p: torch.optim.Adam([p], lr=1e-2) for p in model.parameters()}

    def step(p):
        each[p].step()
        each[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for number in range(3):
        loss_of(model, ranks, number).backward()


def freezing(model, ranks):
    """One part, and then another one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        model.requires_grad_(step > 0)
        model.blocks[step % 3].requires_grad_(False)
        model.head.requires_grad_(True)
        model.head.bias.requires_grad_(step != 1)
        optimizer.zero_grad()
        loss_of(model, ranks, step).backward()
        optimizer.step()


def written(model, ranks):
    """As GANs and initializations do, under no_grad and by p.data."""
    for p in model.parameters():
        p.data.clamp_(-0.2, 0.2)
    steps_of(plainly, [0])(model, ranks)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p * 0.9)
        out = {"output": model(share(9))}
    return out | steps_of(plainly, [1])(model, ranks)


def converted(model, ranks):
    """Between the steps, to numbers of 32 bits and back."""
    out = steps_of(plainly, [0])(model, ranks)
    model.float()
    model.double()
    return out | steps_of(plainly, [1])(model, ranks)


def skipped(model, ranks, step):
    """The pass that reduces goes through one block, those before it through all."""
    with unreduced(model):
        loss_of(model, ranks, step + 1).backward()
    model.other = lambda m, x: m.head(m.blocks[0](m.first(x)))
    loss_of(model, ranks, step).backward()
    model.other = None


def from_meta(model, **options):
    """As torchtitan does: shard, then memory, then values."""
    state = model.state_dict() if dist.get_rank() == 0 else {}
    with torch.device("meta"):
        new = in_place(Net().double(), **options)
    new.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(new, state, options=options)
    return new


OF_BOTH = optimizers, grad_scaler, optimizer_in_backward, freezing, written, converted
SCRIPTS = {
    **{f"{s.__name__}, {shard.__name__}": (s, shard)
       for s in OF_BOTH
       for shard in (in_place, wrapped)},
    "skipped": (steps_of(skipped), in_place),
    "from meta": (steps_of(plainly), from_meta),
    "from meta, on the CPU": (steps_of(plainly), partial(from_meta, **OFFLOAD)),
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_any_script(pools, name):
    script, shard = SCRIPTS[name]
    assert pools(3)(held, script, Net, shard) == [{}] * 3


def test_compiled(pools):
    """Blocks of one class are compiled once."""

    def compiled(model, ranks):
        torch._dynamo.reset()
        counter = CompileCounter()
        if not units_of(model):
            return steps_of(plainly)(model, ranks) | {"frames": 1}
        for block in model.blocks:
            block.compile(backend=counter)
        return steps_of(plainly)(model, ranks) | {"frames": counter.frame_count}

    assert pools(3)(held, compiled, Net, in_place) == [{}] * 3


@pytest.mark.parametrize("shard", [md.fully_shard, md.FullyShardedDataParallel])
def test_gradients_that_are_not_reduced(pools, shard):
    """Each rank has its own part, whole, of what it has used."""

    def run():
        block, rank = Sometimes().double(), dist.get_rank()
        model = shard(block)
        with unreduced(model):
            model(share(rank) + 100 * (1 - 2 * rank)).sum().backward()
        up, extra = block.up.weight.grad, block.extra.weight.grad
        own = up.placements[0].is_partial() and up.to_local().shape == block.up.weight.shape
        return own, extra is None

    assert pools(2)(run) == [(True, False), (True, True)]


def test_ignored_parameters(pools):
    """Each rank has them whole, and a gradient of its own."""

    def run():
        model = Net().double()
        bias = model.head.bias
        md.fully_shard(model, ignored_params={bias})
        model(share(dist.get_rank())).sum().backward()
        return model.head.bias is bias, bias.grad.tolist()

    assert pools(2)(run) == [(True, [5.0] * 4)] * 2
