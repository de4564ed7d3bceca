"""Lesson: beyond_gradients. Replicas that meet now and then are those that one process has when it
holds all of them; meeting after each step is DistributedDataParallel; torch's optimizer agrees."""

import copy
import math
import warnings
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minidist as md
from minidist.averaging import DiLoCo, Gossip, LocalSGD, StreamingDiLoCo
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


def outer_every(period, parts, delay=0, mix=0.0):
    """DiLoCo, number by number. `parts`: from which step on which parameters meet."""
    anchors, speeds, sent = weights(net()), [0.0] * 6, {}

    def meet(step, replicas):
        for first, places in parts:
            if step >= first and (step - first) % period == 0:
                for i in places:
                    mean = torch.stack([replica[i] for replica in replicas]).mean(0)
                    sent[i] = anchors[i] - mean
            if step >= first + delay and (step - first - delay) % period == 0:
                for i in places:
                    speeds[i] = 0.9 * speeds[i] + sent[i]
                    anchors[i] = anchors[i] - 0.7 * (sent[i] + 0.9 * speeds[i])
                    for replica in replicas:
                        replica[i].copy_(mix * replica[i] + (1 - mix) * anchors[i])

    return meet


def whisper(step, replicas):
    ranks = len(replicas)
    if ranks == 1 or step % 2:
        return
    rounds = math.ceil(math.log2(ranks))
    distance = 2 ** ((step // 2 - 1) % rounds)
    before = [[p.clone() for p in replica] for replica in replicas]
    for rank, replica in enumerate(replicas):
        for parameter, mine, theirs in zip(
            replica, before[rank], before[rank - distance], strict=True
        ):
            parameter.copy_((mine + theirs) / 2)


PARTS = [(2, [0, 1]), (5, [2, 3, 4, 5])]  # of two fragments and period 5; 35 and 39 numbers
KINDS = {
    "local SGD": (partial(LocalSGD, period=4), partial(mean_every, 4)),
    "period 1": (partial(LocalSGD, period=1), partial(mean_every, 1)),
    "DiLoCo": (partial(DiLoCo, period=4), partial(outer_every, 4, [(4, range(6))])),
    "streaming": (
        partial(StreamingDiLoCo, period=5, fragments=2, delay=2, mix=0.3),
        partial(outer_every, 5, PARTS, 2, 0.3),
    ),
    "gossip": (partial(Gossip, period=2), lambda: whisper),
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


@BOTH
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_replicas_are_those_of_one_process_that_holds_them_all(pools, kind, world_size):
    wrap, meet = KINDS[kind]
    found = pools(world_size)(train, wrap)
    for ours, wanted in zip(found, alone(world_size, meet()), strict=True):
        assert apart(ours, wanted) < 1e-12
    if world_size > 1 and kind != "period 1":  # after step 13 they have gone their own ways
        assert apart(found[0], found[1]) > 1e-6


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


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("warmup", [0, 2, 9])
def test_period_1_under_sgd_trains_as_one_process_does(pools, world_size, warmup):
    def strategy(model):
        return model, LocalSGD(sgd(model.parameters()), period=1, warmup=warmup)

    parity = md.parity.check(strategy, optimizer=sgd, ranks=pools(world_size))
    assert parity.world_size == world_size and parity.largest < 1e-12


def test_a_period_of_2_does_not(pools):
    def strategy(model):
        return model, LocalSGD(sgd(model.parameters()), period=2)

    with pytest.raises(md.parity.ParityError, match="step 1, "):
        md.parity.check(strategy, optimizer=sgd, ranks=pools(2))


def test_the_warm_up_is_ddp_with_any_optimizer(pools):
    def strategy(model):
        adam = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, LocalSGD(adam, period=3, warmup=4)

    adam = partial(torch.optim.AdamW, lr=0.01)
    assert md.parity.check(strategy, optimizer=adam, ranks=pools(3), steps=4).largest < 1e-12
    with pytest.raises(md.parity.ParityError, match="step 5, "):
        md.parity.check(strategy, optimizer=adam, ranks=pools(3), steps=5)


@pytest.mark.parametrize("kind", [DiLoCo, StreamingDiLoCo])
def test_diloco_with_a_plain_outer_step_of_1_is_local_sgd(pools, kind):
    options = {"outer": partial(torch.optim.SGD, lr=1.0)}
    if kind is StreamingDiLoCo:
        options |= {"fragments": 1, "delay": 0, "mix": 0.0}
    ours = pools(2)(train, partial(kind, period=4, **options))
    local = pools(2)(train, partial(LocalSGD, period=4))
    assert max(map(apart, ours, local)) < 1e-12


# ---- torch's own ---------------------------------------------------------------------------------


@pytest.mark.parametrize("warmup", [0, 3])
def test_torchs_post_local_sgd_optimizer_comes_to_the_same(pools, warmup):
    period = 4

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
        with md.measure.TrafficCounter() as traffic:
            train_with = wrap(momentum(model := net()))
            begun = {**traffic.calls}
            for step in range(1, 9):
                backward(model, dist.get_rank(), step)
                train_with.step()
        assert not begun
        reduced = traffic.calls.get("all_reduce", (0, 0))
        return *reduced, traffic.sent_messages, traffic.sent_bytes

    nbytes = 8 * sum(p.numel() for p in net().parameters())
    for wrap, wanted in [
        (partial(LocalSGD, period=1), (8, 8 * nbytes, 0, 0)),
        (partial(LocalSGD, period=4), (2, 2 * nbytes, 0, 0)),
        (partial(LocalSGD, period=4, warmup=4), (5, 5 * nbytes, 0, 0)),
        (partial(DiLoCo, period=4), (2, 2 * nbytes, 0, 0)),
        (partial(StreamingDiLoCo, period=4, fragments=2), (4, 2 * nbytes, 0, 0)),
        (partial(Gossip, period=2), (0, 0, 4, 4 * nbytes)),
    ]:
        assert pools(3)(sent, wrap) == [wanted] * 3, wrap


def test_streaming_waits_only_after_the_delay(pools):
    """Between sending and receiving, the mean is on its way."""

    def flights():
        model = net()
        optimizer = StreamingDiLoCo(momentum(model), period=6, fragments=2, delay=2)
        seen = []
        for step in range(1, 13):
            backward(model, dist.get_rank(), step)
            optimizer.step()
            seen.append("".join("-~"[f.travelling] for f in optimizer.fragments))
        return seen

    first = ["--", "--", "~-", "~-", "--", "-~"]
    second = ["-~", "--", "~-", "~-", "--", "-~"]
    assert pools(2)(flights) == [first + second] * 2


def test_fragments_have_about_as_many_bytes(pools):
    def sizes(count):
        model = md.zoo.mlp(*[16] * 9)  # 8 layers
        optimizer = StreamingDiLoCo(momentum(model), 8, fragments=count)
        cut = [[p.numel() for p in f.parameters] for f in optimizer.fragments]
        assert sum(cut, []) == [p.numel() for p in model.parameters()]
        return [sum(each) for each in cut]

    (four,) = set(map(tuple, pools(2)(sizes, 4)))
    assert len(four) == 4 and max(four) - min(four) <= 256 + 16
    assert pools(2)(sizes, 16)[0] == [256, 16] * 8
    assert pools(2)(sizes, 1)[0] == [8 * 272]


def test_gossip_without_steps_makes_replicas_equal_and_keeps_their_mean(pools):
    def talk(rounds):
        model = net()
        optimizer = Gossip(torch.optim.SGD(model.parameters(), lr=0.0))
        own = torch.Generator().manual_seed(dist.get_rank())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=own))
        before = weights(model)
        for _ in range(rounds):
            optimizer.step()
        return before, weights(model), md.averaging.drift(model.parameters())

    for world_size, rounds, equal in [(4, 1, False), (4, 2, True), (3, 2, False)]:
        found = pools(world_size)(talk, rounds)
        means = [
            [torch.stack(each).mean(0) for each in zip(*(f[i] for f in found), strict=True)]
            for i in (0, 1)
        ]
        assert apart(*means) < 1e-12
        assert (found[0][2] < 1e-12) == equal, (world_size, rounds)


def test_gossip_between_parameters_that_share_memory(pools):
    def talk():
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        model[1].weight.data = model[0].weight.data.t()
        optimizer = Gossip(torch.optim.SGD(model.parameters(), lr=0.0))
        model[0].weight.data.fill_(dist.get_rank())
        optimizer.step()
        return model[1].weight.unique().tolist()

    assert pools(2)(talk) == [[0.5], [0.5]]


def test_gossip_sends_and_receives_in_one_batch(pools):
    """With NCCL, "send, then receive" on every rank would wait for ever. Of two dtypes, two."""

    def talk():
        batches, batch = [], dist.batch_isend_irecv

        def noted(operations):
            batches.append({operation.op.__name__ for operation in operations})
            return batch(operations)

        values = [torch.zeros(2, dtype=dtype) for dtype in (torch.float64, torch.float32)]
        parameters = [torch.nn.Parameter(value) for value in values]
        optimizer = Gossip(torch.optim.SGD(parameters, lr=0.0))
        for parameter in parameters:
            torch.nn.init.constant_(parameter, dist.get_rank())
        with mock.patch.object(dist, "batch_isend_irecv", noted):
            optimizer.step()
        return batches, [p.tolist() for p in parameters]

    for rank, (batches, values) in enumerate(pools(3)(talk)):
        assert batches == [{"isend", "irecv"}] * 2
        assert values == [[(rank + (rank - 1) % 3) / 2] * 2] * 2


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


def test_drift_of_equal_replicas_is_zero_in_any_dtype(pools):
    """The mean of three equal numbers of 16 bits is another number of 16 bits."""

    def measure():
        equal = torch.randn(100, generator=torch.Generator().manual_seed(0))
        return [md.averaging.drift([x]) for x in (equal.bfloat16(), equal, torch.zeros(3))]

    for apart in pools(3)(measure):
        assert max(apart) < 1e-14 and apart[2] == 0


def test_whole_numbers_have_no_mean(pools):
    def buffers():
        try:
            md.averaging.average(torch.nn.BatchNorm1d(3).buffers())
        except TypeError as error:
            return str(error)

    assert pools(2)(buffers) == ["a tensor of torch.int64 has no mean: leave it out"] * 2


# ---- as an optimizer -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_from_a_checkpoint_of_any_step(pools, kind, tmp_path):
    wrap = KINDS[kind][0]

    def interrupted(at):
        rank, model = dist.get_rank(), net()
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

    whole = pools(2)(train, wrap)
    for at in (3, 6):  # while the first fragment travels, and the second
        assert max(map(apart, pools(2)(interrupted, at), whole)) == 0


def test_states_are_those_of_the_bare_optimizer_and_load_there_and_back(pools):
    def run():
        model = net()
        optimizer = DiLoCo(momentum(model), period=3)
        for step in range(1, 5):
            backward(model, dist.get_rank(), step)
            optimizer.step()
        bare = momentum(copy.deepcopy(model))
        bare.load_state_dict(optimizer.state_dict())
        mine = [s["momentum_buffer"] for s in optimizer.state.values()]
        assert apart(mine, [s["momentum_buffer"] for s in bare.state.values()]) == 0
        optimizer.load_state_dict(bare.state_dict())
        assert optimizer.steps == 0 and optimizer.param_groups is optimizer.optimizer.param_groups
        assert not optimizer.fragments[0].outer.state
        other = StreamingDiLoCo(momentum(model), period=3, fragments=2)
        try:
            other.load_state_dict(optimizer.state_dict())
        except ValueError as error:
            return str(error)

    assert pools(2)(run) == ["the state_dict is of 1 fragments, and there are 2"] * 2


@pytest.mark.parametrize("kind", ["DiLoCo", "streaming"])
@pytest.mark.parametrize("saved", ["bare", "local SGD"])
def test_replicas_that_are_apart_when_a_state_without_anchors_is_loaded_meet(pools, kind, saved):
    def run():
        model = net()
        optimizer = KINDS[kind][0](momentum(model))

        def go_on(steps):
            for _ in range(steps):
                backward(model, dist.get_rank(), optimizer.steps)
                optimizer.step()

        go_on(3)  # the first fragment of two travels
        state = optimizer.optimizer.state_dict()
        if saved == "local SGD":
            state["averaging"] = {"steps": optimizer.steps}
        optimizer.load_state_dict(state)
        anchors = [anchor for fragment in optimizer.fragments for anchor in fragment.anchors]
        assert not any(f.travelling or f.outer.state for f in optimizer.fragments)
        loaded = weights(model), [a.detach().clone() for a in anchors]
        go_on(2 * optimizer.period - optimizer.steps)  # to a meeting of all parameters, or of some
        return *loaded, [a.detach() for a in anchors], weights(model)

    (own, first, met, ended), (other, *theirs, ended_too) = pools(2)(run)
    assert apart(own, other) > 1e-6
    assert apart(first, [(a + b) / 2 for a, b in zip(own, other, strict=True)]) < 1e-12
    assert [apart(*pair) for pair in zip((first, met), theirs, strict=True)] == [0, 0]
    assert (apart(ended, ended_too) == 0) == (kind == "DiLoCo")  # streaming mixes


@pytest.mark.parametrize("kind", ["DiLoCo", "streaming"])
def test_ranks_that_have_loaded_different_weights_set_out_from_those_of_rank_0(pools, kind):
    def run():
        model = net()
        optimizer = KINDS[kind][0](momentum(model))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(dist.get_rank() + 1)
        backward(model, 0, 1)
        optimizer.step()
        return [float(a.max()) for f in optimizer.fragments for a in f.anchors]

    first, second = pools(2)(run)
    assert set(first) == {1.0} and second == first


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("kind", ["DiLoCo", "streaming"])
def test_weights_that_are_loaded_before_the_first_step_are_where_the_ranks_set_out(
    pools, kind, saved
):
    def loaded():
        model = md.zoo.mlp(6, 5, 4, 3, dtype=torch.float64, seed=7)
        optimizer = KINDS[kind][0](momentum(model))
        model.load_state_dict(net().state_dict())
        if saved:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = KINDS[kind][0](momentum(model))
            optimizer.load_state_dict(state)
        for step in range(1, STEPS + 1):
            backward(model, dist.get_rank(), step)
            optimizer.step()
        return weights(model)

    for ours, wanted in zip(pools(2)(loaded), alone(2, KINDS[kind][1]()), strict=True):
        assert apart(ours, wanted) < 1e-12


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
        try:
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
        except RuntimeError as error:
            return str(error)

    said = "LocalSGD: add a group to the bare optimizer first, and wrap it then"
    assert pools(2)(run) == [said] * 2


def test_it_is_the_bare_optimizer_also_after_that_has_loaded_by_itself(pools):
    def run():
        model = net()
        optimizer = LocalSGD(bare := momentum(model), period=2)
        backward(model, dist.get_rank(), 1)
        optimizer.step()
        bare.load_state_dict(copy.deepcopy(bare.state_dict()))
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        before = weights(model)
        optimizer.step()
        assert optimizer.state is bare.state and optimizer.state_dict()["state"]
        return before, [p.detach() for p in model.parameters()]

    (first, then), (second, _) = pools(2)(run)  # they meet, and take no step
    assert apart(then, [(a + b) / 2 for a, b in zip(first, second, strict=True)]) < 1e-12


def test_gradients_that_the_bare_optimizer_holds_are_forgotten(pools):
    def run(make):
        model = net()
        optimizer = LocalSGD(make(model.parameters()), period=2)
        if isinstance(optimizer.optimizer, md.OffloadedOptimizer):
            optimizer.optimizer.receive_in_backward()
        for step in (1, 2, 3, 4):
            backward(model, dist.get_rank(), step)
            if step != 2:
                optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    offloaded = partial(md.OffloadedOptimizer.of(torch.optim.SGD), lr=0.1)
    ours, plain = (pools(2)(run, make) for make in (offloaded, sgd))
    assert max(map(apart, ours, plain)) < 1e-12


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


def test_what_is_unfrozen_later_is_refused_and_frozen_later_is_not(pools):
    def run(kind):
        model = net()
        model[0].requires_grad_(False)
        optimizer = kind(momentum(model), period=2)
        for layer in (model[2], model[0]):
            backward(model, dist.get_rank(), 1)
            optimizer.step()
            layer.requires_grad_(layer is model[0])
        try:
            optimizer.step()
        except RuntimeError as error:
            return optimizer.steps, str(error).partition(":")[2]

    said = " a parameter was frozen when its optimizer was wrapped, and is not now"
    for kind in (LocalSGD, DiLoCo, Gossip):
        for steps, words in pools(2)(run, kind):
            assert steps == 2 and words.startswith(said)


def test_a_group_that_the_bare_optimizer_gets_later_is_refused(pools):
    def run(kind):
        model, more = net(), torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
        optimizer = kind(momentum(model), period=2)
        for step in (1, 2):
            backward(model, dist.get_rank(), step)
            optimizer.step()
        optimizer.optimizer.add_param_group({"params": [more]})
        more.grad = torch.full_like(more, 1 + dist.get_rank())
        try:
            optimizer.step()
        except RuntimeError as error:
            return optimizer.steps, more.tolist(), str(error).partition(":")[2]

    said = " the optimizer had 6 parameters when it was wrapped, and has 7 now"
    for kind in (LocalSGD, DiLoCo, Gossip):
        for steps, values, words in pools(2)(run, kind):
            assert (steps, values) == (2, [1, 1, 1]) and words.startswith(said)


# ---- what is wrong -------------------------------------------------------------------------------


def refused(make):
    try:
        make(dist.get_rank())
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def other_model(rank):
    return LocalSGD(momentum(md.zoo.mlp(6, 5 + rank, 3)), 4)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (other_model, "ValueError: the ranks have different models.*shape .5, 6.*shape .6, 6"),
        (lambda rank: DiLoCo(momentum(net()), 4 + rank), "disagree about period: rank 0 says 4"),
        (
            lambda rank: (Gossip if rank else LocalSGD)(momentum(net()), 4),
            "ValueError: the ranks disagree about the kind of averaging",
        ),
        (
            lambda rank: LocalSGD(
                torch.optim.Adam(net().parameters()) if rank else momentum(net()), 4
            ),
            "ValueError: the ranks disagree about the optimizer: rank 0 says SGD, rank 1 says Adam",
        ),
        (
            lambda rank: LocalSGD(net().parameters(), 4),
            "TypeError: LocalSGD wraps an optimizer, not",
        ),
        (lambda rank: LocalSGD(momentum(net()), 0), "ValueError: LocalSGD: period must be 1 step"),
        (lambda rank: LocalSGD(momentum(net()), True), "ValueError: LocalSGD: period must be 1"),
        (lambda rank: LocalSGD(momentum(net()), 2, warmup=-1), "ValueError: .*warmup must be 0"),
        (lambda rank: LocalSGD(momentum(net()), 4, warmup=2.5), "ValueError: .*more, not 2.5$"),
        (lambda rank: LocalSGD(momentum(net()), 4, warmup=True), "ValueError: .*more, not True$"),
        (lambda rank: StreamingDiLoCo(momentum(net()), 4, fragments=7), "6 parameters make 1 to 6"),
        (
            lambda rank: StreamingDiLoCo(momentum(net()), 4, fragments=2.5),
            "ValueError: .*fragments, not 2.5$",
        ),
        (lambda rank: StreamingDiLoCo(momentum(net()), 4, delay=4), "delay is 0 to 3 steps"),
        (
            lambda rank: StreamingDiLoCo(momentum(net()), 4, delay=2.5),
            "ValueError: .*steps and mix 0 to 1, not 2.5 and 0.5$",
        ),
        (lambda rank: StreamingDiLoCo(momentum(net()), 4, mix=1.5), "delay is 0 to 3 steps"),
        (
            lambda rank: LocalSGD(momentum(net().requires_grad_(False)), 4),
            "ValueError: LocalSGD: the optimizer has no parameter to train",
        ),
        (
            lambda rank: LocalSGD(momentum(net()), 4, warmup=1).step(),
            "RuntimeError: LocalSGD averages all gradients in its warm-up.* .5, 6. has none",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_on_every_rank(pools, make, said):
    for told in pools(2)(refused, make):
        with pytest.raises(AssertionError, match=f"(?s){said}"):
            raise AssertionError(told)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_refused(pools, kind):
    def run():
        optimizer = KINDS[kind][0](momentum(net()))
        with pytest.raises(TypeError, match="cannot be copied or saved: .* its state_dict"):
            copy.deepcopy(optimizer)
        return True

    assert all(pools(2)(run))


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match="LocalSGD works within a process group"):
        LocalSGD(momentum(net()), 4)
