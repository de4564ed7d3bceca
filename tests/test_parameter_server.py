"""Servers hold the weights, trainers push gradients: as one process where they wait for each other,
and otherwise with a staleness that is counted. Who dies is named."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from agents import free_port
from programs import Family
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc

import minidist as md
from minidist.parameter_server import RemoteStage, Served, name_of, rpc_session, share_out
from minidist.parameter_server.server_shard import ServerShard

SOON = 5  # seconds
STEPS, EACH = 4, 6  # examples of each trainer
pytestmark = pytest.mark.timeout(90)


def net():
    seed = dist.get_rank() if dist.is_initialized() else 0  # the servers' own weights count
    return md.zoo.mlp(5, 7, 3, seed=seed).double()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def batch(step, trainer):
    """Other examples in each step and on each trainer: (6, 5), (6,)."""
    random = torch.Generator().manual_seed(100 * step + trainer)
    inputs = torch.randn(EACH, 5, generator=random, dtype=torch.float64)
    return inputs, torch.randint(3, (EACH,), generator=random)


def gradient_step(model, optimizer, step, trainers):
    """A step on the batches of some trainers together."""
    inputs, targets = map(torch.cat, zip(*(batch(step, t) for t in trainers), strict=True))
    md.parity.train_step(model, optimizer, inputs, targets, F.cross_entropy)


def all_steps(servers):
    def loop(model, optimizer):
        for step in range(STEPS):
            gradient_step(model, optimizer, step, [dist.get_rank() - servers])
        return {name: p.detach() for name, p in model.named_parameters()}

    return loop


def apart(ours, theirs):
    return [n for n in theirs if md.parity.relative_difference(ours[n], theirs[n]) > 1e-12]


def as_of_servers(servers):
    """One process's model, with the weights that each server begins with."""
    models = [md.zoo.mlp(5, 7, 3, seed=server).double() for server in range(servers)]
    holder = share_out([p.numel() for p in models[0].parameters()], servers)
    for ps in zip(holder, *(m.parameters() for m in models), strict=True):
        ps[1].data = ps[1 + ps[0]].data
    return models[0]


# ---- synchronous -------------------------------------------------------------------------------


@pytest.mark.parametrize(("servers", "optimizer"), [(1, sgd), (2, adam)])
def test_a_synchronous_server_trains_as_one_process(pools, servers, optimizer):
    results = pools(4)(
        md.parameter_server.train, net, optimizer, all_steps(servers), servers=servers
    )
    served, trained = results[:servers], results[servers:]
    alone = as_of_servers(servers)
    steps = optimizer(alone.parameters())
    for step in range(STEPS):
        gradient_step(alone, steps, step, range(4 - servers))
    alone = dict(alone.named_parameters())
    at_servers = {name: p for server in served for name, p in server.weights.items()}
    assert at_servers.keys() == alone.keys() and all(server.weights for server in served)
    for weights in (at_servers, *trained):
        assert apart(weights, alone) == []
    for server in served:
        assert server.updates == STEPS and server.died == []
        assert server.staleness == [0] * (STEPS * (4 - servers))
        assert isinstance(server, Served)  # and can be sent back
        assert not any(w.requires_grad for w in server.weights.values())


def test_parameters_are_shared_out_by_size():
    assert share_out([10, 1, 6, 4, 3], 2) == [0, 1, 1, 1, 0]
    assert share_out([5, 5], 1) == [0, 0]
    with pytest.raises(ValueError, match="3 servers cannot share 2 parameters"):
        share_out([1, 2], 3)


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


def pass_turn(to):
    dist.send(torch.zeros(1), to)


def await_turn(of):
    dist.recv(torch.zeros(1), of)


def in_turn(model, optimizer):
    """Rank 1 computes one gradient; rank 2 takes three steps; only then rank 1 pushes its own."""
    if dist.get_rank() == 1:
        inputs, targets = batch(0, 0)
        F.cross_entropy(model(inputs), targets).backward()
        pass_turn(to=2)
        await_turn(of=2)
        optimizer.step()
    else:
        await_turn(of=1)
        for step in range(3):
            gradient_step(model, optimizer, step, [1])
        pass_turn(to=1)


def test_staleness_is_counted_and_a_late_gradient_is_applied_as_it_is(pools):
    asynchronous = {"synchronous": False, "bound": 3}
    served, *_ = pools(3)(md.parameter_server.train, net, sgd, in_turn, **asynchronous)
    assert served.staleness == [0, 0, 0, 3] and served.updates == 4
    assert served.pushed_by == [2, 2, 2, 1]
    alone = as_of_servers(1)
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


def shard(bound=None, synchronous=False, trainers=(1, 2)):
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    return ServerShard([parameter], optimizer, trainers, synchronous, bound)


ONES = [torch.ones(2)]


def test_who_is_too_far_ahead_waits_for_the_slowest():
    for bound in 0, 1, 2:
        server = shard(bound)
        answers = [server.push(1, 0, ONES) for _ in range(bound + 1)]
        assert [answer.done() for answer in answers] == [True] * bound + [False]
        server.push(2, 0, ONES)
        assert answers[-1].done(), bound
        version, weights = answers[-1].value()
        assert version == bound + 2 and weights[0].tolist() == [-version, -version]


def test_an_answer_stays_as_it_was_when_it_was_given():
    server = shard()
    pulled, pushed = server.pull(), server.push(1, 0, ONES).value()
    server.push(2, 0, ONES)
    assert [(v, w[0].tolist()) for v, w in (pulled, pushed)] == [(0, [0, 0]), (1, [-1, -1])]


def test_who_leaves_while_another_goes_on_is_named_in_either_order():
    for order in ["push", "leave"], ["leave", "push"]:
        server = shard(synchronous=True)
        before = [server.push(trainer, 0, ONES) for trainer in (1, 2)]
        assert all(answer.value()[0] == 1 for answer in before)
        answers = []
        for action in order:
            if action == "push":
                answers.append(server.push(1, 1, ONES))
            else:
                server.leave(2)
        assert "the trainer on rank 2 has left after 1 steps" in str(answers[0].value()), order


def test_nobody_waits_for_one_that_has_left_or_died():
    server = shard(0, trainers=(1, 2, 3))
    answer = server.push(1, 0, ONES)
    left = server.leave(2)
    assert not answer.done()
    server.lost(3)
    assert answer.done() and not left.done() and not server.over.is_set()
    server.lost(2)  # while it waits to leave
    last = server.leave(1)
    assert server.over.is_set() and left.value() == last.value() == [3, 2]
    server.lost(1)  # its process ends, in order
    assert server.died == [3, 2]


# ---- bad input ---------------------------------------------------------------------------------


def test_arguments_and_models_that_make_no_sense_are_refused(pools):
    def another():
        return md.zoo.mlp(5, 7 + (dist.get_rank() == 2), 3)

    ranks = pools(3)
    for options, words in [
        ({"servers": 3}, "3 servers among 3 ranks: needs 1, and a trainer"),
        ({"servers": 0}, "0 servers among 3 ranks"),
        ({"bound": 1}, "not 1 with synchronous=True"),
        ({"bound": -1, "synchronous": False}, "0 or more, not -1"),
    ]:
        with pytest.raises(md.RankError, match=words):
            ranks(md.parameter_server.train, net, sgd, all_steps(1), **options)
    with pytest.raises(md.RankError, match=r"every rank .*disagree about the model's parameters"):
        ranks(md.parameter_server.train, another, sgd, all_steps(1))
    with pytest.raises(RuntimeError, match="works within a process group"):
        md.parameter_server.train(net, sgd, all_steps(1))


def test_unequal_numbers_of_batches_are_an_error_where_all_must_push(pools):
    def loop(model, optimizer):
        for step in range(STEPS - (dist.get_rank() == 2)):
            gradient_step(model, optimizer, step, [dist.get_rank()])

    with pytest.raises(md.RankError, match="rank 2 has left after 3 steps, and others go on"):
        pools(3)(md.parameter_server.train, net, sgd, loop)
    _, *done = pools(3)(md.parameter_server.train, net, sgd, all_steps(1))  # the ranks are as new
    assert len(done) == 2


def dies(rank):
    """Training in which a rank is killed: a trainer by itself, a server by its trainer."""

    def loop(model, optimizer):
        pids = [os.getpid()] * 2
        if dist.get_rank() == 1:
            pids[0] = rpc.rpc_sync(name_of(0), os.getpid)
        for step in range(50):
            if step == 1 and dist.get_rank() == max(rank, 1):
                os.kill(pids[rank > 0], signal.SIGKILL)
            gradient_step(model, optimizer, step, [dist.get_rank()])
            time.sleep(0.02)

    return loop


def failure_of(ranks, *args, **options):
    with pytest.raises(md.RankError) as raised:
        ranks(md.parameter_server.train, net, sgd, *args, **options)
    return raised.value


SYNCHRONOUS = [True, pytest.param(False, marks=pytest.mark.soak)]


@pytest.mark.parametrize("synchronous", SYNCHRONOUS)
def test_trainers_name_a_server_that_dies(pools, synchronous):
    error = failure_of(pools(3), dies(0), synchronous=synchronous)
    assert error.rank == 0 and "was killed by SIGKILL" in str(error)
    for rank in (1, 2):
        assert (
            "ConnectionError: Connection closed by the parameter server on rank 0: it has died"
            in error.tracebacks[rank]
        )


def test_a_synchronous_server_names_a_trainer_that_dies(pools):
    error = failure_of(pools(3), dies(2))
    assert error.rank == 2 and "was killed by SIGKILL" in str(error)
    for rank in (0, 1):
        told = "ConnectionError: Connection closed by the trainer on rank 2 after 1 steps"
        assert told in error.tracebacks[rank]


def test_an_error_of_a_trainer_is_the_one_that_is_raised(pools):
    """Also where the others, who miss its gradients, are the first to report an error."""

    def loop(model, optimizer):
        if dist.get_rank() == 2:
            end = rpc.shutdown
            rpc.shutdown = lambda **options: (end(**options), time.sleep(0.5))
            raise ZeroDivisionError("mine")
        optimizer.step()

    error = failure_of(pools(3), loop)
    assert error.rank == 2 and "raised ZeroDivisionError: mine" in str(error)


RANK = """
import os, signal
import torch, torch.distributed as dist
import minidist as md
from minidist.rank import join

def net():
    torch.manual_seed(0)
    return md.zoo.mlp(5, 7, 3).double()

def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)

def loop(model, optimizer):
    for step in range(20):
        if os.environ.get("DIES") == str(dist.get_rank()) and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        inputs = torch.randn(6, 5, dtype=torch.float64)
        labels, loss_fn = torch.ones(6).long(), md.parity.cross_entropy
        md.parity.train_step(model, optimizer, inputs, labels, loss_fn)

def main():
    served = md.parameter_server.train(net, sgd, loop, synchronous=False, bound=2)
    if dist.get_rank() == 0:
        print(served.updates, served.died, len(served.staleness))

if __name__ == "__main__":
    with join("gloo"):
        main()
"""


@pytest.mark.soak
def test_an_asynchronous_server_goes_on_without_a_trainer_that_dies(tmp_path):
    """Processes of their own: in a pool, a rank that dies ends them all."""
    family, file = Family(), tmp_path / "rank.py"
    file.write_text(RANK)
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "4"}
    started = []
    for rank in range(4):
        names = ("RANK", "LOCAL_RANK")
        place = dict.fromkeys(names, str(rank)) | {"LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "0"}
        environ = family.environ() | meeting | place | {"DIES": "3"}
        command = [sys.executable, "-W", "error", str(file)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=environ, **pipes))
    try:
        ended = [process.communicate(timeout=60) for process in started]
    finally:
        family.end()
    assert [process.returncode for process in started] == [0, 0, 0, -signal.SIGKILL], ended
    assert ended[0][0] == "45 [3] 45\n"
    assert family.gone_within(SOON) and family.temporary() == []


# ---- a model split over ranks ------------------------------------------------------------------


def halves():
    model = md.zoo.mlp(5, 7, 3).double()
    return model[:1], model[1:]


def split_model():
    """Rank 0 trains, and holds nothing: the halves are on ranks 1 and 2."""
    gradients = []
    with rpc_session():
        if dist.get_rank() == 0:
            first = RemoteStage(1, lambda: halves()[0])
            second = RemoteStage(2, lambda: halves()[1])
            for step in range(2):
                inputs, targets = batch(step, 0)
                with dist_autograd.context() as context:
                    loss = F.cross_entropy(second(first(inputs)), targets)
                    dist_autograd.backward(context, [loss])
                    gradients.append(first.gradients(context) | second.gradients(context))
                    for stage in (first, second):
                        stage.step(context, lr=0.1)
    return gradients


def test_gradients_of_a_split_model_are_those_of_one_process():
    with md.ranks(3) as ranks:  # new ones: RRefs work in the first session only
        ours, *others = ranks(split_model)
        with pytest.raises(md.RankError) as raised:
            ranks(split_model)
    assert "RemoteStage needs ranks that have had no RPC session" in raised.value.tracebacks[0]
    assert others == [[], []]
    model = torch.nn.Sequential(*halves()[0], *halves()[1])
    names = [name for half in halves() for name, _ in half.named_parameters()]
    steps = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, gradients in enumerate(ours):
        gradient_step(model, steps, step, [0])
        wanted = dict(zip(names, (p.grad for p in model.parameters()), strict=True))
        assert gradients.keys() == wanted.keys() and apart(gradients, wanted) == []


def test_a_session_follows_another(pools):
    def twice():
        answers = []
        for _ in range(2):
            with rpc_session():
                other = name_of((dist.get_rank() + 1) % 2)
                answers.append(rpc.rpc_sync(other, os.getpid) != os.getpid())
        return answers

    assert pools(2)(twice) == [[True, True]] * 2
