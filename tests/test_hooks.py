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
    ddp = wrap(model := Given(*shapes))
    ddp.register_comm_hook(state, hook)
    found = []
    for step in range(steps):
        model.zero_grad()
        ddp(given(shapes, dist.get_rank(), step)).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return torch.stack(found)


def coded(kind, blocks, real):
    """Blocks after they have been sent. Scales travel as float32."""
    if kind == "1 bit":
        scales = np.abs(blocks).sum(-1, keepdims=True) / real.sum(-1, keepdims=True)
        return np.where(blocks >= 0, 1.0, -1.0) * np.float32(scales).astype(float)
    scales = np.abs(blocks).max(-1, keepdims=True) / 127
    return np.round(blocks / scales) * np.float32(scales).astype(float)


def by_formula(kind, gradients):
    """What every rank has after each step; `gradients` are (steps, ranks, n)."""
    _, ranks, n = gradients.shape
    size = 8 * math.ceil(n / 8 / ranks)
    real = (np.arange(size * ranks) < n).reshape(ranks, size)
    mine = of_mean = 0.0
    found = []
    for step in gradients:
        blocks = np.pad(step, [(0, 0), (0, size * ranks - n)]).reshape(ranks, ranks, size)
        wanted = blocks + mine
        arrived = coded(kind, wanted, real)
        mine = (wanted - arrived) * real
        wanted = (arrived.mean(0) + of_mean) * real
        whole = coded(kind, wanted, real)
        of_mean = (wanted - whole) * real
        found.append(whole.flatten()[:n])
    return torch.from_numpy(np.stack(found))


@pytest.mark.parametrize("wrap", [OURS, TorchDDP], ids=["ours", "torch's"])
@pytest.mark.parametrize("kind", HOOKS)
def test_what_arrives_is_what_the_formulas_say(pools, kind, wrap):
    shapes = [(38,)]  # of which 3 ranks have 16, 16 and 6

    def run():
        return averages(wrap, LowBitState(), HOOKS[kind], shapes, 6)

    given = [[random(shapes, rank, step)[0].numpy() for rank in range(3)] for step in range(6)]
    wanted = by_formula(kind, np.array(given))
    for found in pools(3)(run):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_errors_belong_to_a_buckets_parameters():
    """Buckets are made anew after the first backward pass: others may have the same number."""
    state, (a, b) = LowBitState(), Given((3,), (5,)).weights
    first, anew = (md.distributed_data_parallel.Bucket(0, each, True) for each in ([a, b], [b, a]))
    state.errors(first, torch.zeros(2, 8))[0].fill_(1)
    assert state.errors(first, torch.zeros(2, 8))[0].eq(1).all()
    assert state.errors(anew, torch.zeros(2, 8))[0].eq(0).all()


@pytest.mark.parametrize("rank", [1, 2])
def test_torchs_power_sgd_does_in_ours_what_it_does_in_torchs(pools, rank):
    shapes = [(12, 9), (12,), (8, 3, 4), (5, 2)]  # the last one is sent as it is

    def run(wrap):
        return averages(wrap, power_state(rank), powerSGD_hook, shapes, 8)

    for ours, theirs in zip(pools(3)(run, OURS), pools(3)(run, TorchDDP), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


def trained(hook=None, state=None):
    """The loss of all digits after 50 steps, and the bytes of the last one, as the backend was
    handed them: in an all_reduce's two halves, and in the others."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    images, labels = md.zoo.digits()
    ddp = OURS(model := md.zoo.mlp(64, 32, 10))
    if hook:
        ddp.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(50):
        own = torch.arange(64 * step + rank, 64 * (step + 1), ranks) % len(images)
        optimizer.zero_grad()
        with md.measure.TrafficCounter() as traffic:
            F.cross_entropy(ddp(images[own]), labels[own]).backward()
        optimizer.step()
    assert traffic.sent_bytes == 0
    halves = {"all_reduce": 2, "all_to_all": 1, "all_gather": 1}
    nbytes = sum(halves[name] * n for name, (_, n) in traffic.calls.items())
    with torch.no_grad():
        return F.cross_entropy(model(images), labels).item(), nbytes


def test_bytes_and_losses_on_the_digits(pools):
    exact, full = pools(2)(trained)[0]
    assert exact < 0.6 and full == 2 * 4 * 2410
    thin = 2410 / ((64 + 32) + (32 + 10) + 42)  # P and Q of two matrices, and the biases
    for hook, state, least, most, fewer in [
        (int8_hook, LowBitState(), 0.98, 1.02, 4),
        (one_bit_hook, LowBitState(), 0.9, 1.1, 32),
        (powerSGD_hook, power_state(), 1, 2, thin),
        (powerSGD_hook, power_state(feedback=False), 3, 99, thin),
    ]:
        (loss, nbytes), other = pools(2)(trained, hook, state)
        assert (loss, nbytes) == other  # the replicas stay equal, to the last bit
        assert least < loss / exact < most, (hook, loss)
        assert 0.96 * fewer < full / nbytes < 1.0001 * fewer, (hook, nbytes)


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
