"""A server holds the weights, trainers push gradients: as one process where they wait for each
other, and otherwise with a staleness that is counted."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import rpc

import minidist as md
from minidist.parameter_server import Served, name_of, rpc_session
from minidist.parameter_server.server import Server

STEPS, EACH = 4, 6  # examples of each trainer
pytestmark = pytest.mark.timeout(90)


def net():
    seed = dist.get_rank() if dist.is_initialized() else 0  # the server's own weights count
    return md.zoo.mlp(5, 7, 3, seed=seed).double()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def batch(step, trainer):
    """Other examples in each step and on each trainer: (6, 5), (6,)."""
    random = torch.Generator().manual_seed(100 * step + trainer)
    inputs = torch.randn(EACH, 5, generator=random, dtype=torch.float64)
    return inputs, torch.randint(3, (EACH,), generator=random)


def gradient_step(model, optimizer, step, trainers):
    """A step on the batches of some trainers together."""
    inputs, targets = map(torch.cat, zip(*(batch(step, t) for t in trainers), strict=True))
    md.parity.train_step(model, optimizer, inputs, targets, F.cross_entropy)


def all_steps(model, optimizer):
    for step in range(STEPS):
        gradient_step(model, optimizer, step, [dist.get_rank()])
    return {name: p.detach() for name, p in model.named_parameters()}


def apart(ours, theirs):
    assert ours.keys() == theirs.keys()
    return [n for n in theirs if md.parity.relative_difference(ours[n], theirs[n]) > 1e-12]


# ---- synchronous -------------------------------------------------------------------------------


def test_a_synchronous_server_trains_as_one_process(pools):
    served, *trained = pools(4)(md.parameter_server.train, net, sgd, all_steps)
    alone = net()
    steps = sgd(alone.parameters())
    for step in range(STEPS):
        gradient_step(alone, steps, step, [1, 2, 3])
    alone = dict(alone.named_parameters())
    for weights in (served.weights, *trained):
        assert apart(weights, alone) == []
    assert isinstance(served, Served) and served.updates == STEPS
    assert served.staleness == [0] * (STEPS * 3)
    assert not any(w.requires_grad for w in served.weights.values())


def test_a_trainer_without_a_gradient_counts_as_zero(pools):
    def loop(model, optimizer):
        model[0].bias.grad = torch.ones_like(model[0].bias)
        optimizer.zero_grad()
        if dist.get_rank() == 1:
            model[0].weight.grad = torch.ones_like(model[0].weight)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        return [float((p - b).mean()) for p, b in zip(model.parameters(), before, strict=True)]

    _, *moved = pools(3)(md.parameter_server.train, net, sgd, loop)
    assert moved == [pytest.approx([-0.05, 0, 0, 0])] * 2


# ---- asynchronous ------------------------------------------------------------------------------


def in_turn(model, optimizer):
    """Rank 1 computes one gradient; rank 2 takes three steps; only then rank 1 pushes its own."""
    token = torch.zeros(1)
    if dist.get_rank() == 1:
        inputs, targets = batch(0, 0)
        F.cross_entropy(model(inputs), targets).backward()
        dist.send(token, 2)
        dist.recv(token, 2)
        optimizer.step()
    else:
        dist.recv(token, 1)
        for step in range(3):
            gradient_step(model, optimizer, step, [1])
        dist.send(token, 1)


def test_staleness_is_counted_and_a_late_gradient_is_applied_as_it_is(pools):
    asynchronous = {"synchronous": False, "bound": 3}
    served, *_ = pools(3)(md.parameter_server.train, net, sgd, in_turn, **asynchronous)
    assert served.staleness == [0, 0, 0, 3] and served.updates == 4
    assert served.pushed_by == [2, 2, 2, 1]
    alone = net()
    steps = sgd(alone.parameters())
    inputs, targets = batch(0, 0)
    F.cross_entropy(alone(inputs), targets).backward()
    late = [p.grad.clone() for p in alone.parameters()]
    for step in range(3):
        gradient_step(alone, steps, step, [1])
    for parameter, gradient in zip(alone.parameters(), late, strict=True):
        parameter.grad = gradient
    steps.step()
    assert apart(served.weights, dict(alone.named_parameters())) == []


class Called:
    """Calls of a server, each in a thread as RPC makes them, and what they answer."""

    def __init__(self, bound=None, synchronous=False, trainers=(1, 2)):
        parameter = torch.nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        self.server = Server([parameter], optimizer, trainers, synchronous, bound)

    def push(self, trainer):
        """Returns a function: whether the answer, or the error, comes within some seconds."""
        before, answer = len(self.server.pushed_by), []

        def call():
            try:
                answer.append(self.server.push(trainer, 0, [torch.ones(2)]))
            except RuntimeError as error:
                answer.append(error)

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        while len(self.server.pushed_by) == before:
            time.sleep(0.001)

        def answered(within):
            thread.join(within)
            return next(iter(answer), None)

        return answered


def test_who_is_too_far_ahead_waits_for_the_slowest():
    for bound in 0, 1, 2:
        calls = Called(bound)
        for _ in range(bound):
            assert calls.push(1)(within=10), bound
        ahead = calls.push(1)
        assert ahead(within=0.1) is None, bound
        calls.push(2)
        version, weights = ahead(within=10)
        assert version == bound + 2 and weights[0].tolist() == [-version, -version]


def test_nobody_waits_for_one_that_has_left():
    calls = Called(0)
    ahead = calls.push(1)
    assert ahead(within=0.1) is None
    calls.server.leave(2)
    assert ahead(within=10)


def test_an_answer_stays_as_it_was_when_it_was_given():
    calls = Called()
    pulled, pushed = calls.server.pull(), calls.push(1)(within=10)
    calls.push(2)(within=10)
    assert [(v, w[0].tolist()) for v, w in (pulled, pushed)] == [(0, [0, 0]), (1, [-1, -1])]


@pytest.mark.parametrize("first", ["push", "leave"])
def test_who_goes_on_alone_where_all_must_push_hears_of_it(first):
    calls = Called(synchronous=True)
    if first == "push":
        answered = calls.push(1)
        calls.server.leave(2)
    else:
        calls.server.leave(2)
        answered = calls.push(1)
    assert "ranks {2} have no more batches, and rank 1 has one" in str(answered(within=10))


# ---- what goes wrong ---------------------------------------------------------------------------


def test_arguments_and_models_that_make_no_sense_are_refused(pools):
    def another():
        return md.zoo.mlp(5, 7 + (dist.get_rank() == 2), 3)

    ranks = pools(3)
    for options in {"bound": 1}, {"bound": -1, "synchronous": False}:
        with pytest.raises(md.RankError, match="a bound is for asynchronous trainers, and 0 or"):
            ranks(md.parameter_server.train, net, sgd, all_steps, **options)
    with pytest.raises(md.RankError, match=r"every rank .*the ranks have different models"):
        ranks(md.parameter_server.train, another, sgd, all_steps)
    with pytest.raises(RuntimeError, match="works within a process group"):
        md.parameter_server.train(net, sgd, all_steps)


def test_a_rank_that_fails_is_named_and_the_next_call_has_new_ranks(pools):
    def loop(model, optimizer, how):
        for step in range(STEPS - (how == "stops")):
            gradient_step(model, optimizer, step, [dist.get_rank()])
            if dist.get_rank() == 2 and how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if dist.get_rank() == 2 and how == "raises":
                raise ZeroDivisionError("mine")
        if how == "stops" and dist.get_rank() == 1:
            optimizer.step()

    for how, words in [
        ("killed", "rank 2 was killed by SIGKILL"),
        ("raises", "rank 2 raised ZeroDivisionError: mine"),
        ("stops", "ranks {2} have no more batches, and rank 1 has one"),
    ]:
        with pytest.raises(md.RankError) as raised:
            run = md.parameter_server.train
            pools(3)(run, net, sgd, lambda model, optimizer, how=how: loop(model, optimizer, how))
        assert words in str(raised.value), how
    assert pools(3)(md.parameter_server.train, net, sgd, all_steps)[0].updates == STEPS


# ---- sessions -----------------------------------------------------------------------------------


def test_a_session_follows_another(pools, capfd):
    def twice():
        answers = []
        for _ in range(2):
            with rpc_session():
                other = name_of((dist.get_rank() + 1) % 2)
                answers.append(rpc.rpc_sync(other, os.getpid) != os.getpid())
        return answers

    assert pools(2)(twice) == [[True, True]] * 2
    assert capfd.readouterr().err == ""  # torch's C++ prints there if ranks do not part together
