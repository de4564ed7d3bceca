"""Lesson: beyond_gradients. Replicas that meet now and then are those that one process has when it
holds all of them; meeting after each step is DistributedDataParallel; torch's optimizer agrees."""

import math
import re
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minidist as md
from minidist.averaging import DiLoCo, LocalSGD
from minidist.averaging.naive import NaiveDiLoCo, local_sgd

STEPS = 13

# All else is the same whatever carries it.
BOTH = pytest.mark.parametrize("pools", ["gloo", "shm"], indirect=True, scope="module")


def share(rank, step):
    """Examples of a rank, other ones on each rank and at each step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(5, 6, dtype=torch.float64, generator=generator)
    targets = torch.randn(5, 3, dtype=torch.float64, generator=generator)
    return inputs, targets


def backward(model, rank, step):
    inputs, targets = share(rank, step)
    model.zero_grad()
    torch.nn.functional.mse_loss(model(inputs), targets).backward()


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def net():
    return md.zoo.mlp(6, 5, 4, 3, dtype=torch.float64)


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def apart(ours, theirs):
    """The largest relative difference."""
    pairs = zip(ours, theirs, strict=True)
    return max(md.parity.relative_difference(a, b) for a, b in pairs)


# ---- one process that holds all replicas: nothing of what is tested ------------------------------


def alone(ranks, meet, steps=STEPS, first=0):
    """The weights of each replica. `meet(step, replicas)` changes lists of weights."""
    models = [net() for _ in range(ranks)]
    optimizers = [momentum(model) for model in models]
    for step in range(1, steps + 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            backward(model, rank, step)
            optimizer.step()
        with torch.no_grad():
            meet(step, [list(model.parameters()) for model in models])
    return [weights(model) for model in models]


def mean_every(period):
    def meet(step, replicas):
        if step % period == 0:
            for each in zip(*replicas, strict=True):
                mean = torch.stack(each).mean(0)
                for parameter in each:
                    parameter.copy_(mean)

    return meet


def outer_every(period):
    """DiLoCo, number by number."""
    anchors, speeds = weights(net()), [0.0] * 6

    def meet(step, replicas):
        if step % period == 0:
            for i, each in enumerate(zip(*replicas, strict=True)):
                gradient = anchors[i] - torch.stack(each).mean(0)
                speeds[i] = 0.9 * speeds[i] + gradient
                anchors[i] = anchors[i] - 0.7 * (gradient + 0.9 * speeds[i])
                for parameter in each:
                    parameter.copy_(anchors[i])

    return meet


KINDS = {
    "local SGD": (partial(LocalSGD, period=4), partial(mean_every, 4)),
    "period 1": (partial(LocalSGD, period=1), partial(mean_every, 1)),
    "DiLoCo": (partial(DiLoCo, period=4), partial(outer_every, 4)),
}


def train(wrap, steps=STEPS, spoil=True):
    rank, model = dist.get_rank(), net()
    if spoil and rank:  # a rank that begins with other values takes rank 0's
        with torch.no_grad():
            model[0].weight.add_(rank)
    optimizer = wrap(momentum(model))
    for step in range(1, steps + 1):
        backward(model, rank, step)
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@BOTH
def test_replicas_are_those_of_one_process_that_holds_them_all(pools, world_size):
    for kind, (wrap, meet) in KINDS.items():
        found = pools(world_size)(train, wrap)
        for ours, wanted in zip(found, alone(world_size, meet()), strict=True):
            assert apart(ours, wanted) < 1e-12, kind
        if world_size > 1 and kind != "period 1":  # after step 13 they have gone their own ways
            assert apart(found[0], found[1]) > 1e-6, kind


@pytest.mark.parametrize("naive", ["local SGD", "DiLoCo"])
def test_the_naive_page_is_the_same(pools, naive):
    def plainly():
        rank, model = dist.get_rank(), net()
        optimizer = momentum(model)
        outer = NaiveDiLoCo(model, 4)
        after = outer.after if naive == "DiLoCo" else partial(local_sgd, model, period=4)
        for step in range(1, STEPS + 1):
            backward(model, rank, step)
            optimizer.step()
            after(step=step)
        return weights(model)

    for ours, plain in zip(pools(3)(train, KINDS[naive][0]), pools(3)(plainly), strict=True):
        assert apart(ours, plain) < 1e-12


# ---- meeting after each step is DDP --------------------------------------------------------------


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def test_period_1_under_sgd_trains_as_one_process_does(pools):
    for warmup in 0, 2:

        def strategy(model, warmup=warmup):
            return model, LocalSGD(sgd(model.parameters()), period=1, warmup=warmup)

        parity = md.parity.check(strategy, optimizer=sgd, ranks=pools(3))
        assert parity.world_size == 3 and parity.largest < 1e-12, warmup


def test_the_warm_up_is_ddp_with_any_optimizer(pools):
    def strategy(model):
        adam = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, LocalSGD(adam, period=3, warmup=4)

    adam = partial(torch.optim.AdamW, lr=0.01)
    assert md.parity.check(strategy, optimizer=adam, ranks=pools(3), steps=4).largest < 1e-12
    with pytest.raises(md.parity.ParityError, match="step 5, "):
        md.parity.check(strategy, optimizer=adam, ranks=pools(3), steps=5)


# ---- torch's own ---------------------------------------------------------------------------------


def test_torchs_post_local_sgd_optimizer_comes_to_the_same(pools):
    period, warmup = 4, 3

    def torchs():
        with warnings.catch_warnings():  # its module still uses what torch has deprecated
            warnings.simplefilter("ignore")
            from torch.distributed.optim import PostLocalSGDOptimizer
        rank, ddp = dist.get_rank(), TorchDDP(net())
        state = post_localSGD_hook.PostLocalSGDState(
            None, None, start_localSGD_iter=warmup, post_local_gradient_allreduce=False
        )
        ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        averager = PeriodicModelAverager(period, warmup_steps=warmup + period - 1)
        optimizer = PostLocalSGDOptimizer(momentum(ddp), averager)
        for step in range(1, STEPS + 1):
            backward(ddp, rank, step)
            optimizer.step()
        return weights(ddp)

    ours = pools(3)(train, partial(LocalSGD, period=period, warmup=warmup), spoil=False)
    assert max(map(apart, ours, pools(3)(torchs))) < 1e-12


# ---- what is sent --------------------------------------------------------------------------------


def test_bytes_are_those_that_the_docstrings_say(pools):
    def sent(wrap):
        optimizer = wrap(momentum(model := net()))
        with md.measure.TrafficCounter() as traffic:
            for step in range(1, 9):
                backward(model, dist.get_rank(), step)
                optimizer.step()
        return traffic.calls["all_reduce"], traffic.sent_messages

    nbytes = 8 * sum(p.numel() for p in net().parameters())
    for wrap, meetings in [
        (partial(LocalSGD, period=1), 8),
        (partial(LocalSGD, period=4), 2),
        (partial(LocalSGD, period=4, warmup=4), 5),
        (partial(DiLoCo, period=4), 2),
    ]:
        assert pools(3)(sent, wrap) == [((meetings, meetings * nbytes), 0)] * 3, wrap


def test_drift_and_average_are_their_formulas(pools):
    def measure():
        rank = dist.get_rank()
        x, y = torch.tensor([3.0, 4.0]) * rank, torch.tensor([[12.0]], dtype=torch.float64)
        apart = md.averaging.drift([x, y])
        md.averaging.average([x, y])
        return apart, x, y, md.averaging.drift([x, y])

    for apart_, x, y, after in pools(3)(measure):  # x is 0, 1 and 2 times a vector of length 5
        assert apart_ == pytest.approx(math.sqrt(2 / 3 * 25) / 13) and after == 0
        assert x.tolist() == [3, 4] and y.item() == 12 and y.dtype == torch.float64


# ---- as an optimizer -----------------------------------------------------------------------------


def test_training_goes_on_from_a_checkpoint_of_any_step(pools, tmp_path):
    def interrupted(kind, at):
        rank, model = dist.get_rank(), net()
        wrap = KINDS[kind][0]
        optimizer = wrap(momentum(model))
        for step in range(1, STEPS + 1):
            backward(model, rank, step)
            optimizer.step()
            if step == at:  # everything anew, from a file
                file = tmp_path / f"{kind}-{at}-{rank}.pt"
                torch.save((model.state_dict(), optimizer.state_dict()), file)
                model = md.zoo.mlp(6, 5, 4, 3, dtype=torch.float64, seed=7)
                optimizer = wrap(momentum(model))
                for part, state in zip((model, optimizer), torch.load(file), strict=True):
                    part.load_state_dict(state)
                assert optimizer.steps == at
        return weights(model)

    for kind in KINDS:
        whole = pools(2)(train, KINDS[kind][0])
        for at in (3, 8):  # within a period, and at its end
            assert max(map(apart, pools(2)(interrupted, kind, at), whole)) == 0, kind


def test_weights_that_are_loaded_before_the_first_step_are_where_the_ranks_set_out(pools):
    """Rank 0's, for all; with a state of the bare optimizer, too."""

    def loaded():
        rank, model = dist.get_rank(), md.zoo.mlp(6, 5, 4, 3, dtype=torch.float64, seed=7)
        optimizer = DiLoCo(momentum(model), 4)
        optimizer.steps = 3
        optimizer.load_state_dict(momentum(model).state_dict())
        model.load_state_dict(md.zoo.mlp(6, 5, 4, 3, dtype=torch.float64, seed=rank).state_dict())
        start = optimizer.steps
        for step in range(1, 5):
            backward(model, rank, step)
            optimizer.step()
        return start, weights(model)

    (start, ours), (_, others) = pools(2)(loaded)
    assert start == 0 and apart(ours, others) == 0


def test_it_is_used_as_any_optimizer(pools):
    def run():
        model = net()
        optimizer = LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), period=2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        called = []
        optimizer.register_step_post_hook(lambda *_: called.append("after"))

        def closure():
            backward(model, dist.get_rank(), len(called))
            called.append("closure")
            return "the loss"

        assert optimizer.step(closure) == "the loss" and called == ["closure", "after"]
        scheduler.step()
        assert optimizer.optimizer.param_groups[0]["lr"] == 0.05
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
        try:
            optimizer.step()
        except RuntimeError as error:
            return str(error)

    for told in pools(2)(run):
        assert told.startswith("LocalSGD: a parameter was unfrozen or added since its optimizer")


def test_groups_dtypes_layouts_and_frozen_parameters(pools):
    def run():
        rank = dist.get_rank()
        model = torch.nn.Sequential(
            torch.nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last),
            torch.nn.Flatten(),
            torch.nn.Linear(3, 2).bfloat16(),
        )
        model[0].bias.requires_grad_(False)
        torch.nn.init.ones_(model[2].weight)  # what is subtracted is then exact in bfloat16
        torch.nn.init.ones_(model[2].bias)
        groups = [
            {"params": [*part.parameters()], "lr": lr}
            for part, lr in ((model[0], 0.1), (model[2], 0.25))
        ]
        optimizer = LocalSGD(torch.optim.SGD(groups), period=1)
        frozen = model[0].bias.clone()
        own = [torch.full_like(p, 1 + rank) for p in model.parameters()]
        for parameter, gradient in zip(model.parameters(), own, strict=True):
            parameter.grad = gradient if parameter.requires_grad else None
        before = weights(model)
        optimizer.step()
        assert torch.equal(model[0].bias, frozen)
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        return before, weights(model)

    for before, after in pools(3)(run):  # the mean gradient is 2
        for i, rate in (0, 0.1), (2, 0.25), (3, 0.25):
            torch.testing.assert_close(after[i], before[i] - 2 * rate)


# ---- what is wrong -------------------------------------------------------------------------------


def refused(make):
    try:
        make(dist.get_rank())
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def other_model(rank):
    return LocalSGD(momentum(md.zoo.mlp(6, 5 + rank, 3)), 4)


MISTAKES = [
    (other_model, "ValueError: the ranks have different models.*shape .5, 6.*shape .6, 6"),
    (lambda rank: DiLoCo(momentum(net()), 4 + rank), "disagree about period: rank 0 says 4"),
    (
        lambda rank: (DiLoCo if rank else LocalSGD)(momentum(net()), 4),
        "ValueError: the ranks disagree about the kind of averaging",
    ),
    (lambda rank: LocalSGD(momentum(net()), 2, warmup=rank), "disagree about warmup"),
    (lambda rank: LocalSGD(momentum(net()), 0), "ValueError: LocalSGD: period must be 1 step"),
    (
        lambda rank: LocalSGD(momentum(net()), 4, warmup=1).step(),
        "RuntimeError: LocalSGD averages all gradients in its warm-up.* has none",
    ),
]


def test_what_makes_no_sense_is_refused_on_every_rank(pools):
    for make, said in MISTAKES:
        for told in pools(2)(refused, make):
            assert told is not None and re.search(f"(?s){said}", told), (said, told)
    with pytest.raises(RuntimeError, match="LocalSGD works within a process group"):
        LocalSGD(momentum(net()), 4)
