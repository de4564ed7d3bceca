"""Schedules are what they are said to be, told from their lists; and where a model is cut."""

import copy
import dataclasses
import itertools
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import schedules as torchs

import minidist as md
from minidist.pipeline import (
    SCHEDULES,
    Schedule,
    ScheduleError,
    balance_by_cost,
    balance_by_parameters,
    cut,
    simulate,
    validate,
)
from minidist.pipeline.equal_stages import balance
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
from minidist.pipeline.schedules import with_messages

# ---- schedules, as data -----------------------------------------------------------------------


def every(sizes=((1, 3), (2, 1), (2, 5), (3, 3), (4, 2), (4, 8), (5, 10))):
    for ranks, microbatches in sizes:
        for name, make in SCHEDULES.items():
            if name != "interleaved":
                yield make(ranks, microbatches), 1
            elif ranks > 1 and microbatches % ranks == 0:
                yield from ((make(ranks, microbatches, v), v) for v in (1, 2, 3))


def test_torchs_own_validators_take_them_and_no_broken_one():
    """By the checks of torch.distributed.pipelining, which know nothing of ours."""
    letters = {Forward: "F", Backward: "B", BackwardInputs: "I", BackwardWeights: "W"}
    letters |= {SendActivation: "SEND_F", ReceiveActivation: "RECV_F"}
    letters |= {SendGradient: "SEND_B", ReceiveGradient: "RECV_B"}

    def checked(schedule):
        orders = {
            rank: [
                torchs._Action.from_str(f"{each.stage}{letters[type(each)]}{each.microbatch}")
                for each in own
            ]
            for rank, own in enumerate(schedule.ranks)
        }
        sizes = len(schedule.ranks), schedule.stages, schedule.microbatches
        places = torchs._validate_schedule(orders, *sizes)
        assert places == {stage: schedule.rank_of(stage) for stage in range(schedule.stages)}
        torchs._simulate_comms_compute(orders, schedule.rank_of, schedule.stages)

    for schedule, _ in every():
        checked(schedule)
        if len(schedule.ranks) > 1:
            first = schedule.ranks[0]
            lacks = [each for each in first if not isinstance(each, SendActivation)]
            # An IndexError where its table of a deadlock has ranks of other lengths.
            with pytest.raises((ValueError, IndexError)):
                checked(dataclasses.replace(schedule, ranks=[lacks, *schedule.ranks[1:]]))


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
        validate(schedule)
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
        return (earlier.stage, earlier.microbatch) == (later.stage, later.microbatch)
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


def test_what_the_validator_says():
    for what, (ranks, words) in REFUSED.items():
        microbatches = 1 + any(Forward(0, 1) in own for own in ranks)
        schedule = Schedule("mine", 2, microbatches, ranks)
        if words is None:
            validate(schedule)
            continue
        with pytest.raises(ScheduleError) as refused:
            validate(schedule)
        assert str(refused.value) == words, what


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


class Clock:
    """It goes on by a little at each look, and by much in layers that are slow."""

    now = 0.0

    def perf_counter(self):
        self.now += 0.01
        return self.now


class Slow(nn.Module):
    def forward(self, x):
        cut.time.now += 1
        return x


def test_balance_by_parameters_and_by_measured_cost(pools):
    module = nn.Sequential(nn.ReLU(), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU())
    assert balance_by_parameters(module.append(nn.Tanh()), 2) == [3, 3]
    module = nn.Sequential(nn.Linear(4, 90), nn.Linear(90, 4), nn.ReLU(), nn.Linear(4, 4))
    assert balance_by_parameters(module, 2) == [1, 3]

    def on_ranks():  # a layer that is slow on one rank only takes a third of its time there
        layers = [nn.Identity() for _ in range(6)]
        if dist.get_rank() == 1:
            layers[0] = layers[1] = Slow()
        layers[5] = Slow()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cut, "time", Clock())
            return balance_by_cost(nn.Sequential(*layers), torch.ones(1), 2)

    assert pools(3)(on_ranks) == [[5, 1]] * 3
