"""Lesson: beyond_gradients. Communication hooks that send few bits: to the number what the papers'
formulas give in one process, in fewer bytes, in our wrapper and in torch's. And torch's PowerSGD in
our wrapper."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minidist as md
from minidist.averaging import LowBitState, int8_hook, one_bit_hook

OURS = md.DistributedDataParallel
HOOKS = {"int8": int8_hook, "1 bit": one_bit_hook}


def power_state(rank=1, feedback=True):
    """Torch's, which sends two backward passes as they are."""
    return PowerSGDState(None, rank, start_powerSGD_iter=2, use_error_feedback=feedback)


class Given(nn.Module):
    """A model whose gradients are what it is given: of each parameter, a tensor of its shape."""

    def __init__(self, *shapes):
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(s, dtype=torch.float64) for s in shapes)

    def forward(self, gradients):
        return sum((w * g).sum() for w, g in zip(self.weights, gradients, strict=True))


def random(shapes, rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]


def averages(wrap, state, hook, shapes, steps, given=random):
    """On a rank: the gradients after each backward pass, as one vector each."""
    model = Given(*shapes)
    ddp = wrap(model)
    ddp.register_comm_hook(state, hook)
    found = []
    for step in range(steps):
        model.zero_grad()
        ddp(given(shapes, dist.get_rank(), step)).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return torch.stack(found)


# ---- against one process -------------------------------------------------------------------------


def coded(kind, block, padding):
    """A block after it has been sent. Scales travel as float32."""
    if kind == "1 bit":
        scale = np.float32(np.abs(block).sum() / max(1, (~padding).sum()))
        return np.where(block >= 0, 1.0, -1.0) * np.float64(scale)
    scale = np.abs(block).max() / 127
    return np.round(block / scale) * np.float64(np.float32(scale)) if scale else 0 * block


def by_formula(kind, ranks, gradients, feedback):
    """What every rank has after each step; `gradients` are (steps, ranks, n)."""
    n = gradients.shape[2]
    size = 8 * math.ceil(n / 8 / ranks)
    padding = np.arange(size * ranks).reshape(ranks, size) >= n
    mine, of_mean = np.zeros((ranks, ranks, size)), np.zeros((ranks, size))
    found = []
    for step in gradients:
        whole = []
        for block in range(ranks):
            arrived = []
            for rank in range(ranks):
                own = np.zeros(size * ranks)
                own[:n] = step[rank]
                wanted = own.reshape(ranks, size)[block] + mine[rank, block]
                arrived.append(coded(kind, wanted, padding[block]))
                mine[rank, block] = feedback * (wanted - arrived[-1])
                mine[rank, block][padding[block]] = 0
            wanted = np.where(padding[block], 0, np.mean(arrived, axis=0) + of_mean[block])
            whole.append(coded(kind, wanted, padding[block]))
            of_mean[block] = feedback * (wanted - whole[-1])
            of_mean[block][padding[block]] = 0
        found.append(np.concatenate(whole)[:n])
    return np.stack(found)


SHAPES = [(3, 7), (11,), (2, 2, 2)]  # 40 numbers, in one bucket: 3 ranks have 16, 16 and 8


@pytest.mark.parametrize("wrap", [OURS, TorchDDP], ids=["ours", "torch's"])
@pytest.mark.parametrize("feedback", [True, False], ids=["with errors", "without"])
@pytest.mark.parametrize("kind", HOOKS)
def test_what_arrives_is_what_the_formulas_say(pools, kind, feedback, wrap):
    """From the second step on: torch, and so we, make buckets anew after the first."""

    def run():
        state = LowBitState(use_error_feedback=feedback)
        model = Given(*SHAPES)
        ddp = wrap(model)
        ddp.register_comm_hook(state, HOOKS[kind])
        found, order = [], []
        for step in range(6):
            if step == 1:
                state._errors.clear()  # nothing of the first buckets
            model.zero_grad()
            ddp(random(SHAPES, dist.get_rank(), step)).backward()
            found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        for parameters, *_ in state._errors.values():  # how the last buckets lie
            order += [[id(p) for p in model.parameters()].index(each) for each in parameters]
        return torch.stack(found[1:]), order

    reports = pools(3)(run)
    order = reports[0][1]
    given = [
        [torch.cat([random(SHAPES, rank, step)[i].flatten() for i in order]) for rank in range(3)]
        for step in range(1, 6)
    ]
    wanted = by_formula(kind, 3, np.stack([np.stack(each) for each in given]), feedback)
    sizes = [math.prod(SHAPES[i]) for i in order]
    pieces = np.split(wanted, np.cumsum(sizes)[:-1], axis=1)
    wanted = np.concatenate([pieces[order.index(i)] for i in range(len(SHAPES))], axis=1)
    for found, _ in reports:
        torch.testing.assert_close(found, torch.from_numpy(wanted), rtol=1e-12, atol=1e-12)


def test_without_error_feedback_one_bit_breaks(pools):
    """The loss of rank r is |x - c|² / 2 ± u·x. The ± cancels, and x = c is best. But the ranks'
    signs are those of ±u, always opposite, and so is what they send."""

    def run(feedback):
        model = nn.Linear(8, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        ddp = OURS(model)
        ddp.register_comm_hook(LowBitState(use_error_feedback=feedback), one_bit_hook)
        best = torch.ones(8, dtype=torch.float64)
        pull = torch.tensor([10.0, -10] * 4, dtype=torch.float64) * (-1) ** dist.get_rank()
        distances = []
        for _ in range(300):
            model.zero_grad()
            x = ddp(torch.eye(8, dtype=torch.float64)).flatten()
            ((x - best).square().sum() / 2 + pull @ x).backward()
            with torch.no_grad():
                model.weight -= 0.02 * model.weight.grad
            distances.append((model.weight - best).norm().item())
        return np.mean(distances[-100:])

    with_errors, without = (pools(2)(run, feedback)[0] for feedback in (True, False))
    assert with_errors < 0.3 and without > 2  # it began at √8


# ---- bytes ---------------------------------------------------------------------------------------


def on_the_wire(calls, ranks):
    """Bytes that a rank sends, from what the backend was handed: (p-1)/p of the whole vector in
    each of an all_reduce's two halves, and in the others."""
    halves = {"all_reduce": 2, "all_to_all": 1, "all_gather": 1}
    return sum(halves[name] * n for name, (_, n) in calls.items()) * (ranks - 1) / ranks


def test_few_bits_are_few_bytes(pools):
    world_size = 3

    def sent(hook, state):
        model = md.zoo.mlp(64, 96, 96, 10)
        ddp = OURS(model)
        if hook:
            ddp.register_comm_hook(state, hook)
        for step in range(3):  # the last one counts: buckets have been made anew
            with md.measure.TrafficCounter() as traffic:
                generator = torch.Generator().manual_seed(step + dist.get_rank())
                ddp(torch.randn(4, 64, generator=generator)).square().mean().backward()
        assert traffic.sent_bytes == 0
        return on_the_wire(traffic.calls, dist.get_world_size())

    full = pools(world_size)(sent, None, None)[0]
    assert full == 4 * 16522 * 2 * (world_size - 1) / world_size
    for hook, state, ratio in [
        (int8_hook, LowBitState(), 4),
        (one_bit_hook, LowBitState(), 32),
        # (64 + 96) + (96 + 96), and the head's (96 + 10), of rank 1, and 202 biases
        (powerSGD_hook, power_state(), 16522 / (160 + 192 + 106 + 202)),
    ]:
        found = pools(world_size)(sent, hook, state)
        assert found == [found[0]] * world_size
        assert 0.94 * ratio < full / found[0] < 1.0001 * ratio, (hook, full / found[0])


# ---- training ------------------------------------------------------------------------------------


def trained(hook, state, wrap=OURS, steps=50):
    """The loss of all digits, after some steps."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    images, labels = md.zoo.digits()
    model = md.zoo.mlp(64, 32, 10)
    ddp = wrap(model)
    if hook:
        ddp.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        own = torch.arange(64 * step + rank, 64 * (step + 1), ranks) % len(images)
        optimizer.zero_grad()
        F.cross_entropy(ddp(images[own]), labels[own]).backward()
        optimizer.step()
    with torch.no_grad():
        return F.cross_entropy(model(images), labels).item()


def test_losses_on_the_digits(pools):
    def loss(hook=None, state=None):
        each = pools(2)(trained, hook, state)
        assert each[0] == each[1]  # the replicas stay equal, to the last bit
        return each[0]

    exact = loss()
    assert exact < 0.6
    assert loss(int8_hook, LowBitState()) == pytest.approx(exact, rel=0.02)
    assert loss(one_bit_hook, LowBitState()) < 1.1 * exact
    assert loss(one_bit_hook, LowBitState(use_error_feedback=False)) > 2.5 * exact
    assert loss(powerSGD_hook, power_state()) < 2 * exact
    assert loss(powerSGD_hook, power_state(feedback=False)) > 3 * exact


def test_an_overflow_is_seen_once(pools):
    def given(shapes, rank, step):
        gradients = random(shapes, rank, step)
        if rank == 1 and step == 2:
            gradients[0][1, 1] = math.inf
        return gradients

    for hook in HOOKS.values():
        for found in pools(2)(averages, OURS, LowBitState(), hook, [(20, 20), (9,)], 5, given):
            finite = found.isfinite().all(1).tolist()
            assert finite == [True, True, False, True, True], hook


@pytest.mark.parametrize("rank", [1, 2])
def test_torchs_power_sgd_does_in_ours_what_it_does_in_torchs(pools, rank):
    """Its messages are as thin as the formula says: see above."""
    shapes = [(12, 9), (12,), (8, 3, 4), (5, 2)]  # the last one is sent as it is

    def run(wrap):
        return averages(wrap, power_state(rank), powerSGD_hook, shapes, 8)

    for ours, theirs in zip(pools(3)(run, OURS), pools(3)(run, TorchDDP), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)
