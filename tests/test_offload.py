"""Lesson: offload. An optimizer on the host trains as one on the device does; a device with a
budget keeps it. Held against torch's optimizers and, in bytes, against the formulas."""

import copy
import gc
import pickle
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils._pytree import tree_map_only

import minidist as md
from minidist.offload import Budget, OutOfMemory

ADAM = torch.optim.Adam, {"lr": 0.01}
SGD = torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}
ADAFACTOR = torch.optim.Adafactor, {"lr": 0.1}  # its states are of rows and of columns
KINDS = [ADAM, SGD, ADAFACTOR]


def net(dtype=torch.float64, sizes=(6, 5, 4, 3)):
    return md.zoo.mlp(*sizes, dtype=dtype)


def offloaded(params, kind=ADAM):
    return md.OffloadedOptimizer(params, kind[0], **kind[1])


def plain(params, kind=ADAM):
    return kind[0](params, **kind[1])


def backward(model, step, rank=0):
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(5, 6, dtype=torch.float64, generator=generator)
    own = next(model.parameters())
    y = model(x.to(own.device, own.dtype))
    (y * torch.arange(1, 4, device=y.device)).pow(2).sum().backward()


def train(model, optimizer, steps):
    for step in steps:
        model.zero_grad()
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def everything(model, optimizer):
    """Weights and states, by name."""
    found = dict(model.state_dict())
    for number, states in optimizer.state_dict()["state"].items():
        found |= {f"{name} of {number}": torch.as_tensor(v) for name, v in states.items()}
    return {name: value.cpu() for name, value in found.items()}


def apart(ours, wanted, allowed=1e-12):
    assert ours.keys() == wanted.keys()
    for name, value in wanted.items():
        assert ours[name].dtype == value.dtype
        assert md.parity.relative_difference(ours[name], value) <= allowed, name


# ---- one process ------------------------------------------------------------------------------


def groups(module):
    weights, biases = ([p for p in module.parameters() if p.ndim == n] for n in (2, 1))
    return [{"params": weights, "lr": 0.02}, {"params": biases, "weight_decay": 0.3}]


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k[0].__name__)
@pytest.mark.parametrize("early", [False, True], ids=["at the step", "in backward"])
def test_the_same_as_the_bare_optimizer(kind, early):
    found = []
    for make in (offloaded, plain):
        model = net()
        model[2].bias.requires_grad_(False)
        optimizer = make(groups(model), kind)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        receives = early and make is offloaded
        if receives:
            optimizer.receive_in_backward()
        for step in range(4):
            if step == 2:
                backward(model, 7)
            optimizer.zero_grad()
            for part in range(2):  # they add up
                backward(model, step, part)
            assert (model[0].weight.grad is None) == receives
            nn.utils.clip_grad_norm_(optimizer.shards if receives else model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
        found.append((everything(model, optimizer), optimizer.state_dict()["param_groups"]))
    apart(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_weights_that_others_change_between_steps_count():
    found = []
    for make in (offloaded, plain):
        model = net()
        optimizer = make(model.parameters())
        train(model, optimizer, [0])
        with torch.no_grad():
            model[0].weight.clamp_(-0.1, 0.1)
        train(model, optimizer, [1])
        model.load_state_dict(net().state_dict())
        train(model, optimizer, [2])
        model[0].weight.data = model[0].weight.data * 2  # leaves no trace
        train(model, optimizer, [3])
        found.append(everything(model, optimizer))
    apart(*found)


@pytest.mark.parametrize("early", [False, True])
def test_bfloat16_has_a_copy_in_float32(early):
    """So small steps are not lost: 1 + 2⁻¹⁰ is 1 in bfloat16."""
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = offloaded([p], (torch.optim.SGD, {"lr": 2.0**-10}))
    if early:
        optimizer.receive_in_backward()

    def step():
        optimizer.zero_grad()
        (-p).sum().backward()
        optimizer.step()

    for _ in range(16):
        step()
    assert p.dtype is torch.bfloat16 and torch.equal(p, torch.full_like(p, 1 + 2.0**-6))
    (copy_,) = optimizer.shards
    assert copy_.dtype is torch.float32 and torch.equal(copy_, torch.full((3,), 1 + 2.0**-6))
    for first in (4.0, 5.0):
        with torch.no_grad():
            p[0] = first  # the others keep what only the host knows
        step()
    assert optimizer.shards[0].tolist() == [5 + 2.0**-10] + [1 + 2.0**-6 + 2.0**-9] * 2
    optimizer.zero_grad()
    for gradient in (256.0, 1.0, 1.0):  # they add up in float32: in bfloat16 256 + 1 is 256
        (p * gradient).sum().backward()
    assert not early or copy_.grad.tolist() == [258.0] * 3


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k[0].__name__)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_states_go_from_one_to_the_other(kind, dtype):
    """Saved and loaded after each two steps: by the bare optimizer, or ours."""

    def trained(*makes):
        saved = None
        for make in makes:
            model = net(dtype)
            optimizer = make(model.parameters(), kind)
            if saved:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                apart(everything(model, optimizer), saved[2])
            train(model, optimizer, range(2))
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            saved = *pickle.loads(pickle.dumps(saved)), everything(model, optimizer)
        return saved[2]

    trained(offloaded, offloaded)  # in 16 bits states are in float32, and loaded so
    if dtype is torch.float64:
        for makes in ((plain, offloaded), (offloaded, plain), (offloaded, offloaded)):
            apart(trained(*makes), trained(plain, plain))


# ---- ranks ------------------------------------------------------------------------------------


def ddp(module):
    if dist.get_rank() == 1:  # rank 0's weights count, and the optimizer is there already
        with torch.no_grad():
            module[0].weight.zero_()
    optimizer = offloaded(module.parameters())
    return md.DistributedDataParallel(module), optimizer


def stage2(module):
    own = md.OffloadedOptimizer.of(torch.optim.Adam)
    optimizer = md.ZeroRedundancyOptimizer(module.parameters(), own, lr=0.01)
    return md.ShardedDataParallel(module, optimizer), optimizer


def stage3(module):
    model = md.FullyShardedDataParallel(
        module, auto_wrap_policy=md.fully_sharded.by_class(nn.Linear)
    )
    return model, offloaded(model.parameters())


@pytest.mark.parametrize("strategy", [ddp, stage2, stage3])
def test_parity(pools, strategy):
    assert md.parity.check(strategy, optimizer=plain, ranks=pools(2), steps=2).largest <= 1e-12


def test_saved_and_loaded_with_zero(pools):
    def steps(which, state=None, dtype=torch.float64):
        model, optimizer = stage2(net(dtype))
        if state:
            model.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
        train(model, optimizer, which)
        states = tree_map_only(DTensor, DTensor.full_tensor, optimizer.state_dict())
        return copy.deepcopy((dict(model.state_dict()), states))

    saved, straight = pools(2)(steps, [0, 1])[0], pools(2)(steps, range(4))[0]
    apart(pools(2)(steps, [2, 3], saved)[0][0], straight[0])
    narrow = pools(2)(steps, [0, 1], None, torch.bfloat16)[0]
    assert narrow[1]["state"][0]["exp_avg"].dtype is torch.float32
    assert pools(2)(steps, [2], narrow, torch.bfloat16)[0][1]["state"][0]["step"] == 3


# ---- bytes ------------------------------------------------------------------------------------

WIDE = 64, 256, 256, 10
P = 4 * (64 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10)


def step_within(budget, make, early=False):
    """Train within a budget. Returns what was measured; raises if it was not enough."""
    model = net(torch.float32, WIDE)
    optimizer = make(model.parameters())
    if early:
        optimizer.receive_in_backward()
    x = torch.randn(16, 64)
    with Budget(budget, model, optimizer) as device:
        for _ in range(2):
            optimizer.zero_grad()
            model(x).pow(2).sum().backward()
            optimizer.step()
    return device


def test_bytes_on_the_device():
    on_device = step_within(10**9, plain)
    at_step, early = (step_within(10**9, offloaded, early) for early in (False, True))
    assert on_device.after("step")["optimizer states"] == 2 * P + 6 * 4
    for device in (at_step, early):
        assert device.peak_of["optimizer states"] == 0
        assert device.after("step")["parameters"] == device.peak_of["parameters"] == P
    assert at_step.after("backward")["gradients"] == P
    assert early.peak_of["gradients"] == 0
    # While backward is in the middle layer: its weight's gradient, and what it computes with.
    assert 4 * 256 * 256 <= early.peak_of["other"] < P
    assert early.peak < at_step.peak < on_device.peak


def test_a_budget_is_exactly_what_is_needed():
    needed = step_within(10**9, offloaded).peak
    assert step_within(needed, offloaded).peak == needed
    with pytest.raises(OutOfMemory, match="no room on the device"):
        step_within(needed - 1, offloaded)
    with Budget(100, nn.Linear(1, 1)), pytest.raises(OutOfMemory):
        torch.empty(4).untyped_storage().resize_(93)  # beside 8 of the layer


def test_bytes_on_an_emulated_link_arrive_one_after_the_other():
    link, start = md.offload.HostLink(1e6), time.perf_counter()
    link.send(20_000)
    link.send(20_000)
    sent = time.perf_counter() - start
    link.wait()
    assert sent < 0.02 and time.perf_counter() - start >= 0.04


def test_nothing_stays_behind():
    model = net()
    optimizer = offloaded(model.parameters())
    optimizer.receive_in_backward()
    train(model, optimizer, [0])
    lives = [weakref.ref(optimizer), weakref.ref(optimizer.shards[0].untyped_storage())]
    del optimizer
    gc.collect()
    assert [life() for life in lives] == [None, None]
    backward(model, 0)  # its hooks take nothing any more
    assert model[0].weight.grad is not None


# ---- mistakes ---------------------------------------------------------------------------------


def test_mistakes():
    model = net()
    optimizer = offloaded(model.parameters())
    with pytest.raises(ValueError, match="doesn't match the size"):
        optimizer.load_state_dict(torch.optim.Adam([model[0].weight]).state_dict())
    backward(model, 0)
    model.float()
    with pytest.raises(RuntimeError, match="converted since the optimizer was made"):
        optimizer.step()


@pytest.mark.parametrize("wrap", [TorchDDP, md.DistributedDataParallel])
@pytest.mark.parametrize("first", [True, False])
def test_gradients_that_leave_before_a_wrapper_sees_them_train_nothing(pools, wrap, first):
    def early():
        module = net()
        model = wrap(module) if first else module
        optimizer = offloaded(module.parameters(), SGD)
        optimizer.receive_in_backward()
        model = model if first else wrap(module)
        with pytest.raises(RuntimeError, match="had taken it|another hook took the gradient"):
            backward(model, 0, dist.get_rank())
            optimizer.step()
        return all(map(torch.equal, module.parameters(), net().parameters()))

    assert pools(2)(early) == [True, True]


@pytest.mark.gpu
@pytest.mark.parametrize("early", [False, True])
def test_on_a_gpu(early):
    found = []
    for make, device in ((offloaded, "cuda"), (plain, "cpu")):
        model = net().to(device)
        optimizer = make(model.parameters())
        if early and make is offloaded:
            optimizer.receive_in_backward()
        train(model, optimizer, range(3))
        found.append(everything(model, optimizer))
    apart(*found)
