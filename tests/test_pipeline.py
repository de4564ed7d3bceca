"""Stages on ranks train as the whole model does on one process, and schedules are what
they are said to be: told from their lists, and measured."""

import contextlib
import copy
import dataclasses
import gc
import io
import itertools
import pickle
import queue
import random
import threading
import time
import warnings
import weakref
from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils._python_dispatch import TorchDispatchMode

import minidist as md
from minidist.collectives import peers
from minidist.pipeline import (
    SCHEDULES,
    Schedule,
    ScheduleError,
    balance_by_cost,
    balance_by_parameters,
    naive,
    simulate,
    validate,
)
from minidist.pipeline.cut import balance
from minidist.pipeline.instructions import (
    RECEIVES,
    SENDS,
    Backward,
    BackwardInputs,
    BackwardWeights,
    Compute,
    Forward,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
    needs,
    other_end,
)
from minidist.pipeline.schedules import forward_only, with_messages
from minidist.pipeline.stage import Stage
from minidist.pipeline.two_parts import backward_inputs

apart = md.parity.relative_difference


@pytest.fixture(scope="module")
def shm():
    with md.ranks(3, backend="shm") as pool:
        yield pool


# ---- schedules, as data -----------------------------------------------------------------------


def every(sizes=((1, 3), (2, 1), (2, 5), (3, 3), (4, 2), (4, 8), (5, 10))):
    for ranks, microbatches in sizes:
        for name, make in SCHEDULES.items():
            if name != "interleaved":
                yield make(ranks, microbatches), 1
            elif ranks > 1 and microbatches % ranks == 0:
                yield from ((make(ranks, microbatches, v), v) for v in (1, 2, 3))


def test_idle_time_and_activations_in_flight_are_those_of_the_formulas():
    seen = Counter()
    for schedule, v in every():
        p, m, name = len(schedule.ranks), schedule.microbatches, schedule.name
        predicted = simulate(schedule, 1 / v, 1 / v, 1 / v)
        of_the_ideal = {
            "naive": p - 1,
            "gpipe": (p - 1) / m,
            "1f1b": (p - 1) / m,
            "interleaved": (p - 1) / (v * m),
            "zero_bubble": (p - 1) / (3 * m),
        }[name]
        kept = {
            "naive": [1] * p,
            "gpipe": [m] * p,
            "1f1b": [min(m, p - r) for r in range(p)],
            "interleaved": [min(v * m, 2 * (p - r - 1) + (v - 1) * p + 1) for r in range(p)],
            "zero_bubble": [min(m, p)] * p,
        }[name]
        if name != "zero_bubble" or m >= p:
            assert predicted.time == pytest.approx(3 * m * (1 + of_the_ideal)), schedule
            assert predicted.idle == pytest.approx(of_the_ideal / (1 + of_the_ideal)), schedule
        if name in ("gpipe", "1f1b"):
            assert predicted.idle == pytest.approx((p - 1) / (m + p - 1)), schedule
        assert predicted.in_flight == kept, schedule
        validate(schedule, in_flight=kept)
        if m > 1:
            with pytest.raises(ScheduleError, match=f"keeps {kept[0]} activations, not"):
                validate(schedule, in_flight=[kept[0] - 1] * p)
        seen[name] += 1
    assert len(seen) == 5 and min(seen.values()) >= 6


def test_a_prediction_by_hand():
    schedule = SCHEDULES["gpipe"](2, 2)
    link = md.Link(gbps=16e-9, latency_us=3e6)  # 2 bytes a second, and 3 s until they arrive
    first, second = simulate(schedule, [1, 2], 3, [0, 10], link, nbytes=4).spans
    spans = [(str(span.instruction), span.start, span.end) for span in first + second]
    assert spans == [
        ("Forward(0, 0)", 0, 1),
        ("Forward(0, 1)", 1, 2),
        ("Backward(0, 0)", 28, 31),
        ("Backward(0, 1)", 41, 44),
        ("Forward(1, 0)", 6, 8),  # its input on the line from 1 to 3
        ("Forward(1, 1)", 8, 10),  # from 3 to 5: one after the other, but for their latency
        ("Backward(1, 0)", 10, 23),
        ("Backward(1, 1)", 23, 36),
    ]
    # Two stages of a node share its cable to the next; within a node each pair has a line.
    link = md.Link(gbps=8e-9, inter=md.Link(gbps=1e-9))  # a byte a second; an eighth between
    four = SCHEDULES["gpipe"](4, 1)
    assert [simulate(four, link=link, nbytes=2, nodes=n).time for n in (1, 2, 4)] == [24, 52, 108]
    both = with_messages("both", [[Forward(0, 0), Forward(2, 0)], [Forward(1, 0)]], 3, 1)
    assert simulate(both, link=link, nbytes=2).spans[0][1].start == 1 + 2 + 1 + 2
    assert simulate(SCHEDULES["naive"](1, 1)).idle == 0
    never = Schedule("mine", 2, 1, [[Backward(0, 0)], [Forward(1, 0)]])
    with pytest.raises(ValueError, match=r"rank 0 at Backward\(0, 0\); rank 1 at Forward\(1, 0\)"):
        simulate(never)


def test_an_order_in_which_a_rank_does_nothing_is_refused_by_name():
    nothing = with_messages("mine", [[], []], 2, 1)
    predicted = simulate(nothing)
    assert (predicted.time, predicted.idle, predicted.in_flight) == (0, 0, [0, 0])
    half = with_messages("mine", [[Forward(0, 0)], []], 2, 1)
    assert simulate(half).in_flight == [1, 0] and simulate(half).idle == 0.5
    for schedule in nothing, half:
        with pytest.raises(ScheduleError, match=r"rank 0: .*\(0, 0\) is missing"):
            validate(schedule)


def change(schedule, rank, edit):
    ranks = copy.deepcopy(schedule.ranks)
    edit(ranks[rank])
    return dataclasses.replace(schedule, ranks=ranks)


def test_a_schedule_with_an_instruction_less_or_twice_is_refused():
    for schedule, _ in every([(2, 2), (3, 3)]):
        for rank, instructions in enumerate(schedule.ranks):
            for position, instruction in enumerate(instructions):
                less = change(schedule, rank, lambda own, at=position: own.pop(at))
                # The one half of a backward is missing, or what needs the other has no use.
                with pytest.raises(ScheduleError, match=f"{schedule.name}, rank {rank}"):
                    validate(less)
                twice = change(
                    schedule, rank, lambda own, x=instruction: own.insert(len(own) // 2, x)
                )
                with pytest.raises(ScheduleError, match="stands at [0-9]+ already") as refused:
                    validate(twice)
                assert f"rank {rank}" in str(refused.value)
                assert str(instruction) in str(refused.value)


def depend(schedule, earlier, later):
    """Whether these two, of one rank, must stand in this order."""
    if isinstance(earlier, Compute) and isinstance(later, Compute):
        same = (earlier.stage, earlier.microbatch) == (later.stage, later.microbatch)
        return same
    if isinstance(earlier, RECEIVES):
        return needs(later, schedule.stages) == earlier
    return (
        isinstance(later, SENDS) and needs(later, schedule.stages) is None and made(earlier, later)
    )


def made(compute, send):
    same = (compute.stage, compute.microbatch) == (send.stage, send.microbatch)
    kinds = Forward if isinstance(send, SendActivation) else (Backward, BackwardInputs)
    return same and isinstance(compute, kinds)


def test_a_schedule_in_another_order_is_refused():
    swapped = 0
    for schedule, _ in every([(2, 2), (3, 3)]):
        for rank, instructions in enumerate(schedule.ranks):
            for i, j in itertools.combinations(range(len(instructions)), 2):
                if depend(schedule, instructions[i], instructions[j]):

                    def swap(own, i=i, j=j):
                        own[i], own[j] = own[j], own[i]

                    with pytest.raises(
                        ScheduleError, match=rf"rank {rank}, position \d+, .*stands"
                    ):
                        validate(change(schedule, rank, swap))
                    swapped += 1
    assert swapped > 100


A, G = SendActivation, SendGradient
TWO_RANKS = [Forward(0, 0), A(0, 0), ReceiveGradient(0, 0), Backward(0, 0)]
THE_OTHER = [ReceiveActivation(1, 0), Forward(1, 0), Backward(1, 0), G(1, 0)]
BOTH = [
    # Two micro-batches: the one sends an activation while the other sends a gradient.
    [Forward(0, 0), A(0, 0), Forward(0, 1), A(0, 1), ReceiveGradient(0, 0), Backward(0, 0)]
    + [ReceiveGradient(0, 1), Backward(0, 1)],
    [ReceiveActivation(1, 0), Forward(1, 0), Backward(1, 0), G(1, 0), ReceiveActivation(1, 1)]
    + [Forward(1, 1), Backward(1, 1), G(1, 1)],
]
CROSSED = [[*BOTH[0]], [*BOTH[1]]]
CROSSED[0][0], CROSSED[0][1], CROSSED[0][2], CROSSED[0][3] = Forward(0, 1), A(0, 1), *BOTH[0][:2]
REFUSED = {
    "another's stage": (
        [[*TWO_RANKS, Forward(1, 0)], THE_OTHER],
        "mine, rank 0, position 4, Forward(1, 0): the stage is not on this rank",
    ),
    "a rank without a stage": (
        [TWO_RANKS, THE_OTHER, []],
        "mine, rank 2: has no stage, for there are 2",
    ),
    "no instruction": (
        [[*TWO_RANKS, "Backward"], THE_OTHER],
        "mine, rank 0, position 4, Backward: is no Instruction",
    ),
    "no such micro-batch": (
        [TWO_RANKS, [*THE_OTHER, Forward(1, 1)]],
        "mine, rank 1, position 4, Forward(1, 1): there is no such micro-batch",
    ),
    "no use": (
        [[*TWO_RANKS, G(0, 0)], THE_OTHER],
        "mine, rank 0, position 4, SendGradient(0, 0): has no use here",
    ),
    "both kinds of backward": (
        [[*TWO_RANKS, BackwardInputs(0, 0), BackwardWeights(0, 0)], THE_OTHER],
        "mine, rank 0, position 3, Backward(0, 0): has no use here",
    ),
    "half a backward": (
        [[*TWO_RANKS[:3], BackwardInputs(0, 0)], THE_OTHER],
        "mine, rank 0: BackwardWeights(0, 0) is missing",
    ),
    "crossed messages": (
        CROSSED,
        "mine, rank 1, position 0, ReceiveActivation(1, 0): "
        "rank 0 sends what ReceiveActivation(1, 1) is for first",
    ),
    "blocking sends": (
        BOTH,
        "mine, rank 0, position 3, SendActivation(0, 1): deadlock with blocking sends: "
        "rank 0 at SendActivation(0, 1), rank 1 at SendGradient(1, 0)",
    ),
    "waiting for each other": (
        [BOTH[0], [BOTH[1][0], BOTH[1][4], *BOTH[1][1:4], *BOTH[1][5:]]],
        None,  # fine: the receive stands earlier
    ),
    "a receive too early": (
        [[Forward(0, 0), A(0, 0), BOTH[0][4], *BOTH[0][2:4], *BOTH[0][5:]]]
        + [[BOTH[1][0], BOTH[1][4], *BOTH[1][1:4], *BOTH[1][5:]]],
        "mine, rank 0, position 2, ReceiveGradient(0, 0): deadlock with buffered sends: "
        "rank 0 at ReceiveGradient(0, 0), rank 1 at ReceiveActivation(1, 1)",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_validator_says(what):
    ranks, words = REFUSED[what]
    microbatches = 1 + any(Forward(0, 1) in own for own in ranks)
    schedule = Schedule("mine", 2, microbatches, ranks)
    if words is None:
        return validate(schedule)
    with pytest.raises(ScheduleError) as refused:
        validate(schedule)
    assert str(refused.value) == words


def test_every_receive_stands_before_the_computation_during_which_its_message_comes():
    for schedule, _ in every([(3, 3), (4, 8)]):
        ends = [{span.instruction: span.end for span in own} for own in simulate(schedule).spans]
        for rank, instructions in enumerate(schedule.ranks):
            now = 0.0
            for instruction in instructions:
                now = ends[rank].get(instruction, now)
                if isinstance(instruction, RECEIVES):
                    send = other_end(instruction)
                    sender = ends[schedule.rank_of(send.stage)]
                    (ready,) = (end for step, end in sender.items() if made(step, send))
                    assert now <= ready, (schedule, rank, instruction)


# ---- where to cut -----------------------------------------------------------------------------


def test_layers_are_shared_out_as_evenly_as_they_can_be():
    generator = torch.Generator().manual_seed(0)
    for layers in range(1, 9):
        for stages in range(1, layers + 1):
            costs = torch.randint(0, 9, (layers,), generator=generator).tolist()

            def largest(lengths, costs=costs):
                ends = list(itertools.accumulate(lengths, initial=0))
                return max(sum(costs[a:b]) for a, b in itertools.pairwise(ends))

            found = balance(costs, stages)
            assert len(found) == stages and sum(found) == layers and min(found) >= 1
            cuts = itertools.combinations(range(1, layers), stages - 1)
            ways = [[b - a for a, b in itertools.pairwise([0, *cut, layers])] for cut in cuts]
            assert largest(found) == min(map(largest, ways))
    assert sorted(balance([1] * 8, 3)) == [2, 3, 3]
    for stages in (0, 4):
        with pytest.raises(ValueError, match=f"3 layers cannot be cut into {stages} stages"):
            balance([1, 1, 1], stages)


class Slow(nn.Module):
    def forward(self, x):
        time.sleep(0.01)
        return x


@pytest.mark.alone
def test_balance_by_parameters_and_by_measured_cost(pools):
    module = nn.Sequential(Slow(), Slow(), nn.Linear(4, 4), nn.Linear(4, 4), Slow(), Slow())
    assert balance_by_parameters(module, 2) == [3, 3]
    module = nn.Sequential(nn.Linear(4, 90), nn.Linear(90, 4), Slow(), nn.Linear(4, 4), Slow())
    assert balance_by_parameters(module, 2) == [1, 4]
    module = nn.Sequential(nn.Identity(), nn.Identity(), Slow(), nn.Identity(), Slow())
    assert balance_by_cost(module, torch.ones(2, 4), 2) in ([3, 2], [4, 1])

    def on_ranks():  # a layer that is slow on one rank only takes a third of its time there
        layers = [nn.Identity() for _ in range(6)]
        if dist.get_rank() == 1:
            layers[0] = layers[1] = Slow()
        layers[5] = Slow()
        return balance_by_cost(nn.Sequential(*layers), torch.ones(1), 2)

    assert pools(3)(on_ranks) == [[5, 1]] * 3


# ---- the idea, in one function ------------------------------------------------------------------


def test_the_naive_pipeline_trains_as_one_process_does(pools):
    widths = 6, 7, 8, 3

    def run():
        rank = dist.get_rank()
        torch.manual_seed(0)
        plain = nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(widths)]).double()
        stage = copy.deepcopy(plain[rank])
        both = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (plain, stage)]
        found = []
        for step in range(3):
            inputs, targets = digits(step, rows=12)
            loss = F.cross_entropy(plain(inputs), targets)
            loss.backward()
            shape = (widths[rank],)
            ours = naive.train_step(stage, inputs, targets, F.cross_entropy, 4, shape)
            wanted = loss if rank == 2 else torch.zeros(())
            pairs = zip(stage.parameters(), plain[rank].parameters(), strict=True)
            found += [(ours - wanted).abs().item(), *(apart(a.grad, b.grad) for a, b in pairs)]
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
        return max(found)

    assert max(pools(3)(run)) <= 1e-12


# ---- training ---------------------------------------------------------------------------------


def mlp(dtype=torch.float64):
    return md.zoo.mlp(6, 7, 8, 7, 6, 5, 3, dtype=dtype)  # 11 layers


def transformer(dtype=torch.float64):
    model = md.zoo.Transformer(vocabulary=17, length=5, width=8, layers=6)
    return model.sequential().to(dtype)  # 9 layers


def digits(step, rows=11, dtype=torch.float64):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(rows, 6, dtype=dtype, generator=generator)
    return inputs, torch.randint(3, (rows,), generator=generator)


def words(step, rows=11):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(17, (rows, 6), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def train(make, data, microbatches, schedule, steps=3, norm_type=2.0, balance=None, **options):
    """Beside one process, by Adam with clipping. Returns the largest relative difference, and
    the names that were compared."""
    plain = make()
    model = md.Pipeline(copy.deepcopy(plain), microbatches, schedule, balance, **options)
    adam = torch.optim.Adam(plain.parameters(), lr=1e-3)
    ours = torch.optim.Adam([*model.parameters(), torch.zeros(1)], lr=1e-3)  # none is refused
    compared = {}
    for step in range(steps):
        inputs, targets = data(step)
        loss = md.parity.cross_entropy(plain(inputs), targets)
        adam.zero_grad()
        loss.backward()
        compared["loss"] = apart(model.train_step(inputs, targets, md.parity.cross_entropy), loss)
        wanted = dict(plain.named_parameters(remove_duplicate=False))
        for name, p in model.module.named_parameters(remove_duplicate=False):
            assert (p.grad is None) == (wanted[name].grad is None), name
            if p.grad is not None:
                compared[f"{name}.grad"] = apart(p.grad, wanted[name].grad)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.02, norm_type)
        assert norm > 0.02
        compared["norm"] = apart(model.clip_grad_norm_(0.02, norm_type), norm)
        adam.step()
        ours.step()
        ours.zero_grad()
        for name, value in model.state_dict().items():
            compared[name] = apart(value, plain.state_dict()[name])
        assert all(difference <= 1e-12 for difference in compared.values()), (step, compared)
    return set(compared)


def names(model):
    return {"loss", "norm", *model.state_dict(), *(f"{k}.grad" for k in model.state_dict())}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_stages_train_as_one_process_does(pools, ranks, schedule, recompute):
    microbatches = 4 if ranks % 2 == 0 else 6  # of 11 rows: some have one row more
    balance = [1, 2, 1, 1, 1, 1, 2, 2] if (ranks, schedule) == (4, "interleaved") else None
    found = pools(ranks)(
        train, mlp, digits, microbatches, schedule, balance=balance, recompute=recompute
    )
    assert set.union(*found) == names(mlp())
    assert all(len(own) > 2 for own in found)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_train_over_shared_memory(shm, schedule):
    assert set.union(*shm(train, mlp, digits, 3, schedule)) == names(mlp())


@pytest.mark.parametrize(
    ("ranks", "schedule", "options"),
    [
        (1, "1f1b", {}),
        (2, "gpipe", {"norm_type": float("inf")}),
        (2, "zero_bubble", {"recompute": True}),
        (3, "1f1b", {"norm_type": 1.0}),
        (3, "zero_bubble", {}),
        (3, "interleaved", {}),
        (3, "interleaved", {"balance": [1] * 8 + [1], "recompute": True}),  # both ends on rank 0, 2
    ],
)
def test_a_tied_first_and_last_layer(pools, ranks, schedule, options):
    found = pools(ranks)(train, transformer, words, 3, schedule, **options)
    assert set.union(*found) == names(transformer())


def test_both_ends_of_a_tie_on_one_rank(pools):
    def ring():
        layers = [nn.Linear(4, 4).double() for _ in range(3)]
        return nn.Sequential(*layers, layers[0])  # stages 0 and 3: with 3 stages, 0 and 0

    def both():
        torch.manual_seed(1)
        model = ring()
        model.append(nn.Linear(4, 3).double()).append(nn.Identity())
        return model

    def data(step):
        inputs, targets = digits(step)
        return inputs[:, :4], targets

    found = pools(3)(train, both, data, 3, "interleaved", balance=[1] * 6)
    assert {"0.weight", "3.weight"} <= found[0] and "0.weight" not in found[1] | found[2]


def test_gradients_add_up_and_ties_stay_the_same_bits(pools):
    def add():
        plain = transformer()
        model = md.Pipeline(copy.deepcopy(plain), 4)
        for step in range(3):
            md.parity.cross_entropy(plain(words(step)[0]), words(step)[1]).backward()
            model.train_step(*words(step), md.parity.cross_entropy)
        wanted = dict(plain.named_parameters(remove_duplicate=False))
        ours = dict(model.module.named_parameters(remove_duplicate=False))
        tied = ours.get("0.tokens.weight", ours.get("8.weight"))
        return max(apart(p.grad, wanted[name].grad) for name, p in ours.items()), tied.grad.tolist()

    (first, gradient), (second, other) = pools(2)(add)
    assert max(first, second) <= 1e-12 and gradient == other


class MayUse(nn.Module):
    """Its weight is shared, and in some steps left out."""

    def __init__(self, weight):
        super().__init__()
        self.weight, self.used = weight, True

    def forward(self, x):
        return x + (x @ self.weight).tanh() if self.used else x


def test_a_tie_without_gradient_stays_where_one_process_leaves_it(pools):
    def run():
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(6, 6))
        plain = nn.Sequential(MayUse(weight), nn.Linear(6, 6), nn.Linear(6, 6), MayUse(weight))
        plain.double()
        model = md.Pipeline(copy.deepcopy(plain), 3, balance=[2, 2])
        mine = next(each for each in model.module if isinstance(each, MayUse))
        adam, ours = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (plain, model))
        found = []
        for step, used in enumerate(["both", "first", "none", "last", "frozen"]):
            plain[0].used, plain[3].used = used not in ("none", "last"), used in ("both", "last")
            if used == "frozen":
                plain[0].weight.requires_grad_(False)
                mine.weight.requires_grad_(False)
            mine.used = plain[3 * dist.get_rank()].used
            inputs = torch.randn(7, 6, generator=torch.Generator().manual_seed(step)).double()
            if used != "last":  # which adds to the gradients of the step before
                adam.zero_grad()
                ours.zero_grad()
            F.mse_loss(plain(inputs), inputs).backward()
            model.train_step(inputs, inputs, F.mse_loss)
            assert (mine.weight.grad is None) == (plain[0].weight.grad is None), used
            adam.step()
            ours.step()
            wanted = plain.state_dict()
            found += [apart(value, wanted[name]) for name, value in model.state_dict().items()]
        return max(found)

    assert max(pools(2)(run)) <= 1e-12


def frozen():
    model = mlp()
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    model[8].requires_grad_(False)
    return model


def only_the_last():
    model = mlp().requires_grad_(False)
    model[-1].requires_grad_(True)
    return model


class Twice(nn.Module):
    """Uses a weight twice, and another one beside the way of the inputs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.shift = nn.Linear(6, 6).double(), nn.Embedding(2, 6).double()

    def forward(self, x):
        return self.linear(self.linear(x).tanh()) + self.shift(torch.tensor(1)) * x


def twice():
    return nn.Sequential(Twice(), nn.ReLU(), Twice(), nn.ReLU(inplace=True), Twice())


class BesideTheInputs(nn.Module):
    """Its outputs do not depend on its inputs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, x):
        return self.weight.expand_as(x) * x.detach()


def beside():
    return nn.Sequential(nn.Linear(6, 6).double(), BesideTheInputs(), nn.Identity())


def rows_apart():
    """Between stages every row becomes two, and then one again."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.Flatten(0, 1), nn.Linear(3, 3), nn.Unflatten(0, (-1, 2)),
        nn.Flatten(), nn.Linear(6, 3),
    ).double()  # fmt: skip


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize(
    ("make", "balance"),
    [(frozen, None), (only_the_last, None), (twice, [1, 2, 2]), (rows_apart, [2, 1, 3])],
    ids=["frozen", "only the last is trained", "weights used twice", "rows apart"],
)
def test_models_of_other_kinds(pools, make, balance, schedule):
    found = pools(3)(train, make, digits, 4, schedule, balance=balance)
    assert set.union(*found) >= {"loss", "norm", *make().state_dict()}


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble"])
def test_a_stage_that_nothing_comes_back_through(pools, schedule):
    def run():
        torch.manual_seed(0)
        model = md.Pipeline(beside(), 2, schedule, [1, 1, 1])
        model.train_step(*digits(0), lambda y, t: y.pow(2).mean())
        return [None if p.grad is None else p.grad.abs().sum().item() for p in model.parameters()]

    first, second, third = pools(3)(run)
    assert first == [0, 0] and second[0] > 0 and third == []


def test_a_group_of_ranks_and_rank_0s_weights(pools):
    def run():
        group = dist.new_group([3, 1])  # group rank 0 is rank 1
        if dist.get_rank() in (0, 2):
            return None
        model = mlp()
        with torch.no_grad():
            for p in model.parameters():
                p += dist.get_rank() - 1
        found = train(mlp, digits, 4, "1f1b", process_group=group)
        pipeline = md.Pipeline(model, 2, process_group=group)
        return found, max(apart(v, mlp().state_dict()[k]) for k, v in pipeline.state_dict().items())

    _, first, _, second = pools(4)(run)
    assert first[0] | second[0] == names(mlp()) and first[1] == second[1] == 0
    assert "0.weight" in first[0] and "10.weight" in second[0]


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_other_dtypes(pools, shm, backend, dtype, allowed):
    def run():
        plain = mlp(dtype)
        model = md.Pipeline(copy.deepcopy(plain), 3, "zero_bubble")
        inputs, targets = digits(0, rows=12, dtype=dtype)
        loss = F.cross_entropy(plain(inputs), targets)
        loss.backward()
        found = model.train_step(inputs, targets, F.cross_entropy)
        ours = model.module.named_parameters()
        pairs = [(p.grad, plain.get_parameter(name).grad) for name, p in ours]
        assert all(a.dtype == dtype for a, _ in pairs)
        return max(apart(a, b) for a, b in [*pairs, (found, loss)])

    assert max((pools(3) if backend == "gloo" else shm)(run)) <= allowed


class Branches(nn.Module):
    """One tensor in; out come several, of which two get a gradient, and what is no tensor."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6).double()

    def forward(self, x):
        whole = (10 * x).long()
        return {"h": self.linear(x), "mask": x > 0, "skip": [x, None, 0.5], "rows": (whole,)}


class Joins(nn.Module):
    """Takes what `Branches` gives, and gives the like; `norm` depends on no input."""

    def __init__(self):
        super().__init__()
        self.linear, self.side = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()

    def forward(self, several):
        x, none, scale = several["skip"]
        assert none is None and several["rows"][0].dtype == torch.int64
        h = self.linear(several["h"]).masked_fill(several["mask"], 0.0)
        side = scale * self.side(x) + several["rows"][0]
        out = {"h": h, "mask": ~several["mask"], "skip": [side, None, 0.5], "rows": several["rows"]}
        return out | {"norm": self.linear.weight.square().sum() + several.get("norm", 0.0)}


class Ends(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3).double()

    def forward(self, several):
        return self.linear(several["h"] + several["skip"][0]) * several["norm"]


def several():
    torch.manual_seed(0)
    return nn.Sequential(Branches(), Joins(), Joins(), Ends())


def lstm():
    torch.manual_seed(0)
    layers = [nn.Unflatten(1, (2, 3)), nn.LSTM(3, 4, batch_first=True), First(), nn.Linear(4, 3)]
    return nn.Sequential(*layers).double()


class First(nn.Module):
    def forward(self, outputs):
        return outputs[0][:, -1]


def overwriting():
    """Stages that begin with an operation in place."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6)) for _ in range(3)]
    return nn.Sequential(nn.Linear(6, 6), *layers, nn.Linear(6, 3)).double()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize(
    ("make", "balance"),
    [(several, [1, 1, 1, 1]), (lstm, [1, 1, 1, 1]), (overwriting, [1, 1, 1, 2])],
    ids=["dicts", "lstm", "in place"],
)
def test_what_travels_between_stages(pools, make, balance, schedule, recompute):
    found = pools(4)(train, make, digits, 4, schedule, balance=balance, recompute=recompute)
    assert set.union(*found) == names(make())


def test_a_dict_in_another_order_is_refused(pools):
    class Turns(nn.Module):
        calls = 0

        def forward(self, x):
            Turns.calls += 1
            return {"a": x, "b": 2 * x} if Turns.calls == 1 else {"b": 2 * x, "a": x}

    class Takes(nn.Module):
        def forward(self, several):
            return several["a"]

    def run():
        Turns.calls = 0
        model = md.Pipeline(nn.Sequential(nn.Linear(3, 3), Turns(), Takes()), 2, balance=[2, 1])
        model.train_step(torch.ones(4, 3), torch.ones(4, 3), F.mse_loss)

    assert all("this stage gives {'b': shape (2, 3)" in words for _, words in told(pools(2), run))


class Masked(nn.Module):
    def __init__(self, outputs=6):
        super().__init__()
        self.linear = nn.Linear(6, outputs).double()

    def forward(self, x, mask, scale=1.0):
        return scale * self.linear(x).masked_fill(mask, 0.0)


class Anything(nn.Tanh):
    def forward(self, x, *args, **kwargs):
        assert not args and not kwargs
        return super().forward(x)


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zero_bubble"])
def test_keyword_arguments_go_to_the_layers_that_name_them(pools, schedule):
    def run():
        torch.manual_seed(0)
        layers = [Masked(), Anything(), nn.Linear(6, 6).double(), Masked()]
        plain = nn.Sequential(*layers, nn.Linear(6, 3).double())
        model = md.Pipeline(copy.deepcopy(plain), 4, schedule)
        found = []
        for step, scale in enumerate((0.5, 2.0)):
            inputs, targets = digits(step)
            x, mask = inputs, inputs > 0.3
            for layer in plain:
                x = layer(x, mask, scale) if isinstance(layer, Masked) else layer(x)
            F.cross_entropy(x, targets).backward()
            batch = [inputs, dict(mask=mask, scale=scale)] if dist.get_rank() == 0 else [None, {}]
            model.train_step(batch[0], targets, F.cross_entropy, **batch[1])
            found.append(apart(model(batch[0], **batch[1]), x))
        ours = model.module.named_parameters()
        return max(found + [apart(p.grad, plain.get_parameter(k).grad) for k, p in ours])

    assert max(pools(2)(run)) <= 1e-12


def test_a_compiled_layer_gets_the_keyword_arguments_of_the_layer_in_it(pools):
    def run():
        torch.manual_seed(0)
        plain, (inputs, targets) = nn.Sequential(Masked(), Masked()), digits(0)
        first, second = copy.deepcopy(plain)
        model = md.Pipeline(nn.Sequential(first, torch.compile(second, backend="eager")), 2)
        mask = inputs > 0.3
        loss = model.train_step(inputs, targets, F.cross_entropy, mask=mask, scale=2.0)
        x = plain[1](plain[0](inputs, mask, 2.0), mask, 2.0)
        return apart(loss, F.cross_entropy(x, targets))

    assert max(pools(2)(run)) <= 1e-12


class Counting(Masked):
    """How often it has run, and with which numbers."""

    def forward(self, x, mask, scale=1.0, steps=(0,)):
        vars(self).setdefault("ran", []).append(steps[0])
        return super().forward(x, mask, scale + steps[0])


def test_a_number_that_changes_rehearses_no_stage(pools):
    """It comes to every rank, and no stage runs more often than a micro-batch asks for."""

    def run():
        torch.manual_seed(0)
        plain = nn.Sequential(Counting(), Counting())
        model = md.Pipeline(copy.deepcopy(plain), 2)
        (mine,), calls = model.module, []
        steps = [0]
        for step in (0, 1, 2, 2):
            steps[0] = step  # in the same list
            inputs, targets = digits(step, rows=12)
            mask = inputs > 0.3
            x = plain[0](inputs, mask, steps=steps)
            F.cross_entropy(plain[1](x, mask, steps=steps), targets).backward()
            kwargs = dict(mask=mask, steps=steps, scale=1.0)
            with md.measure.TrafficCounter() as traffic:
                model.train_step(inputs, targets, F.cross_entropy, **kwargs)
            calls.append(traffic.calls)
        ours = model.module.named_parameters()
        found = [apart(p.grad, plain.get_parameter(k).grad) for k, p in ours]
        return max(found), mine.ran, [c.get("broadcast", (0, 0))[0] for c in calls]

    for rank, (worst, ran, broadcasts) in enumerate(pools(2)(run)):
        assert worst <= 1e-12
        assert ran == [0] * (1 - rank) + [0, 0, 1, 1, 2, 2, 2, 2]  # the last stage gives nothing
        assert broadcasts[1] == broadcasts[2] > broadcasts[3] == 0, broadcasts


class Calls(nn.Module):
    def forward(self, x, function=None):
        return x if function is None else function(x)


def test_a_function_as_keyword_argument_stays_on_the_first_rank(pools):
    def run(at):
        layers = four()
        layers[at] = nn.Sequential(layers[at])
        layers[at].append(Calls())
        layers[at].forward = lambda x, function=None: layers[at][1](layers[at][0](x), function)
        model = md.Pipeline(layers, 2, balance=[2, 2])
        batch = torch.ones(4, 3)
        model.train_step(batch, batch, F.mse_loss, function=lambda x: 2 * x)

    assert told(pools(2), partial(run, 0)) == [None, None]
    first, second = told(pools(2), partial(run, 3))
    assert first == second and "rank 0" in first[1] and "pickle" in first[1]


class Warm(nn.Module):
    """Divides by a temperature that the user may train."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6).double()

    def forward(self, x, temperature):
        return self.linear(x) / temperature


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_number_of_the_users_gets_its_gradient(pools, schedule, recompute):
    def run():
        torch.manual_seed(0)
        plain = nn.Sequential(Warm(), Warm(), Warm())
        model = md.Pipeline(copy.deepcopy(plain), 4, schedule, recompute=recompute)
        alone, ours = (torch.tensor(1.5, dtype=torch.float64, requires_grad=True) for _ in "ab")
        for step in range(2):  # it adds up
            x = inputs = digits(step)[0]
            for layer in plain:
                x = layer(x, alone)
            F.mse_loss(x, inputs).backward()
            model.train_step(inputs, inputs, F.mse_loss, temperature=ours)
        both = [(p, plain.get_parameter(name)) for name, p in model.module.named_parameters()]
        both += [(ours, alone)] if dist.get_rank() == 0 else []
        return max(apart(a.grad, b.grad) for a, b in both)

    assert max(pools(2)(run)) <= 1e-12


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_what_made_the_inputs_gets_its_gradient(pools, schedule, recompute):
    """As an embedding outside of the pipeline does, and a temperature that is computed."""

    def run():
        torch.manual_seed(0)
        plain, table = nn.Sequential(Warm(), Warm(), Warm()), nn.Embedding(11, 6).double()
        model = md.Pipeline(copy.deepcopy(plain), 4, schedule, recompute=recompute)
        other, (targets, _) = copy.deepcopy(table), digits(0)
        for _ in range(2):  # it adds up
            x, warm = table(torch.arange(11)), table.weight[:, 0].exp().mean()
            for layer in plain:
                x = layer(x, warm)
            F.mse_loss(x, targets).backward()
            warm = other.weight[:, 0].exp().mean()
            model.train_step(other(torch.arange(11)), targets, F.mse_loss, temperature=warm)
        both = [(p, plain.get_parameter(name)) for name, p in model.module.named_parameters()]
        both += [(other.weight, table.weight)] if dist.get_rank() == 0 else []
        return max(apart(a.grad, b.grad) for a, b in both)

    assert max(pools(2)(run)) <= 1e-12


def test_a_tied_weight_that_makes_the_inputs_is_the_same_on_both_ranks(pools):
    def run():
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
        plain[2].weight = plain[0].weight
        model = md.Pipeline(copy.deepcopy(plain), 2, balance=[2, 1])
        own = model.module.get_parameter(f"{2 * dist.get_rank()}.weight")
        x, _ = digits(0)
        F.mse_loss(plain(x @ plain[0].weight), x).backward()
        model.train_step(x @ own, x, F.mse_loss)
        return apart(own.grad, plain[0].weight.grad)

    assert max(pools(2)(run)) <= 1e-12


def test_a_loss_may_be_a_constant_for_one_microbatch(pools):
    """As where all words are padding."""

    def run():
        torch.manual_seed(0)
        plain, (x, _) = nn.Sequential(*(nn.Linear(6, 6).double() for _ in range(2))), digits(0)
        model, x = md.Pipeline(copy.deepcopy(plain), 2), x[:6].clone()
        x[:3] = 0

        def loss_fn(y, targets):
            return F.mse_loss(y, targets) if targets.any() else torch.zeros(())

        model.train_step(x, x, loss_fn)
        (F.mse_loss(plain(x[3:]), x[3:]) / 2).backward()
        parameters = model.module.named_parameters()
        return max(apart(p.grad, plain.get_parameter(name).grad) for name, p in parameters)

    found = pools(2)(run)
    assert max(found) <= 1e-12


def test_a_constant_loss_in_one_of_two_replicas_whose_stages_are_sharded(pools):
    """The other replica waits for the shards that it gathers."""

    def run():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
        torch.manual_seed(0)
        plain, (x, _) = nn.Sequential(*(nn.Linear(6, 6).double() for _ in range(2))), digits(0)
        wrap = partial(md.FullyShardedDataParallel, device_mesh=mesh["data"])
        group = mesh.get_group("pipeline")
        model = md.Pipeline(copy.deepcopy(plain), 2, process_group=group, wrap=wrap)
        first, second = x[:6].clone(), x[5:11]
        first[:3] = 0
        own = (first, second)[mesh.get_local_rank("data")]
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def loss_fn(y, targets):
            return F.mse_loss(y, targets) if targets.any() else torch.zeros(())

        model.train_step(own, own, loss_fn)
        optimizer.step()
        loss = F.mse_loss(plain(first[3:]), first[3:]) / 2 + F.mse_loss(plain(second), second)
        (loss / 2).backward()
        torch.optim.SGD(plain.parameters(), 0.1).step()
        state = plain.state_dict()
        return max(apart(x, state[name]) for name, x in model.full_state_dict().items())

    assert max(pools(4)(run)) <= 1e-12


class AndItsWeight(nn.Module):
    """Gives a view of its weight as well."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6).double())

    def forward(self, given):
        x = given[0] if isinstance(given, tuple) else given
        return x @ self.weight, self.weight[:1]


class TimesTheWeight(nn.Module):
    def forward(self, given):
        x, weight = given
        return x * weight


def gives_weights():
    torch.manual_seed(0)
    return nn.Sequential(AndItsWeight(), AndItsWeight(), TimesTheWeight())


@pytest.mark.parametrize("recompute", [False, True])
def test_a_stage_that_gives_a_view_of_its_weight(pools, recompute):
    found = pools(3)(train, gives_weights, digits, 4, "1f1b", recompute=recompute)
    assert set.union(*found) == names(gives_weights())


def test_of_new_shapes_only_the_shapes_travel(pools):
    def run():
        model, sent = md.Pipeline(nn.Sequential(nn.Linear(2, 9), nn.Linear(9, 1)), 2), []
        for length in (10_000, *range(1, 100), 10_000):
            x = torch.ones(2, length, 2)
            with md.measure.TrafficCounter() as traffic:
                model.train_step(x, torch.ones(2, length, 1), F.mse_loss)
            sent.append(sum(nbytes for _, nbytes in traffic.calls.values()))
        return sent[0], sent[-1], len(model._preparation.specs)

    for first, last, kept in pools(2)(run):
        assert max(first, last) < 10_000 and kept == 64


class Apart(nn.Module):
    """The same elements, further apart in memory each time."""

    def forward(self, x):
        self.apart = getattr(self, "apart", 1) + 1
        return torch.stack([x] * self.apart, -1)[..., 0]


def test_rows_of_one_element_with_any_stride(pools):
    def run():
        torch.manual_seed(0)
        layers = [Apart(), nn.Linear(1, 1), Apart(), Apart(), nn.Linear(1, 1)]
        plain = nn.Sequential(*layers).double()
        model, sent = md.Pipeline(copy.deepcopy(plain), 4, balance=[3, 2]), []
        for step in range(3):
            inputs, targets = digits(step, rows=4)[0][:, :1], torch.ones(4, 1).double()
            F.mse_loss(plain(inputs), targets).backward()
            with md.measure.TrafficCounter() as traffic:
                model.train_step(inputs, targets, F.mse_loss)
            sent.append(traffic.calls.get("broadcast", (0, 0))[0])
        ours = model.module.named_parameters()
        return max(apart(p.grad, plain.get_parameter(k).grad) for k, p in ours), sent

    for worst, (first, *later) in pools(2)(run):
        assert worst <= 1e-12 and first > 0 and later == [0, 0]


def test_a_stage_that_gives_other_shapes_for_another_flag(pools):
    class Halves(nn.Linear):
        def forward(self, x, half=False, width=3):
            return super().forward(x)[:, : (2 if half else width)]

    def run():
        model = md.Pipeline(nn.Sequential(Halves(4, 4), nn.Tanh()), 2)

        def shape(half, width):
            return tuple(model(torch.ones(4, 4), half=half, width=width).shape)

        shapes = [shape(half, 3) for half in (True, False, True)]
        for _ in range(2):  # the second time it has been learned
            try:
                shapes.append(shape(False, 4))
            except ValueError as error:
                shapes.append(str(error))
        return shapes

    for *shapes, refused, learned in pools(2)(run):
        assert shapes == [(4, 2), (4, 3), (4, 2)] and learned == (4, 4)
        assert (
            "rank 0: this stage gives shape (2, 4), float32, without gradient; after what"
            in refused
        )


def other_rows(step):
    return digits(step, rows=(11, 4, 11, 13)[step])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_batches_of_other_shapes(pools, schedule):
    assert set.union(*pools(2)(train, mlp, other_rows, 4, schedule, steps=4)) == names(mlp())


def test_other_lengths_and_dtypes_of_inputs(pools):
    def run():
        plain = md.zoo.Transformer(vocabulary=17, length=8, width=8, layers=3).sequential().double()
        model, found = md.Pipeline(copy.deepcopy(plain), 4), []
        for length, dtype in (
            (5, torch.int64),
            (8, torch.int64),
            (5, torch.int32),
            (5, torch.int64),
        ):
            tokens = torch.randint(17, (8, length), generator=torch.Generator().manual_seed(length))
            plain.zero_grad(), model.zero_grad()
            loss = md.parity.cross_entropy(plain(tokens.to(dtype)), tokens)
            loss.backward()
            given = tokens.to(dtype) if dist.get_rank() == 0 else None
            found.append(apart(model.train_step(given, tokens, md.parity.cross_entropy), loss))
            ours = model.module.named_parameters()
            found += [apart(p.grad, plain.get_parameter(name).grad) for name, p in ours]
        return max(found)

    assert max(pools(2)(run)) <= 1e-12


class OnlyInTraining(nn.Module):
    """Gives other shapes in training."""

    def forward(self, x):
        return torch.cat([x, x], -1) if self.training else x


class Halves(nn.Module):
    def forward(self, x):
        return x[..., :6]


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_layers_that_are_frozen_or_change_their_mode_between_steps(pools, schedule):
    def run():
        torch.manual_seed(0)
        layers = [nn.Linear(6, 6), OnlyInTraining(), Halves(), nn.Linear(6, 6), nn.Linear(6, 3)]
        plain = nn.Sequential(*layers).double()
        model = md.Pipeline(copy.deepcopy(plain), 4, schedule, balance=[2, 2, 1])
        found = []
        for step, (trains, mode) in enumerate([(0, 1), (1, 1), (1, 0), (0, 0), (1, 1)]):
            for each in (plain, model.module):
                each.train(bool(mode)).zero_grad()
                for name, p in each.named_parameters():
                    p.requires_grad_(bool(trains) or name.startswith("4"))
            inputs, targets = digits(step // 2)
            F.cross_entropy(plain(inputs), targets).backward()
            with md.measure.TrafficCounter() as traffic:
                model.train_step(inputs, targets, F.cross_entropy)
            for name, p in model.module.named_parameters():
                wanted = plain.get_parameter(name).grad
                assert (p.grad is None) == (wanted is None), name
                found += [] if wanted is None else [apart(p.grad, wanted)]
            rank = dist.get_rank()  # a gradient goes back only to what is trained
            assert (sum(traffic.sent_to[:rank]) > 0) == (trains == 1 and rank > 0)
            found.append(apart(model(inputs), plain(inputs)))
        return max(found)

    assert max(pools(3)(run)) <= 1e-12


def test_two_ranks_that_swap_their_modes_are_another_kind_of_step(pools):
    def run():
        layers = [nn.Identity(), nn.Linear(6, 6), nn.Identity(), OnlyInTraining()]
        layers += [Halves(), OnlyInTraining(), Halves(), nn.Linear(6, 3)]
        plain = nn.Sequential(*layers).double()
        model, found = md.Pipeline(copy.deepcopy(plain), 2, balance=[2] * 4), []
        for first in (True, False, True):
            for number, trains in ((3, first), (5, not first)):
                for each in (plain, model.module):
                    if str(number) in dict(each.named_children()):
                        each.get_submodule(str(number)).train(trains)
            inputs, targets = digits(0)
            model.zero_grad(), plain.zero_grad()
            loss = F.cross_entropy(plain(inputs), targets)
            loss.backward()
            found.append(apart(model.train_step(inputs, targets, F.cross_entropy), loss))
            ours = model.module.named_parameters()
            found += [apart(p.grad, plain.get_parameter(name).grad) for name, p in ours]
        return max(found)

    assert max(pools(4)(run)) <= 1e-12


# ---- backward in two parts --------------------------------------------------------------------


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def test_neither_part_of_backward_does_the_others_work():
    model, x = md.zoo.Block(8, 2).double(), torch.randn(2, 4, 8).double()
    plain, y = copy.deepcopy(model), x.clone().requires_grad_()
    x.requires_grad_()
    loss = plain(y).sum()
    with Counted() as whole:
        loss.backward()
    output = model(x).sum()
    with Counted() as first:
        (gradient,), left = backward_inputs([get_gradient_edge(output)], [None], [x])
    assert all(p.grad is None for p in model.parameters())
    with Counted() as second:
        for add in left:
            add()
    assert apart(gradient, y.grad) == 0 and x.grad is None
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert apart(p.grad, q.grad) == 0
    assert (first.calls["mm"], second.calls["mm"], whole.calls["mm"]) == (4, 4, 8)
    for operation in ("gelu_backward", "_scaled_dot_product_flash_attention_for_cpu_backward"):
        assert (first.calls[operation], second.calls[operation]) == (1, 0)
    assert (first.calls["sum"], second.calls["sum"]) == (0, whole.calls["sum"])  # of biases


def test_a_weight_that_is_used_twice_has_its_hooks_called():
    layer, x, calls = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True), []
    layer.weight.register_hook(lambda gradient: 2 * gradient)
    layer.weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.clone()))
    layer(layer(x)).sum().backward()
    layer.zero_grad()
    y = layer(layer(x)).sum()
    for add in backward_inputs([get_gradient_edge(y)], [None], [x])[1]:
        add()
    assert len(calls) == 2 and apart(*calls) == 0 and apart(layer.weight.grad, calls[0]) == 0


def test_the_graph_is_gone_after_both_parts():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(2, 4)
    stage = Stage(model)
    saved = []

    def pack(tensor):
        box = tensor.detach()
        saved.append(weakref.ref(box))
        return box

    def alive():
        gc.collect()
        return sum(box() is not None for box in saved)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box):
        stage.forward(0, (x.requires_grad_(), {}), lambda y, _: y)
    kept = alive()
    stage.backward_inputs(0, [torch.ones(2, 4)])
    assert alive() == kept == len(saved) > 0
    stage.backward_weights(0)
    assert alive() == 0 and all(p.grad is not None for p in model.parameters())


# ---- what is kept -----------------------------------------------------------------------------


def activations(schedule, microbatches, recompute=False, layers=8, width=16, rows=4):
    """The most bytes of activations that this rank keeps in a step."""
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(8)])
    model = md.Pipeline(module, microbatches, schedule, recompute=recompute)
    batch = torch.randn(rows * microbatches, width)
    for _ in range(2):
        with md.measure.MemoryTracker(model) as memory:
            model.train_step(batch, batch, lambda y, t: (y * t).mean())
    return memory.peak_of["activations"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_activations_kept_are_those_predicted(pools, ranks):
    m = 2 * ranks
    kept = {
        schedule: pools(ranks)(activations, schedule, m)
        for schedule in ("gpipe", "1f1b", "zero_bubble")
    }
    layers, one = 8 // ranks, 4 * 16 * 4  # what a layer gives: (4, 16) of float32
    for schedule, found in kept.items():
        in_flight = simulate(SCHEDULES[schedule](ranks, m)).in_flight
        # What the layers gave, and what came in; the first stage's inputs are the batch's own.
        wanted = [n * (layers + (rank > 0)) * one for rank, n in enumerate(in_flight)]
        more = [a - b for a, b in zip(found, wanted, strict=True)]
        # A message waits for its turn, and one that leaves is not yet let go. The first part of
        # zero bubble's backward frees some of it.
        assert all(x in (0, one, 2 * one) or (schedule == "zero_bubble" and x < 0) for x in more)
        assert more == [0] * ranks or schedule != "gpipe"
    assert all(a < b for a, b in zip(kept["1f1b"], kept["gpipe"], strict=True))


def test_recomputing_keeps_inputs_only(pools):
    m, layers, one = 6, 2, 4 * 16 * 4
    kept = pools(4)(activations, "gpipe", m, recompute=True)
    assert kept == [layers * one] + 3 * [(m + layers) * one]


class Noisy(nn.Module):
    """Dropout, a buffer that counts passes, and one that is another tensor after each."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes = self.passes + 1
        return F.dropout(self.norm(self.linear(x)).tanh(), 0.5, self.training)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "interleaved"])
def test_recomputing_repeats_dropout_and_leaves_buffers(pools, schedule):
    def run():
        results = []
        for recompute in (False, True):
            torch.manual_seed(0)
            module = nn.Sequential(*[Noisy() for _ in range(4)]).double()
            model = md.Pipeline(module, 4, schedule, recompute=recompute)
            losses = [model.train_step(*digits(step), F.cross_entropy).item() for step in range(3)]
            gradients = [p.grad.tolist() for p in model.parameters()]
            buffers = [b.tolist() for b in model.buffers()]
            results.append((losses, gradients, buffers, torch.rand(1).item()))
            counts = "norm.num_batches_tracked", "passes"
            first = 0 if dist.get_rank() == 0 else 3  # rank 0's first layer, and rank 1's last
            passes = [int(model.state_dict()[f"{first}.{name}"]) for name in counts]
        return results[0] == results[1], passes, len(set(results[0][0]))

    assert pools(2)(run) == [(True, [12, 12], 3)] * 2


# ---- what travels, and when -------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "v"), [("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2)])
def test_bytes_that_travel(pools, schedule, v):
    def run():
        module = nn.Sequential(*[nn.Linear(6, 6) for _ in range(8)])
        model = md.Pipeline(module, 4, schedule)
        steps = []
        for rows in (8, 8, 4, 8):
            with md.measure.TrafficCounter() as traffic:
                model.train_step(torch.ones(rows, 6), torch.ones(rows, 6), F.mse_loss)
            steps.append(traffic)
        return steps

    p, m, row = 2, 4, 6 * 4
    boundaries = p * v - 1
    steps = zip((8, 8, 4, 8), (True, False, True, False), *pools(2)(run), strict=True)
    for rows, new, *ranks in steps:
        assert sum(rank.sent_messages for rank in ranks) == 2 * boundaries * m
        assert sum(rank.sent_bytes for rank in ranks) == 2 * boundaries * rows * row
        # What rows there are; the loss, and that all went well. With a new shape, what travels.
        calls = {"all_reduce": (2, 32 + 16)}
        assert [rank.calls == calls for rank in ranks] == [not new] * p


class Work:
    def __init__(self):
        self.done = threading.Event()

    def wait(self):
        if not self.done.wait(8):
            raise RuntimeError("waits for ever")


class OneQueue:
    """torch.distributed by NCCL's rule, over any backend: two ranks have one queue for what they
    send each other, both ways; a message begins when the one before it has ended, and ends only
    with the other rank's receive."""

    def __init__(self):
        self.queues = {}

    def __getattr__(self, name):
        return getattr(dist, name)

    def put(self, peer, *message):
        if peer not in self.queues:
            self.queues[peer] = queue.Queue()
            threading.Thread(target=self.run, args=(peer, self.queues[peer]), daemon=True).start()
        work = Work()
        self.queues[peer].put((work, *message))
        return work

    def run(self, peer, messages):
        ready = torch.zeros(1)
        while (message := messages.get()) is not None:
            work, sends, x, group = message
            if sends:
                dist.recv(ready, group=group, group_src=peer, tag=7)
                dist.send(x, group=group, group_dst=peer, tag=8)
            else:
                dist.send(ready, group=group, group_dst=peer, tag=7)
                dist.recv(x, group=group, group_src=peer, tag=8)
            work.done.set()

    def isend(self, x, group=None, group_dst=None, tag=0):
        return self.put(group_dst, True, x, group)

    def irecv(self, x, group=None, group_src=None, tag=0):
        return self.put(group_src, False, x, group)

    def close(self):
        for messages in self.queues.values():
            messages.put(None)


def with_one_queue(*args, **options):
    one, before = OneQueue(), peers.dist
    peers.dist = one
    try:
        found = train(*args, **options)
        assert one.queues  # or the messages went another way
        return found
    finally:
        one.close()
        peers.dist = before


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_one_queue_for_each_pair_of_ranks_is_enough(pools, ranks, schedule):
    balance = None if schedule != "interleaved" else [1] * (2 * ranks - 1) + [10 - 2 * ranks]
    found = pools(ranks)(with_one_queue, transformer, words, 4, schedule, balance=balance)
    assert set.union(*found) == names(transformer())


@pytest.mark.parametrize("seed", range(3))
def test_one_queue_is_enough_for_any_schedule_that_the_validator_accepts(pools, seed):
    schedule = any_order(2, 4, 6, seed)
    found = pools(2)(with_one_queue, mlp, digits, 6, schedule)
    assert set.union(*found) == names(mlp())


class Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds, later):
        ctx.later = later
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.later)
        return gradient, None, None


class Takes(nn.Module):
    """As long forward as backward for the inputs, and for the weights."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return Sleeps.apply(x, self.seconds, self.seconds) + Sleeps.apply(
            self.weight, 0, self.seconds
        )


@pytest.mark.alone
@pytest.mark.parametrize("name", SCHEDULES)
def test_measured_idle_time_is_that_predicted(pools, name):
    m, second = 6 if name != "interleaved" else 8, 0.04  # a message takes some milliseconds more
    schedule = SCHEDULES[name](4, m)
    predicted = simulate(schedule, second, second, second)

    def run():
        module = nn.Sequential(*[Takes(second) for _ in range(schedule.stages)])
        model, batch = md.Pipeline(module, m, name), torch.zeros(m, 1)
        model.train_step(batch, batch, F.mse_loss)  # here the stages learn what travels
        dist.barrier()
        start = time.perf_counter()
        model.train_step(batch, batch, F.mse_loss)
        took = time.perf_counter() - start
        wanted = schedule.ranks[dist.get_rank()]
        assert [span.instruction for span in model.trace] == wanted
        times = [moment for span in model.trace for moment in (span.start, span.end)]
        assert times == sorted(times)
        return took

    def off():
        took = max(pools(4)(run))
        return abs((1 - predicted.idle) * (1 - predicted.time / took))

    assert any(off() < 0.1 for _ in range(3))  # another process may have been in the way


# ---- what is wrong ----------------------------------------------------------------------------


def told(pool, fn):
    """What each rank is told when it runs `fn`: [(type, text)]. Afterwards they still work."""

    def run():
        try:
            fn()
        except Exception as error:
            return type(error).__name__, str(error)
        return None

    found = pool(run)
    assert len(set(pool(train, mlp, digits, 4, "1f1b", steps=1)[0])) > 2
    return found


def four():
    return nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])


class Scaled(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


def with_own(what):
    """A sequence that does or has something itself."""
    layers = Scaled(*four()) if what == "forward" else four()
    if what == "function":
        layers.forward = lambda x: x
    elif what == "parameter":
        layers.register_parameter("scale", nn.Parameter(torch.ones(3)))
    elif what == "buffer":
        layers.register_buffer("mean", torch.ones(3))
    elif what != "forward":
        getattr(layers, f"register_{what}")(lambda *_: None)
    return layers


OWN = {
    "forward": "forward",
    "function": "forward",
    "parameter": "parameters or buffers",
    "buffer": "parameters or buffers",
    "forward_hook": "hooks",
    "forward_pre_hook": "hooks",
    "full_backward_hook": "hooks",
    "full_backward_pre_hook": "hooks",
}
WRONG = {
    "no sequence": (lambda: md.Pipeline(nn.Linear(3, 3), 2), "cuts an nn.Sequential, not Linear"),
    **{
        f"a sequence with its own {what}": (
            lambda what=what: md.Pipeline(with_own(what), 2),
            f"layers of {'Scaled' if what == 'forward' else 'Sequential'} one by one, and would "
            f"drop what is its own: {words}. Move that into its layers",
        )
        for what, words in OWN.items()
    },
    "more stages than layers": (
        lambda: md.Pipeline(four()[:1], 2),
        "1 layers cannot be cut into 2 stages",
    ),
    "more stages than layers, interleaved": (
        lambda: md.Pipeline(four()[:3], 2, "interleaved"),
        "3 layers cannot be cut into 4 stages",
    ),
    "a balance that does not sum": (
        lambda: md.Pipeline(four(), 2, balance=[2, 1]),
        "balance [2, 1] must share out 4 layers, at least 1 to each stage; it shares out 3",
    ),
    "an empty stage": (
        lambda: md.Pipeline(four(), 2, balance=[4, 0]),
        "balance [4, 0] must share out 4 layers, at least 1 to each stage; it shares out 4",
    ),
    "a balance of other stages": (
        lambda: md.Pipeline(four(), 2, balance=[2, 1, 1]),
        "balance [2, 1, 1] makes 3 stages; on 2 ranks 1f1b has 2",
    ),
    "a balance of other stages, interleaved": (
        lambda: md.Pipeline(four(), 2, "interleaved", balance=[2, 1, 1]),
        "balance [2, 1, 1] makes 3 stages; on 2 ranks interleaved has 2",
    ),
    "micro-batches in groups": (
        lambda: md.Pipeline(four(), 3, "interleaved"),
        "the interleaved schedule takes micro-batches in groups of 2, one for each rank: 3 is not",
    ),
    "no micro-batch": (lambda: md.Pipeline(four(), 0), "microbatches must be 1 or more, not 0"),
    "no schedule": (
        lambda: md.Pipeline(four(), 2, "2f2b"),
        "there is no schedule '2f2b'; there are naive, gpipe, 1f1b, interleaved, zero_bubble",
    ),
    "a schedule for others": (
        lambda: md.Pipeline(four(), 2, SCHEDULES["gpipe"](3, 2)),
        "the schedule is for 3 ranks and 2 micro-batches, not 2 and 2",
    ),
    "a schedule that hangs": (
        lambda: md.Pipeline(four(), 2, Schedule("mine", 2, 2, BOTH)),
        "mine, rank 0, position 3, SendActivation(0, 1): deadlock with blocking sends",
    ),
    "only one rank is wrong": (
        lambda: md.Pipeline(four(), 2, balance=[2, 2 + dist.get_rank()]),
        "rank 1: balance [2, 3] must share out 4 layers",
    ),
    "they disagree about micro-batches": (
        lambda: md.Pipeline(four(), 2 + dist.get_rank()),
        "the ranks disagree about microbatches: rank 0 says 2, rank 1 says 3",
    ),
    "they disagree about the balance": (
        lambda: md.Pipeline(four(), 2, balance=[[1, 3], [3, 1]][dist.get_rank()]),
        "the ranks disagree about balance: rank 0 says [1, 3], rank 1 says [3, 1]",
    ),
    "they disagree about the schedule": (
        lambda: md.Pipeline(four(), 2, ["1f1b", "gpipe"][dist.get_rank()]),
        "the ranks disagree about schedule: rank 0 says Schedule(name='1f1b'",
    ),
    "a strategy around stages whose backward is in two parts": (
        lambda: md.Pipeline(four(), 2, "zero_bubble", wrap=md.FullyShardedDataParallel),
        "schedule zero_bubble goes back in two parts, and a strategy around a stage waits for",
    ),
    "they disagree about the model": (
        lambda: md.Pipeline(four().append(nn.Linear(3, 3 + dist.get_rank())), 2, balance=[2, 3]),
        "the ranks have different models. The first difference",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_a_pipeline_is_refused_on_every_rank(pools, what):
    make, words = WRONG[what]
    first, second = told(pools(2), make)
    assert first == second and first is not None
    assert first[0] == ("TypeError" if "sequence" in what else "ValueError")
    assert words in first[1]


@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (lambda stage, mesh: md.fully_shard(stage, mesh=mesh), "FSDPStageLayers"),
        (lambda stage, mesh: fully_shard(stage, mesh=mesh), "FSDPStageLayers"),
        (lambda stage, mesh: (fully_shard(stage[0], mesh=mesh), stage)[1], "StageLayers"),
        (lambda stage, mesh: TorchDDP(stage, device_mesh=mesh), "DistributedDataParallel"),
    ],
    ids=["fully_shard", "torch's fully_shard", "of one layer", "torch's DDP"],
)
def test_what_cannot_be_around_a_stage_is_refused(pools, wrap, name):
    """Each replica would clip by the norm of its own shards; torch's DDP averages only at some
    micro-batches, if there are several forward passes before a backward pass."""

    def run():
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "pipeline"))
        with pytest.raises(TypeError) as refused:
            group = mesh.get_group("pipeline")
            md.Pipeline(four(), 2, process_group=group, wrap=partial(wrap, mesh=mesh["data"]))
        return str(refused.value)

    words = f"wrap gave a {name}, with which a pipeline would train otherwise than one process"
    assert all(words in each for each in pools(2)(run))


class Grows(nn.Module):
    """From the third call of a step on its outputs are another `kind`."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.calls = kind, 0

    def forward(self, x):
        self.calls += 1
        if self.kind == "set":
            return {1}
        if self.calls < 4 or not self.training:  # the first is to learn what travels
            return x
        if self.kind == "shape":
            return F.pad(x, (0, 1))
        if self.kind == "dtype":
            return x.double()
        if self.kind == "rows":
            return x[:1]
        if self.kind == "gradient":
            return x.detach()
        raise ZeroDivisionError("the third")


def steps(layers, rows=9, targets=9, loss_fn=F.mse_loss, microbatches=3, **options):
    model = md.Pipeline(nn.Sequential(*layers), microbatches, **options)
    model.train_step(torch.ones(rows, 3), torch.ones(targets, 3), loss_fn)


def third(kind):
    return lambda: steps([nn.Linear(3, 3), Grows(kind), nn.Linear(3, 3)], balance=[1, 1, 1])


def failing(*args):
    raise KeyError("mine")


def twice(model):
    x = 2 * torch.ones(4, 3, requires_grad=True)
    for _ in range(2):
        model.train_step(x, torch.ones(4, 3), F.mse_loss)


FAILURES = {
    "shape": (
        third("shape"),
        "ValueError",
        "rank 1: this stage gives shape (3, 4), float32; after what it gave for other "
        "micro-batches it must be shape (3, 3), float32 (at Forward(1, 2) of the pipeline)",
    ),
    "dtype": (third("dtype"), "ValueError", "rank 1: this stage gives shape (3, 3), float64; "),
    "rows": (
        third("rows"),
        "ValueError",
        "rank 1: this stage gives shape (1, 3), float32; after what it gave for other "
        "micro-batches it must be shape (3, 3), float32 (at Forward(1, 2) of the pipeline)",
    ),
    "gradient": (
        third("gradient"),
        "ValueError",
        "rank 1: this stage gives shape (3, 3), float32, without gradient; after",
    ),
    "a layer raises": (
        third("error"),
        "RuntimeError",
        "rank 1: ZeroDivisionError: the third (at Forward(1, 2) of the pipeline)",
    ),
    "what cannot travel": (
        lambda: steps([Grows("set"), nn.Linear(3, 3), nn.Linear(3, 3)]),
        "TypeError",
        "rank 0: between stages travel tensors, numbers, strings and None, in tuples, lists and "
        "dicts; this stage gives a set (at Forward(0, 0) of the pipeline)",
    ),
    "a stage in the middle": (
        lambda: steps(
            [*four()[:2], Grows("set"), *four()[:3]], schedule="interleaved", balance=[1] * 6
        ),
        "TypeError",
        "rank 2: between stages travel tensors, numbers, strings and None, in tuples, lists and "
        "dicts; this stage gives a set (at Forward(2, 0) of the pipeline)",
    ),
    "a layer that takes no tuple": (
        lambda: steps([nn.LSTM(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)]),
        "TypeError",
        "rank 1: linear(): argument 'input' (position 1) must be Tensor, not tuple (at Forward(",
    ),
    "no inputs": (
        lambda: md.Pipeline(four(), 3).train_step(None, torch.ones(9, 3), F.mse_loss),
        "TypeError",
        "rank 0: the inputs of a pipeline are a tensor, its rows first, or several of these",
    ),
    "inputs of different lengths": (
        lambda: md.Pipeline(four(), 3).train_step(
            (torch.ones(9, 3), torch.ones(8, 3)), torch.ones(9, 3), F.mse_loss
        ),
        "ValueError",
        "rank 0: the inputs of a batch of 9 rows have as many, not (8, 3)",
    ),
    "a keyword that no layer takes": (
        lambda: md.Pipeline(four(), 3).train_step(
            torch.ones(9, 3), torch.ones(9, 3), F.mse_loss, mask=torch.ones(9, 3)
        ),
        "TypeError",
        "rank 0: no layer has an argument 'mask'",
    ),
    "the name of a layer's own **kwargs": (
        lambda: md.Pipeline(nn.Sequential(Anything(), *four()), 3).train_step(
            torch.ones(9, 3), torch.ones(9, 3), F.mse_loss, kwargs={}
        ),
        "TypeError",
        "rank 0: no layer has an argument 'kwargs'",
    ),
    "few rows": (
        lambda: steps(four(), rows=2, targets=2),
        "ValueError",
        "rank 0: a batch of 2 rows cannot be cut into 3 micro-batches",
    ),
    "other targets": (
        lambda: steps(four(), targets=8),
        "ValueError",
        "rank 2: the targets of a batch of 9 rows have as many, not (8, 3)",
    ),
    "loss_fn raises": (
        lambda: steps(four(), loss_fn=failing),
        "RuntimeError",
        "rank 2: KeyError: 'mine' (at Forward(2, 0) of the pipeline)",
    ),
    "no mean": (
        lambda: steps(four(), loss_fn=lambda y, t: y - t),
        "ValueError",
        "rank 2: loss_fn must return one number, the mean over its rows",
    ),
    "a graph that is used twice": (
        lambda: twice(md.Pipeline(four(), 2)),
        "RuntimeError",
        "rank 0: Trying to backward through the graph a second time",
    ),
    "a loss without a graph": (
        lambda: steps(four(), loss_fn=lambda y, t: F.mse_loss(y.detach(), t)),
        "ValueError",
        "rank 2: the loss needs no gradient, so that nothing would be trained",
    ),
    "a loss without a graph, recomputed": (
        lambda: steps(four(), loss_fn=lambda y, t: F.mse_loss(y.detach(), t), recompute=True),
        "ValueError",
        "rank 2: the loss needs no gradient, so that nothing would be trained",
    ),
    "few rows, interleaved": (
        lambda: steps(
            [*four(), *four()], rows=2, targets=2, schedule="interleaved", microbatches=6
        ),
        "ValueError",
        "rank 0: a batch of 2 rows cannot be cut into 6 micro-batches",
    ),
    "zero bubble": (
        lambda: steps(
            [nn.Linear(3, 3), Grows("shape"), nn.Linear(3, 3)],
            schedule="zero_bubble",
            balance=[1, 1, 1],
        ),
        "ValueError",
        "rank 1: this stage gives shape (3, 4)",
    ),
}


@pytest.mark.parametrize("what", FAILURES)
def test_a_step_that_fails_on_one_rank_fails_on_all_and_none_hangs(pools, what):
    fn, kind, words = FAILURES[what]
    start = time.perf_counter()
    found = told(pools(3), fn)
    assert len(set(found)) == 1 and found[0] is not None
    assert found[0][0] == kind and words in found[0][1]
    assert time.perf_counter() - start < 20  # no timeout has passed (30 s)


def test_a_pipeline_goes_on_after_a_step_that_failed(pools):
    def run():
        plain = mlp()
        model = md.Pipeline(copy.deepcopy(plain), 4, "zero_bubble")
        with contextlib.suppress(RuntimeError):
            model.train_step(*digits(0), failing)
        model.zero_grad()
        loss = F.cross_entropy(plain(digits(1)[0]), digits(1)[1])
        loss.backward()
        found = [apart(model.train_step(*digits(1), F.cross_entropy), loss)]
        ours = model.module.named_parameters()
        return max(found + [apart(p.grad, plain.get_parameter(k).grad) for k, p in ours])

    assert max(pools(3)(run)) <= 1e-12


@pytest.mark.parametrize("targets", [None, (), {}])
def test_a_loss_may_need_no_targets(pools, targets):
    def run():
        plain, (inputs, _) = mlp(), digits(0)
        model = md.Pipeline(copy.deepcopy(plain), 4)
        loss = plain(inputs).square().mean()
        return apart(model.train_step(inputs, targets, lambda y, _: y.square().mean()), loss)

    assert max(pools(2)(run)) <= 1e-12


def test_only_the_ends_need_the_batch_which_is_cut_evenly(pools):
    def run():
        model, (inputs, targets), rows = md.Pipeline(mlp(), 4), digits(0), []

        def loss_fn(y, t):
            rows.append((len(y), len(t)))
            return F.cross_entropy(y, t)

        rank = dist.get_rank()
        batch = inputs if rank == 0 else None, targets if rank == 2 else None
        loss = model.train_step(*batch, loss_fn if rank == 2 else None)
        return loss.item(), F.cross_entropy(mlp()(inputs), targets).item(), rows

    found = pools(3)(run)
    for ours, wanted, _ in found:
        assert ours == pytest.approx(wanted, rel=1e-12)
    assert [rows for _, _, rows in found] == [[], [], [(3, 3), (3, 3), (3, 3), (2, 2)]]


# ---- from the device meta -----------------------------------------------------------------------


class Shift(nn.Module):
    """A parameter and a buffer of its own, and a part."""

    def __init__(self):
        super().__init__()
        self.shift, self.linear = nn.Parameter(torch.empty(6)), nn.Linear(6, 6)
        self.register_buffer("scale", torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.shift)
        self.scale.fill_(0.5)

    def forward(self, x):
        return self.scale * self.linear(x) + self.shift


def ends_tied(frozen=False):
    """Random numbers are drawn in the order of the layers. The ends share their weight."""
    layers = [nn.Embedding(17, 6), Shift(), nn.Dropout(0.0), nn.LayerNorm(6)]
    layers += [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 17)]
    layers[0].weight.requires_grad_(not frozen)
    layers[-1].weight = layers[0].weight
    return nn.Sequential(*layers).double()


def drawn_whole(frozen=False):
    """What one process draws by seed 7, module by module."""
    torch.manual_seed(7)
    whole = ends_tied(frozen)
    torch.manual_seed(7)
    for module in whole.modules():
        if hasattr(module, "reset_parameters"):
            before = module.weight.clone() if module is whole[-1] else None
            module.reset_parameters()
            if before is not None:  # the values of a tied weight are those of the first layer
                module.weight.data.copy_(before)
    return whole, torch.rand(3)


def test_from_meta_a_tie_has_the_values_of_its_first_stage(pools):
    """The second of four stages is on the last rank, the third on the first."""

    def run():
        layers = [nn.Linear(6, 6) for _ in range(4)]
        layers[2].weight = layers[1].weight
        return nn.Sequential(*layers)

    def from_meta():
        with torch.device("meta"):
            module = run()
        torch.manual_seed(7)
        model = md.Pipeline(module, 2, "interleaved")
        whole = run()
        torch.manual_seed(7)
        whole[0].reset_parameters()
        whole[1].reset_parameters()
        wanted = {f"{layer}.weight": whole[layer].weight for layer in (0, 1)}
        wanted["2.weight"] = whole[1].weight
        found = model.full_state_dict()
        return [torch.equal(found[name], value) for name, value in wanted.items()]

    assert pools(2)(from_meta) == 2 * [[True] * 3]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_from_meta_it_trains_as_what_one_process_draws(pools, schedule, frozen, ranks):
    def run():
        torch.manual_seed(7 + dist.get_rank())  # the first rank's counts
        with torch.device("meta"):
            module = ends_tied(frozen)
        model = md.Pipeline(module, 6, schedule)
        drawn = torch.rand(3)
        whole, after = drawn_whole(frozen)
        state = whole.state_dict()
        same = all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        adam, ours = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (whole, model))
        found = []
        for step in range(3):
            inputs, targets = words(step)
            loss = md.parity.cross_entropy(whole(inputs), targets)
            loss.backward()
            found.append(apart(model.train_step(inputs, targets, md.parity.cross_entropy), loss))
            for optimizer in (adam, ours):
                optimizer.step()
                optimizer.zero_grad()
        full = model.full_state_dict()
        found += [apart(full[name], value) for name, value in whole.state_dict().items()]
        return same, torch.equal(drawn, after), max(found)

    for same, goes_on, worst in pools(ranks)(run):
        assert same and goes_on and worst <= 1e-12


def test_from_meta_a_loaded_state_is_that_of_the_whole_model(pools):
    def run():
        with torch.device("meta"):
            module = ends_tied()
        model, whole = md.Pipeline(module, 4), drawn_whole()[0]
        model.load_state_dict(whole.state_dict())
        inputs, targets = words(0)
        loss = md.parity.cross_entropy(whole(inputs), targets)
        loss.backward()
        found = [apart(model.train_step(inputs, targets, md.parity.cross_entropy), loss)]
        ours = model.module.named_parameters(remove_duplicate=False)
        wanted = dict(whole.named_parameters(remove_duplicate=False))
        return max(found + [apart(p.grad, wanted[name].grad) for name, p in ours])

    assert max(pools(3)(run)) <= 1e-12


def test_from_meta_no_rank_ever_holds_more_than_its_stage(pools):
    layer = 4 * 129 * 128

    def run():
        with torch.device("meta"):
            module = nn.Sequential(*[nn.Linear(128, 128) for _ in range(8)])
        with md.measure.MemoryTracker(module) as memory:
            model = md.Pipeline(module, 4)
        own = sum(p.untyped_storage().nbytes() for p in model.parameters())
        assert all(p.is_meta or p in set(model.parameters()) for p in module.parameters())
        assert model.train_step(*torch.ones(2, 8, 128), F.mse_loss).isfinite()
        return own, memory.peak

    for own, peak in pools(4)(run):
        assert own == 2 * layer and own <= peak < own + layer


def test_from_meta_stages_are_sharded_as_well(pools):
    def run():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
        group = mesh.get_group("pipeline")
        torch.manual_seed(7)
        with torch.device("meta"):
            module = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
        wrap = partial(md.FullyShardedDataParallel, device_mesh=mesh["data"])
        model = md.Pipeline(module, 2, process_group=group, wrap=wrap)
        torch.manual_seed(7)
        wanted = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)]).state_dict()
        full = model.full_state_dict()
        return all(torch.equal(full[name], value) for name, value in wanted.items())

    assert pools(4)(run) == [True] * 4


class NoReset(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.empty(3, 3))

    def forward(self, x):
        return x @ self.table


def meta_pipeline(init=None):
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh(), NoReset()))
    return md.Pipeline(module, 2, balance=[1, 1], param_init_fn=init)


def test_from_meta_what_has_no_values_of_its_own_is_named_on_every_rank(pools):
    def halfway(module):
        if isinstance(module, nn.Linear):
            module.to_empty(device="cpu")

    for init, why in (
        (None, "has no reset_parameters(): pass param_init_fn"),
        (halfway, "param_init_fn leaves it there"),
    ):
        words = "ValueError", f"rank 1: 1.1 is on the device meta, and {why}"
        assert told(pools(2), partial(meta_pipeline, init)) == [words] * 2

    def run():
        def init(module):
            module.to_empty(device="cpu", recurse=False)
            for p in module.parameters(recurse=False):
                nn.init.constant_(p, 0.5 + dist.get_rank())

        return [p.unique().tolist() for p in meta_pipeline(init).parameters()]

    assert pools(2)(run) == [[[0.5], [0.5]], [[1.5]]]


# ---- as a module ------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_evaluation_gives_the_outputs_on_every_rank(pools, schedule):
    def run():
        module = nn.Sequential(*mlp(), nn.Dropout(0.5)).double()
        model = md.Pipeline(copy.deepcopy(module), 4, schedule).eval()
        results = []
        for rows in (9, 4, 2, 1):  # fewer than micro-batches, too
            inputs = digits(0, rows=rows)[0]
            y = model(inputs if dist.get_rank() == 0 else None)
            results.append((y.requires_grad, apart(y, module.eval()(inputs)), tuple(y.shape)))
        trained = model.train()(digits(0)[0])
        return results, bool((trained == 0).any())

    wanted = [(False, shape) for shape in ((9, 3), (4, 3), (2, 3), (1, 3))]
    for results, dropped in pools(2)(run):
        assert [(grad, shape) for grad, _, shape in results] == wanted
        assert all(difference <= 1e-12 for _, difference, _ in results) and dropped


def test_an_evaluation_that_fails_is_told_on_every_rank(pools):
    found = told(pools(3), lambda: md.Pipeline(mlp(), 2)(torch.ones(4, 5, dtype=torch.float64)))
    assert len(set(found)) == 1 and "mat1 and mat2" in found[0][1]
    found = told(pools(3), lambda: md.Pipeline(mlp(), 2)(torch.ones(0, 6, dtype=torch.float64)))
    assert len(set(found)) == 1 and "a batch of 0 rows" in found[0][1]


def test_checkpoints_have_the_names_of_the_whole_module(pools):
    def run():
        whole = transformer()
        model = md.Pipeline(transformer(), 2, balance=[3, 3, 3])
        own = list(model.state_dict())
        for p in model.parameters():
            nn.init.zeros_(p)
        model.load_state_dict(whole.state_dict())  # of the whole module
        model.load_state_dict(model.state_dict())  # of this rank's layers
        full = model.full_state_dict()
        same = all(torch.equal(full[k], v) for k, v in whole.state_dict().items())
        transformer().load_state_dict(full)
        lacking = {k: v for k, v in whole.state_dict().items() if k != own[0]}
        with contextlib.suppress(RuntimeError):
            model.load_state_dict(lacking)
            return "nothing is said of what lacks"
        more = whole.state_dict() | {"other": torch.ones(1)}
        with contextlib.suppress(RuntimeError):
            model.load_state_dict(more)
            return "nothing is said of what nobody has"
        return same, list(full) == list(whole.state_dict()), own

    found = pools(3)(run)
    assert [ok[:2] for ok in found] == [(True, True)] * 3
    wanted = list(transformer().state_dict())
    assert [name for _, _, own in found for name in own] == wanted


def test_stages_that_are_fully_sharded_are_clipped_and_saved_whole(pools):
    def run():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
        plain, group = mlp(), mesh.get_group("pipeline")
        wrap = partial(md.FullyShardedDataParallel, device_mesh=mesh["data"])
        model = md.Pipeline(copy.deepcopy(plain), 2, process_group=group, wrap=wrap)
        adam, ours = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (plain, model))
        own, found = slice(mesh.get_local_rank("data"), None, 2), []
        for step in range(2):
            inputs, targets = digits(step, rows=12)
            adam.zero_grad()
            ours.zero_grad()
            md.parity.cross_entropy(plain(inputs), targets).backward()
            model.train_step(inputs[own], targets[own], md.parity.cross_entropy)
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.02)
            with pytest.raises(RuntimeError, match=NOT_BY_TORCH):
                nn.utils.clip_grad_norm_(model.parameters(), 0.02)
            found.append(apart(model.clip_grad_norm_(0.02), norm))
            adam.step()
            ours.step()
            full, state = model.full_state_dict(), plain.state_dict()
            found += [apart(full[name], value) for name, value in state.items()]
        whole = mlp().state_dict()
        with model.whole_stages():
            model.load_state_dict(whole)
        full = model.full_state_dict()
        return max(found), all(torch.equal(full[name], value) for name, value in whole.items())

    found = pools(4)(run)
    assert all(difference <= 1e-12 and loaded for difference, loaded in found)


NOT_BY_TORCH = "the norm of that part: call the model's clip_grad_norm_"


@pytest.mark.parametrize("foreach", [False, True])
def test_torchs_clipping_is_refused_and_all_else_is_as_without(pools, foreach):
    def run():
        plain, (inputs, targets) = mlp(), digits(0)
        model = md.Pipeline(copy.deepcopy(plain), 4)
        own = dict(plain.named_parameters())
        own = {name: own[name] for name, _ in model.module.named_parameters()}
        adamw = partial(torch.optim.AdamW, lr=0.01, foreach=foreach)
        optimizers = [adamw(each.parameters()) for each in (model, plain)]
        for _ in range(3):  # gradients are added to marked ones in the second half of a step
            for _ in range(2):
                F.cross_entropy(plain(inputs), targets).backward()
                model.train_step(inputs, targets, F.cross_entropy)
            for parameters in (model.parameters(), optimizers[0].param_groups[0]["params"]):
                with pytest.raises(RuntimeError, match=NOT_BY_TORCH):
                    nn.utils.clip_grad_norm_(parameters, 0.1, foreach=foreach)
            grads = [p.grad for p in model.parameters()]
            with pytest.raises(RuntimeError, match=NOT_BY_TORCH):
                nn.utils.get_total_norm(grads, float("inf"), foreach=foreach)
            for ours, theirs in zip(grads, own.values(), strict=True):
                assert apart(torch.linalg.vector_norm(ours), theirs.grad.norm()) <= 1e-12
                assert apart(torch.stack([ours, ours])[1], theirs.grad) <= 1e-12
                kept = pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours), ours.clone(), -ours
                assert {type(each) for each in kept} == {torch.Tensor}
                assert repr(ours) == repr(kept[0])
            copies = copy.deepcopy(grads)  # each is its own
            assert all(map(torch.equal, copies, grads))
            assert torch.stack(tensors=grads[:1]).equal(grads[0][None])
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            nn.utils.clip_grad_value_(plain.parameters(), 0.01)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        states = [value for state in optimizers[0].state.values() for value in state.values()]
        assert {type(value) for value in states} == {torch.Tensor}
        return max(apart(p, own[name]) for name, p in model.module.named_parameters())

    assert max(pools(2)(run)) <= 1e-12
    alone = pools(1)(lambda: _clipped_alone(md.Pipeline(mlp(), 4)))
    assert max(alone) <= 1e-12


def _clipped_alone(model):
    """One rank has the whole model, and torch's function is right."""
    plain, (inputs, targets) = mlp(), digits(0)
    F.cross_entropy(plain(inputs), targets).backward()
    model.train_step(inputs, targets, F.cross_entropy)
    norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (plain, model)]
    return apart(*norms)


def test_sharded_stages_need_as_many_micro_batches_on_all_ranks(pools):
    def run():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
        wrap = partial(md.FullyShardedDataParallel, device_mesh=mesh["data"])
        model = md.Pipeline(mlp(), 3, process_group=mesh.get_group("pipeline"), wrap=wrap)
        whole, data, found = mlp(), mesh.get_local_rank("data"), []
        for rows in (7 - data, 6 + data, 2):  # of other sizes, and with other remainders
            inputs = digits(data, rows=rows)[0]
            found.append(apart(model(inputs), whole(inputs)))
        with pytest.raises(ValueError, match="as many micro-batches: here they are 2 and 3"):
            model(digits(0, rows=3 - data)[0])
        return max(found)

    assert max(pools(4)(run)) <= 1e-12


def test_other_ranks_layers_are_freed(pools):
    def run():
        module = mlp()
        layers = [weakref.ref(layer) for layer in module]
        model = md.Pipeline(module, 2)
        del module
        gc.collect()
        kept = [number for number, layer in enumerate(layers) if layer() is not None]
        return kept, [int(name) for name, _ in model.module.named_children()]

    (first, own), (second, other) = pools(2)(run)
    assert first == own and second == other and first + second == list(range(11))


def test_a_copy_is_a_pipeline_of_its_own(pools):
    """As an average of weights is: it evaluates, and what one learns the other does not."""

    def run():
        model = md.Pipeline(transformer(), 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average = torch.optim.swa_utils.AveragedModel(model)
        plain, mean, seen = transformer(), transformer(), []
        for step in range(3):
            inputs, targets = words(step)
            model.train_step(inputs, targets, md.parity.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            seen.append(model.full_state_dict())
        mean.load_state_dict({k: sum(s[k] for s in seen) / 3 for k in seen[0]})
        inputs, targets = words(9)
        found = [apart(average(inputs), mean(inputs))]
        copied = copy.deepcopy(model)
        plain.load_state_dict(seen[-1])
        md.parity.cross_entropy(plain(inputs), targets).backward()
        copied.train_step(inputs, targets, md.parity.cross_entropy)
        assert all(p.grad is None for p in model.parameters())
        wanted = dict(plain.named_parameters(remove_duplicate=False))  # ties are the copy's own
        ours = copied.module.named_parameters(remove_duplicate=False)
        found += [apart(p.grad, wanted[name].grad) for name, p in ours]
        found.append(apart(copied.clip_grad_norm_(1.0), nn.utils.get_total_norm(
            [p.grad for p in plain.parameters()]
        )))  # fmt: skip
        assert copied.process_group is model.process_group
        with pytest.raises(TypeError, match="cannot be saved: .* full_state_dict"):
            torch.save(model, io.BytesIO())
        return max(found)

    assert max(pools(2)(run)) <= 1e-12


def test_a_copy_after_a_step_warns_of_nothing(pools):
    def run():
        model = md.Pipeline(four(), 2)
        model.train_step(torch.ones(4, 3), torch.ones(4, 3), F.mse_loss)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")  # torch's of its TreeSpec come once for each program
            copy.deepcopy(model)
        return [str(each.message) for each in seen]

    assert pools(2)(run) == [[], []]


def replace(model):
    model.module[0].weight = nn.Parameter(model.module[0].weight.detach().clone())


def add(model):
    model.module[0].scale = nn.Parameter(torch.ones(1))


def unfreeze(model):
    model.requires_grad_(True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (replace, "rank 1: parameter 2.weight has been replaced since it was wrapped"),
        (add, "rank 1: parameter 2.scale has been added since it was wrapped"),
        (unfreeze, "rank 1: parameter 2.bias has been unfrozen since it was wrapped"),
    ],
)
def test_parameters_that_changed_on_one_rank_are_refused_on_all(pools, change, words):
    def run():
        layers = four()
        layers[2].bias.requires_grad_(False)
        model = md.Pipeline(layers, 2, balance=[2, 2])
        batch = torch.ones(4, 3)
        model.train_step(batch, batch, F.mse_loss)
        if dist.get_rank() == 1:
            change(model)
        model(batch)  # an evaluation may be of anything
        model.train_step(batch, batch, F.mse_loss)

    first, second = told(pools(2), run)
    assert first == second and first[0] == "RuntimeError" and words in first[1]


def another_layer(model):
    model.module[1] = nn.Tanh()  # it has no parameters that would tell


def another_module(model):
    model.module = nn.Sequential(*model.module)  # as torch.compile does: the same layers


def a_hook_of_no_layer(model):
    model.module.register_forward_hook(lambda layers, inputs, outputs: 2 * outputs)


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (another_layer, "rank 1: layer 3 has been added, removed or replaced since it was wrapped"),
        (another_module, "rank 1: the module has been replaced since it was wrapped, and would"),
        (a_hook_of_no_layer, "rank 1: the module has a hook, which would not be called: Pipeline"),
    ],
    ids=["layer", "module", "hook"],
)
def test_layers_that_would_not_be_run_are_refused_on_all_ranks(pools, change, words, evaluates):
    def run():
        layers = [nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU()]
        model, batch = md.Pipeline(nn.Sequential(*layers), 2, balance=[2, 2]), torch.ones(4, 3)
        if change is another_layer:
            model.train_step(batch, batch, F.mse_loss)
        if dist.get_rank() == 1:
            change(model)
        if evaluates:
            model(batch)
        else:
            model.train_step(batch, batch, F.mse_loss)

    first, second = told(pools(2), run)
    assert first == second and first[0] == "RuntimeError" and words in first[1]


@pytest.mark.parametrize("what", [md.ZeroRedundancyOptimizer, md.averaging.LocalSGD])
@pytest.mark.parametrize("of", [lambda model: model, copy.deepcopy], ids=["", "a copy"])
def test_stages_of_one_shape_are_not_taken_for_replicas(pools, what, of):
    def run():
        parameters = of(md.Pipeline(four(), 2, balance=[2, 2])).parameters()
        if what is md.ZeroRedundancyOptimizer:
            what(parameters, torch.optim.SGD, lr=0.1)
        else:
            what(torch.optim.SGD(parameters, lr=0.1), 2)

    first, second = told(pools(2), run)
    assert first == second and first[0] == "ValueError"
    assert all(f"of rank {rank} along a pipeline" in first[1] for rank in (0, 1))


def test_a_model_that_was_in_a_pipeline_may_be_trained_otherwise(pools):
    def run():
        model = four()
        md.Pipeline(model, 2)
        ddp = md.DistributedDataParallel(model)
        optimizer = md.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
        ddp(torch.ones(4, 3)).sum().backward()
        optimizer.step()

    assert pools(2)(run) == [None, None]


def any_order(ranks, stages, microbatches, seed):
    """A schedule in which a random one of the computations that are possible is the next."""
    generator = random.Random(seed)
    orders, done, split = [[] for _ in range(ranks)], set(), generator.random() / 2
    left = []
    for stage, i in itertools.product(range(stages), range(microbatches)):
        halves = [BackwardInputs, BackwardWeights]
        left += [step(stage, i) for step in [Forward, *halves]]

    def possible(step):
        stage, i = step.stage, step.microbatch
        before = {
            Forward: [Forward(stage - 1, i)] if stage else [],
            BackwardInputs: [Forward(stage, i)]
            + ([BackwardInputs(stage + 1, i)] if stage + 1 < stages else []),
            BackwardWeights: [BackwardInputs(stage, i)],
        }[type(step)]
        return done.issuperset(before)

    while left:
        step = generator.choice([step for step in left if possible(step)])
        left.remove(step)
        done.add(step)
        orders[step.stage % ranks].append(step)
        if isinstance(step, BackwardInputs) and generator.random() < split:  # in one go
            left.remove(weights := BackwardWeights(step.stage, step.microbatch))
            done.add(weights)
            orders[step.stage % ranks][-1] = Backward(step.stage, step.microbatch)
    return with_messages("any order", orders, stages, microbatches)


@pytest.mark.parametrize("seed", range(6))
def test_any_schedule_that_the_validator_accepts_trains(pools, shm, seed):
    schedule = any_order(3, 3 + 3 * (seed % 3), 9, seed)
    validate(schedule)
    found = (shm if seed % 2 else pools(3))(train, mlp, digits, 9, schedule, steps=1)
    assert set.union(*found) == names(mlp())


def test_many_micro_batches_do_not_wait_for_each_other(pools):
    def run():
        model = md.Pipeline(mlp(), 24, "interleaved")  # of which a rank's first stage is done first
        return apart(model(digits(0, rows=30)[0]), mlp()(digits(0, rows=30)[0]))

    assert max(pools(2)(run)) <= 1e-12


def test_there_must_be_a_group():
    with pytest.raises(RuntimeError, match="Pipeline works within a process group"):
        md.Pipeline(four(), 2)
    plan = forward_only(3, 6, 4)
    assert sum(isinstance(x, Forward) for own in plan.ranks for x in own) == 24
