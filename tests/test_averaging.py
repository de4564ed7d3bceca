"""Lesson: beyond_gradients. Replicas that meet now and then are those that one process has when it
holds all of them; meeting after each step is DistributedDataParallel."""

import math
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist

import minidist as md
from minidist.averaging import DiLoCo, LocalSGD

STEPS = 13

# All else is the same whatever carries it.
BOTH = pytest.mark.parametrize("pools", ["gloo", "shm"], indirect=True, scope="module")


def backward(model, rank, step):
    """With other examples on each rank and at each step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(5, 6, dtype=torch.float64, generator=generator)
    targets = torch.randn(5, 3, dtype=torch.float64, generator=generator)
    model.zero_grad()
    torch.nn.functional.mse_loss(model(inputs), targets).backward()


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def net(seed=0):
    return md.zoo.mlp(6, 5, 4, 3, dtype=torch.float64, seed=seed)


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def apart(ours, theirs):
    """The largest relative difference."""
    pairs = zip(ours, theirs, strict=True)
    return max(md.parity.relative_difference(a, b) for a, b in pairs)


# ---- one process that holds all replicas: nothing of what is tested ------------------------------


def alone(ranks, meet):
    """The weights of each replica. `meet(step, replicas)` changes lists of weights."""
    models = [net() for _ in range(ranks)]
    optimizers = [momentum(model) for model in models]
    for step in range(1, STEPS + 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            backward(model, rank, step)
            optimizer.step()
        with torch.no_grad():
            meet(step, [list(model.parameters()) for model in models])
    return [weights(model) for model in models]


def outer_every(period, rate=0.7, momentum=0.9):
    """DiLoCo, number by number. With a rate of 1 and no momentum it is local SGD."""
    anchors, speeds = weights(net()), [0.0] * 6

    def meet(step, replicas):
        if step % period == 0:
            for i, each in enumerate(zip(*replicas, strict=True)):
                gradient = anchors[i] - torch.stack(each).mean(0)
                speeds[i] = momentum * speeds[i] + gradient
                anchors[i] = anchors[i] - rate * (gradient + momentum * speeds[i])
                for parameter in each:
                    parameter.copy_(anchors[i])

    return meet


KINDS = {
    "local SGD": (partial(LocalSGD, period=4), partial(outer_every, 4, 1, 0)),
    "period 1": (partial(LocalSGD, period=1), partial(outer_every, 1, 1, 0)),
    "DiLoCo": (partial(DiLoCo, period=4), partial(outer_every, 4)),
}


def train(wrap):
    rank = dist.get_rank()
    model = net(seed=rank)  # a rank that begins with other values takes rank 0's
    optimizer = wrap(momentum(model))
    for step in range(1, STEPS + 1):
        backward(model, rank, step)
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@BOTH
def test_replicas_are_those_of_one_process_that_holds_them_all(pools, world_size):
    for kind, (wrap, meet) in KINDS.items():
        found, expected = pools(world_size)(train, wrap), alone(world_size, meet())
        assert max(map(apart, found, expected)) < 1e-12, kind
        if kind != "period 1":
            assert apart(found[0], found[1]) > 1e-6, kind  # after step 13 they go their own ways


def test_period_1_under_sgd_is_ddp_and_period_2_is_not(pools):
    sgd = partial(torch.optim.SGD, lr=0.1)

    def check(period):
        def strategy(model):
            return model, LocalSGD(sgd(model.parameters()), period)

        return md.parity.check(strategy, optimizer=sgd, ranks=pools(3), steps=4).largest

    assert check(1) < 1e-12
    with pytest.raises(md.parity.ParityError, match="step 1, "):
        check(2)


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
                model = net(seed=7)
                optimizer = wrap(momentum(model))
                for part, state in zip((model, optimizer), torch.load(file), strict=True):
                    part.load_state_dict(state)
                assert optimizer.steps == at
        return weights(model)

    for kind in KINDS:
        whole = pools(2)(train, KINDS[kind][0])
        for at in (3, 8):  # within a period, and at its end
            assert max(map(apart, pools(2)(interrupted, kind, at), whole)) == 0, kind


def test_diloco_sets_out_from_rank_0s_weights_that_are_loaded_before_the_first_step(pools):
    def loaded():
        rank, model = dist.get_rank(), net(seed=7)
        optimizer = DiLoCo(momentum(model), 1)
        model.load_state_dict(net(seed=rank).state_dict())
        optimizer.zero_grad()
        optimizer.step()  # nobody goes anywhere, but rank 1 is elsewhere: (0 + 1) / 2
        return weights(model)

    zero, one = weights(net(seed=0)), weights(net(seed=1))
    outer = [a - 0.7 * 1.9 * (a - (a + b) / 2) for a, b in zip(zero, one, strict=True)]
    for found in pools(2)(loaded):
        assert apart(found, outer) < 1e-12


def test_schedulers_and_closures_work_as_with_any_optimizer(pools):
    def run():
        optimizer = LocalSGD(torch.optim.SGD((model := net()).parameters(), lr=0.1), period=2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        before = weights(model)
        assert optimizer.step(lambda: backward(model, 0, 0) or "the loss") == "the loss"
        assert apart(weights(model), before) > 0
        scheduler.step()
        assert optimizer.optimizer.param_groups[0]["lr"] == 0.05

    pools(2)(run)


# ---- what is wrong -------------------------------------------------------------------------------


MISTAKES = [
    (
        lambda rank: LocalSGD(momentum(md.zoo.mlp(6, 5 + rank, 3)), 4),
        "ValueError: the ranks have different models.*shape .5, 6.*shape .6, 6",
    ),
    (lambda rank: DiLoCo(momentum(net()), 4 + rank), "disagree about period: rank 0 says 4"),
]


def test_what_makes_no_sense_is_refused_on_every_rank(pools):
    def refused(make):
        try:
            make(dist.get_rank())
        except ValueError as error:
            return f"{type(error).__name__}: {error}"

    for make, said in MISTAKES:
        for told in pools(2)(refused, make):
            assert told is not None and re.search(f"(?s){said}", told), (said, told)
    with pytest.raises(RuntimeError, match="LocalSGD works within a process group"):
        LocalSGD(momentum(net()), 4)


def test_a_parameter_that_is_unfrozen_later_is_refused(pools):
    def unfreeze():
        model = net()
        first = next(model.parameters()).requires_grad_(False)
        optimizer = LocalSGD(momentum(model), 2)
        first.requires_grad_(True)
        with pytest.raises(RuntimeError, match="unfrozen since"):
            optimizer.step()

    pools(2)(unfreeze)


def test_a_trial_of_ddp_learns_what_one_process_does():
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 6, dtype=torch.float64, generator=random)
    task = md.averaging.Task(net, inputs, torch.arange(40) % 3, torch.arange(40) % 2)

    def ddp(model):
        return md.DistributedDataParallel(model), momentum(model)

    def alone(model):
        return model, momentum(model)

    link = md.Link(gbps=10, latency_us=1)
    with md.ranks(2, nodes=2, link=link) as pool:
        found = pool(md.averaging.replicas, ddp, task, 8, watch=[4])[0]
        apart = pool(md.averaging.replicas, alone, task, 8)[0]
    make = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    wanted = md.averaging.one_process(make, task, 8, range(2))
    assert found.losses == pytest.approx({4: wanted[4], 8: wanted[8]}) and found.loss == found.own
    assert found.kilobytes * 1e3 == pytest.approx(
        8 * sum(p.numel() for p in net().parameters()), 0.1
    )
    assert apart.kilobytes == 0 and apart.drift[8] > 0.01 > found.drift[8] == 0
