"""Lesson: beyond_gradients. Communication hooks that send few bits or thin matrices: to the number
what the papers' formulas give in one process, in fewer bytes, in our wrapper and in torch's."""

import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minidist as md
from minidist.averaging import (
    LowBitState,
    PowerSGDState,
    int8_hook,
    one_bit_hook,
    power_sgd_hook,
)
from minidist.averaging.low_bit_hooks import INT8, SIGN

OURS = md.DistributedDataParallel
HOOKS = {"int8": int8_hook, "1 bit": one_bit_hook}


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


# ---- codes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_8_bits_are_off_by_half_a_step_at_most(dtype):
    rows = torch.randn(3, 40).to(dtype) * torch.tensor([[1.0], [1e-3], [0.0]]).to(dtype)
    data, scale = INT8.encode(rows, torch.ones_like(rows, dtype=torch.bool))
    assert data.dtype == torch.uint8 and data.shape == rows.shape
    off = (INT8.decode(data).to(dtype) * scale - rows).abs()
    slack = 1 + 600 * torch.finfo(dtype).eps
    assert (off <= slack * rows.abs().amax(1, keepdim=True) / 254).all()


def test_1_bit_is_the_sign_and_eight_of_them_are_a_byte():
    rows = torch.tensor([[1.0, -3, 0, -1, -1, -1, -1, 2] + [-1] * 8], dtype=torch.float64)
    real = torch.arange(16).unsqueeze(0) < 12  # what fills a row counts for nothing
    data, scale = SIGN.encode(rows * real, real)
    assert data.tolist() == [[0b10000101, 0b11110000]] and scale.item() == 14 / 12
    data, scale = SIGN.encode(rows, rows < 9)
    assert data.tolist() == [[0b10000101, 0]] and scale.item() == 18 / 16
    assert SIGN.decode(data).tolist() == [[1, -1, 1, -1, -1, -1, -1, 1] + [-1] * 8]


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


SHAPES = [(3, 7), (11,), (2, 2, 2)]  # 40 numbers, in one bucket: 2 ranks have 24 and 16 of them


@pytest.mark.parametrize("wrap", [OURS, TorchDDP], ids=["ours", "torch's"])
@pytest.mark.parametrize("feedback", [True, False], ids=["with errors", "without"])
@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_arrives_is_what_the_formulas_say(pools, world_size, kind, feedback, wrap):
    """From the second step on: torch, and so we, make buckets anew after the first."""

    def run():
        state = LowBitState(use_error_feedback=feedback)
        model = Given(*SHAPES)
        ddp = wrap(model)
        ddp.register_comm_hook(state, HOOKS[kind])
        found, order = [], []
        for step in range(6):
            if step == 1:
                state._kept.clear()  # nothing of the first buckets
            model.zero_grad()
            ddp(random(SHAPES, dist.get_rank(), step)).backward()
            found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        for parameters, _ in state._kept.values():  # how the last buckets lie
            order += [[id(p) for p in model.parameters()].index(each) for each in parameters]
        return torch.stack(found[1:]), order

    reports = pools(world_size)(run)
    order = reports[0][1]
    given = [
        [
            torch.cat([random(SHAPES, rank, step)[i].flatten() for i in order])
            for rank in range(world_size)
        ]
        for step in range(1, 6)
    ]
    wanted = by_formula(kind, world_size, np.stack([np.stack(each) for each in given]), feedback)
    sizes = [math.prod(SHAPES[i]) for i in order]
    pieces = np.split(wanted, np.cumsum(sizes)[:-1], axis=1)
    wanted = np.concatenate([pieces[order.index(i)] for i in range(len(SHAPES))], axis=1)
    for found, _ in reports:
        torch.testing.assert_close(found, torch.from_numpy(wanted), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", HOOKS)
def test_a_model_of_one_number_on_four_ranks(pools, kind):
    """Three of four blocks are empty, and one has seven numbers that only fill it."""

    def given(shapes, rank, step):
        return [torch.full(shapes[0], 2.0 + rank, dtype=torch.float64)]

    found = pools(4)(averages, OURS, LowBitState(), HOOKS[kind], [(1,)], 3, given)
    for each in found:
        torch.testing.assert_close(each, torch.full((3, 1), 3.5, dtype=torch.float64))


@pytest.mark.parametrize("wrap", [OURS, TorchDDP], ids=["ours", "torch's"])
@pytest.mark.parametrize("kind", HOOKS)
def test_with_error_feedback_nothing_is_lost_in_the_long_run(pools, kind, wrap):
    """The sum of all steps is that of the true means, but for the errors of the last one."""
    shapes, steps = [(40, 30), (50,), (7, 9), (200,)], 60
    small = partial(wrap, bucket_cap_mb=1e-3)  # several buckets

    def exact():
        return averages(wrap, None, mean_hook, shapes, steps)

    wanted = pools(2)(exact)[0][1:].sum(0)
    off = {}
    for feedback in (True, False):
        state = LowBitState(use_error_feedback=feedback)
        found = pools(2)(averages, small, state, HOOKS[kind], shapes, steps)
        assert torch.equal(found[0], found[1])
        off[feedback] = (found[0][1:].sum(0) - wanted).norm() / wanted.norm()
    assert off[True] < 0.75 * off[False] and off[True] < {"int8": 2e-3, "1 bit": 0.6}[kind], off


def mean_hook(_, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    flat = bucket.buffer() / dist.get_world_size()
    work = dist.all_reduce(flat, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


@pytest.mark.parametrize("feedback", [True, False])
def test_without_error_feedback_one_bit_breaks(pools, feedback):
    """The loss of rank r is |x - c|² / 2 ± u·x. The ± cancels, and x = c is best. But the ranks'
    signs are those of ±u, always opposite, and so is what they send."""

    def run():
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

    distance = pools(2)(run)[0]  # it began at √8
    assert distance < 0.3 if feedback else distance > 2, distance


# ---- bytes ---------------------------------------------------------------------------------------


def on_the_wire(calls, ranks):
    """Bytes that a rank sends, from what the backend was handed: (p-1)/p of the whole vector in
    each of an all_reduce's two halves, and in the others."""
    halves = {"all_reduce": 2, "all_to_all": 1, "all_gather": 1}
    return sum(halves[name] * n for name, (_, n) in calls.items()) * (ranks - 1) / ranks


@pytest.mark.parametrize("world_size", [2, 3])
def test_few_bits_are_few_bytes(pools, world_size):
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
        (power_sgd_hook, PowerSGDState(), 16522 / (160 + 192 + 106 + 202)),
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
    assert loss(power_sgd_hook, PowerSGDState()) < 2 * exact
    assert loss(power_sgd_hook, PowerSGDState(use_error_feedback=False)) > 3 * exact


@pytest.mark.parametrize("hook", [int8_hook, one_bit_hook, power_sgd_hook])
@pytest.mark.parametrize("worst", [math.inf, math.nan])
def test_an_overflow_is_seen_once(pools, hook, worst):
    def given(shapes, rank, step):
        gradients = random(shapes, rank, step)
        if rank == 1 and step == 2:
            gradients[0][1, 1] = worst
        return gradients

    state = PowerSGDState() if hook is power_sgd_hook else LowBitState()
    for found in pools(2)(averages, OURS, state, hook, [(20, 20), (9,)], 5, given):
        finite = found.isfinite().all(1).tolist()
        assert finite == [True, True, False, True, True]


# ---- PowerSGD ------------------------------------------------------------------------------------


def torchs_seed():
    return int(np.random.RandomState(0).randint(1_000_000_000))


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("feedback", [True, False], ids=["with errors", "without"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_power_sgd_is_torchs(pools, world_size, rank, feedback):
    shapes = [(12, 9), (12,), (8, 3, 4), (5, 2)]  # the last one is sent as it is, but for rank 1

    def run(wrap, ours):
        options = dict(
            matrix_approximation_rank=rank, start_powerSGD_iter=2, use_error_feedback=feedback
        )
        if ours:
            state = PowerSGDState(None, **options, random_seed=torchs_seed())
            return averages(wrap, state, power_sgd_hook, shapes, 8)
        state = powerSGD_hook.PowerSGDState(None, **options, min_compression_rate=1)
        return averages(wrap, state, powerSGD_hook.powerSGD_hook, shapes, 8)

    theirs = pools(world_size)(run, TorchDDP, False)
    for wrap in (OURS, TorchDDP):
        for ours, wanted in zip(pools(world_size)(run, wrap, True), theirs, strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-8, atol=1e-8)


def test_matrices_of_low_rank_arrive_whole(pools):
    """Of rank 1 on each rank, so 2 in the mean, in any dtype and layout; vectors always do."""

    def given(shapes, rank, step):
        generator = torch.Generator().manual_seed(step + 100 * rank)
        n, m = shapes[0]
        u, v, w = (torch.randn(k, generator=generator).double() for k in (n, m, *shapes[1]))
        return [torch.outer(u, v), w]

    shapes, steps = [(16, 12), (7,)], 3
    exact = pools(2)(averages, OURS, None, mean_hook, shapes, steps, given)
    for rank, whole in (2, True), (1, False):
        state = PowerSGDState(matrix_approximation_rank=rank, use_error_feedback=False)
        found = pools(2)(averages, OURS, state, power_sgd_hook, shapes, steps, given)
        off = (found[0] - exact[0]).abs()
        assert off[:, 192:].max() < 1e-12 and (off[:, :192].max() < 1e-10) == whole


def test_last_steps_q_is_better_than_a_random_one(pools):
    """Of a gradient that stays, the power method finds the largest direction; one step does not."""

    def given(shapes, rank, step):
        return random(shapes, rank, 0)

    off = {}
    for warm in (True, False):
        state = PowerSGDState(use_error_feedback=False, warm_start=warm)
        found = pools(2)(averages, OURS, state, power_sgd_hook, [(20, 30)], 40, given)[0]
        mean = (random([(20, 30)], 0, 0)[0] + random([(20, 30)], 1, 0)[0]) / 2
        off[warm] = (found[-1].view(20, 30) - mean).norm().item()
    best = torch.linalg.svdvals(mean)[1:].norm().item()
    assert off[True] == pytest.approx(best, rel=1e-2) and off[False] > 1.02 * best


@pytest.mark.parametrize("kind", ["int8", "1 bit", "power"])
def test_error_feedback_that_is_switched_off_adds_nothing_any_more(pools, kind):
    def given(shapes, rank, step):
        return (
            random(shapes, rank, step) if step < 2 else [torch.zeros(*s).double() for s in shapes]
        )

    def hook(state, bucket):
        state.use_error_feedback = state.step < 2
        state.step += 1
        return (HOOKS | {"power": power_sgd_hook})[kind](state, bucket)

    state = PowerSGDState() if kind == "power" else LowBitState()
    state.step = 0
    found = pools(2)(averages, OURS, state, hook, [(16, 12)], 4, given)[0]
    assert found[1].abs().max() > 0 and found[2:].abs().max() == 0


def test_16_bits_and_layouts(pools):
    def run(hook, state):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(4, 24, 3).to(memory_format=torch.channels_last),
            nn.Flatten(),
            nn.Linear(24, 2),
        ).bfloat16()
        ddp = OURS(model)
        if hook:
            ddp.register_comm_hook(state, hook)
        generator = torch.Generator().manual_seed(dist.get_rank())
        ddp(torch.randn(5, 4, 3, 3, generator=generator).bfloat16()).square().sum().backward()
        return [p.grad.float() for p in model.parameters()]

    exact = pools(2)(run, None, None)[0]
    for hook, state, allowed in [
        (int8_hook, LowBitState(), 0.02),
        # The mean over 2 ranks of what 5 examples give has a rank of 10 at most.
        (power_sgd_hook, PowerSGDState(matrix_approximation_rank=12), 0.02),
    ]:
        for ours, wanted in zip(pools(2)(run, hook, state)[0], exact, strict=True):
            assert (ours - wanted).norm() < allowed * sum(w.norm() for w in exact)


def test_complex_gradients_are_sent_as_they_are(pools):
    def run():
        model = nn.Module()
        model.weight = nn.Parameter(torch.zeros(20, 30, dtype=torch.cdouble))
        model.forward = lambda g: (model.weight * g).sum().real
        ddp = OURS(model)
        ddp.register_comm_hook(PowerSGDState(), power_sgd_hook)
        generator = torch.Generator().manual_seed(dist.get_rank())
        given = torch.randn(20, 30, dtype=torch.cdouble, generator=generator)
        ddp(given).backward()
        return given.conj(), model.weight.grad

    (one, ours), (other, theirs) = pools(2)(run)
    torch.testing.assert_close(ours, (one + other) / 2)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("hook", [int8_hook, one_bit_hook, power_sgd_hook])
def test_a_hook_without_its_state(pools, hook):
    def run():
        ddp = OURS(nn.Linear(3, 2))
        ddp.register_comm_hook(None, hook)
        ddp(torch.ones(1, 3)).sum().backward()

    with pytest.raises(md.RankError, match="state is a (LowBit|PowerSGD)State, not None"):
        pools(2)(run)


@pytest.mark.parametrize("rank", [0, 1.5])
def test_a_rank_of_0_is_refused(rank):
    with pytest.raises(
        ValueError, match=f"matrix_approximation_rank must be 1 or more, not {rank}"
    ):
        PowerSGDState(matrix_approximation_rank=rank)
