"""The puzzles and the exercise of the lesson pipeline_schedules."""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F

from minidist.course.checks.verdict import (
    NotYet,
    check,
    function,
    on_ranks,
    puzzle,
    ranks,
    same,
    shown,
)
from minidist.course.zoo import mlp
from minidist.instruments.link import Link
from minidist.pipeline import Pipeline, Schedule, simulate, validate, with_messages
from minidist.pipeline import instructions as do

SIZES = (1, 3), (2, 2), (3, 7), (4, 2), (8, 20), (4, 16), (4, 8)  # ranks, micro-batches
FAR = Link(gbps=1e6, latency_us=1e6)  # a message arrives one forward pass later
LEAGUE = (8, 20), Link(gbps=1e6, latency_us=1.7e6)  # farther than the order was asked for


recomputed_time = puzzle(__name__, "recomputed_time")

STUCK = str(do.SendActivation(0, 1)), str(do.SendGradient(1, 0))


@check
def stuck_at(answer: Any) -> None:
    """Where two ranks wait for each other, if a send waits until the other side receives."""
    try:
        given = [str(each).removeprefix("do.") for each in answer]
    except Exception:
        raise NotYet(f"give a list of two instructions, not {shown(answer)}.") from None
    if len(given) != 2:
        raise NotYet(f"give two instructions, not {len(given)}.")
    for rank, (said, wanted) in enumerate(zip(given, STUCK, strict=True)):
        if "Forward" in said or "Backward" in said:
            raise NotYet(f"rank {rank} waits only where it sends or receives.")
        if said != wanted:
            raise NotYet(f"rank {rank} does not stand at {shown(said)} for ever.")


@check
def far_away(answer: object) -> float:
    """An order as fast as GPipe where messages arrive late, with few activations in flight. The
    score: its time where they arrive still later."""
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
    if not all(on_ranks(_trial, schedule, world_size=4)):
        raise NotYet("the order is valid, but the gradients are not those of one process.")
    (world_size, m), farther = LEAGUE
    on = f"{ranks(world_size)}, with {m} micro-batches"
    return simulate(_schedule(dict(given)[world_size, m], world_size, m, on), link=farther).time


def _orders(order: Callable[..., Any]) -> list[tuple[tuple[int, int], Any]]:
    """For each number of ranks and of micro-batches the lists of all ranks, or what is wrong."""
    return [(sizes, _of_all(order, *sizes)) for sizes in SIZES]


def _of_all(order: Callable[..., Any], world_size: int, m: int) -> Any:
    given = [order(rank, world_size, m) for rank in range(world_size)]
    for rank, mine in enumerate(given):
        if not isinstance(mine, Iterable):
            return f"my_order returns {shown(mine)} for rank {rank}, not a list"
    orders = [list(islice(mine, 10 * m)) for mine in given]
    for rank, mine in enumerate(orders):
        if odd := [step for step in mine if not isinstance(step, do.Compute)]:
            return (
                f"the list of rank {rank} holds {shown(odd[0])}: give do.Forward(rank, i) and "
                "do.Backward(rank, i)"
            )
    return orders


def _schedule(orders: list[list[do.Compute]], world_size: int, m: int, on: str) -> Schedule:
    try:
        schedule = with_messages("yours", orders, world_size, m)
        validate(schedule)
    except Exception as problem:  # also computations in a circle, or of stages that do not exist
        said = " ".join(str(problem).split())[:200] or shown(problem)
        raise NotYet(f"on {on}: {said.rstrip('.')}.") from None
    return schedule


def _trial(schedule: Schedule) -> bool:
    """Whether this rank's gradients are those of one process."""
    sizes = [8] * (schedule.stages + 1)
    torch.manual_seed(0)
    batch, targets = torch.randn(2, schedule.microbatches, 8, dtype=torch.float64)
    alone = mlp(*sizes, dtype=torch.float64)
    F.mse_loss(alone(batch), targets).backward()
    model = Pipeline(mlp(*sizes, dtype=torch.float64), schedule.microbatches, schedule)
    model.train_step(batch, targets, F.mse_loss)
    own = dict(model.module.named_parameters())
    return same([own[n].grad for n in own], [alone.get_parameter(n).grad for n in own])
