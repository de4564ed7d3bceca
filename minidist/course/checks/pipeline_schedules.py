"""The puzzles and the exercise of the lesson pipeline_schedules."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F

from minidist.course.checks.verdict import (
    NotYet,
    check,
    function,
    hints,
    number,
    on_ranks,
    ranks,
    shown,
)
from minidist.course.zoo import mlp
from minidist.instruments.link import Link
from minidist.pipeline import Pipeline, Schedule, ScheduleError, simulate, validate, with_messages
from minidist.pipeline import instructions as do

SIZES = (1, 3), (2, 2), (3, 7), (4, 2), (8, 20), (4, 16), (4, 8)  # ranks, micro-batches
FAR = Link(gbps=1e6, latency_us=1e6)  # a message arrives one forward pass later


@check
@hints(
    'Read "Interleaving" again: how many stages does the model have in all, over all ranks?',
    "An activation is sent wherever two stages meet. How many such boundaries are there? "
    "One fewer than there are stages.",
    "Each micro-batch crosses each boundary once in forward. Multiply the two numbers.",
)
def activations_sent(answer: object) -> str:
    """Messages forward, in a step of 8 ranks with 4 stages each and 16 micro-batches."""
    number(
        answer,
        496,
        "messages",
        {
            112: "that is with one stage a rank; here there are 32 stages",
            512: "the last stage sends nothing onward",
            992: "that counts the gradients too",
            448: "the last rank has four stages, and only the last of them sends nothing onward",
            31: "each micro-batch crosses each boundary",
        },
    )
    return "31 boundaries × 16 micro-batches. With one stage a rank there are 7 boundaries."


@check
@hints(
    "Count the units that one micro-batch takes in one stage: first without recomputation, "
    "then with it.",
    "Without it: forward and backward, which is twice as long. With it forward comes once more.",
    "Divide the one by the other. With its bubble, a step takes m + N − 1 times as long "
    "either way, so that cancels.",
)
def recomputed_time(answer: object) -> str:
    """How many times as long a 1F1B step takes, if all activations are recomputed."""
    number(
        answer,
        4 / 3,
        wrong={
            2: "forward comes twice, but backward, which takes twice as long, only once",
            1.5: "backward takes twice as long as forward",
            1 / 3: "that is by how much it is longer",
            1: "forward runs twice",
        },
    )
    return "1 + 1 + 2 units for 1 + 2. The bubble grows in the same ratio."


@check
@hints(
    "Write down 1F1B's list for rank 0 of four. How many forward passes come first, and for"
    " which rank is each of them?",
    "Each of these forward passes covers the work of one rank behind this one. Here a "
    "message to that rank takes one more unit, and that wants a forward pass as well.",
    "So begin with twice as many forward passes as 1F1B, but at most m. Then take forward "
    "and backward in turns. At the end the rest goes backward.",
)
def far_away(answer: object) -> str:
    """An order as fast as GPipe where messages arrive late, with few activations in flight."""
    (given,) = on_ranks(_orders, function(answer), world_size=1)
    for (world_size, m), orders in given:
        on = f"{ranks(world_size)}, with {m} micro-batches"
        if isinstance(orders, str):
            raise NotYet(f"on {on}: {orders}.")
        schedule = _schedule(orders, world_size, m, on)
        late = simulate(schedule, link=FAR)
        for rank, kept in enumerate(late.in_flight):
            limit = min(m, 2 * (world_size - rank) - 1)
            if kept > limit:
                raise NotYet(
                    f"on {on}, rank {rank} keeps {kept} micro-batches; {limit} are enough."
                )
        wanted = 3 * (m + world_size - 1) + 2 * (world_size - 1)
        if late.time > wanted + 0.01:
            raise NotYet(f"on {on}: a step takes {late.time:.0f} units of time, not {wanted}.")
    results = on_ranks(_trial, schedule, world_size=4)
    if max(results) > 1e-9:
        raise NotYet("the order is valid, but the gradients are not those of one process.")
    return (
        "as fast as GPipe, with 2 (N - s) - 1 micro-batches in flight at most; and it trains. "
        "This is eager 1F1B (Zhuang et al., 2022)."
    )


def _orders(order: Callable[..., Any]) -> list[tuple[tuple[int, int], Any]]:
    """For each number of ranks and of micro-batches the lists of all ranks, or what is wrong."""
    return [((n, m), _of_all(order, n, m)) for n, m in SIZES]


def _of_all(order: Callable[..., Any], world_size: int, m: int) -> Any:
    orders = []
    for rank in range(world_size):
        if (given := order(rank, world_size, m)) is None:
            return f"rank {rank} gets None, not a list"
        mine = list(islice(given, 10 * m))
        if odd := [step for step in mine if not isinstance(step, do.Compute)]:
            return (
                f"the list of rank {rank} holds {shown(odd[0])}: give do.Forward(rank, i) and "
                "do.Backward(rank, i)"
            )
        orders.append(mine)
    return orders


def _schedule(orders: list[list[do.Compute]], world_size: int, m: int, on: str) -> Schedule:
    try:
        schedule = with_messages("yours", orders, world_size, m)
        validate(schedule)
    except ScheduleError as problem:
        raise NotYet(f"on {on}: {str(problem).rstrip('.')}.") from None
    except Exception as problem:  # computations in a circle, or of stages that do not exist
        said = " ".join(str(problem).split())[:200] or shown(problem)
        raise NotYet(f"on {on}: {said.rstrip('.')}.") from None
    return schedule


def _trial(schedule: Schedule) -> float:
    """How far the gradients are from those of one process."""
    sizes = [8] * (schedule.stages + 1)
    torch.manual_seed(0)
    batch, targets = torch.randn(2, schedule.microbatches, 8, dtype=torch.float64)
    alone = mlp(*sizes, dtype=torch.float64)
    F.mse_loss(alone(batch), targets).backward()
    wanted = {name: p.grad for name, p in alone.named_parameters()}
    model = Pipeline(mlp(*sizes, dtype=torch.float64), schedule.microbatches, schedule)
    model.train_step(batch, targets, F.mse_loss)
    found = {name: p.grad for name, p in model.module.named_parameters()}
    return max(
        (float((own - one).abs().max()) if own is not None and one is not None else 1.0)
        for name, own in found.items()
        for one in [wanted[name]]
    )
