"""The puzzles and the exercise of the lesson communication."""

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from minidist.course.checks.verdict import (
    NotYet,
    check,
    function,
    puzzle,
    ranks,
    require_right,
    shown,
)
from minidist.instruments.measure import TrafficCounter

packed = puzzle(__name__, "packed")


@check
def what_helps(answer: object) -> None:
    """What shortens a ring's all_reduce of 4 kB on 64 ranks: the greatest gain first."""
    order = "".join(re.findall("[A-Z]", shown(answer).upper()))
    if sorted(order) != ["A", "B", "C"]:
        raise NotYet(f'give the three letters in order, such as "ABC", not {shown(answer)}.')
    if order[2] != "A":
        raise NotYet("a message of this ring has 64 bytes, which are hardly any of its time.")
    if order != "CBA":
        raise NotYet("half the latency halves the time. C saves more than half of the messages.")


@check
def halving_doubling(answer: object) -> None:
    """The sum in x on every rank: 2 lg N messages of a rank, 2 (N - 1)/N of the vector in them."""
    for world_size in (1, 2, 4, 8):
        steps, share = 2 * (world_size.bit_length() - 1), 2 * (world_size - 1) / world_size
        for n in (8, 1024):
            results = require_right(
                _trial, function(answer), n, world_size=world_size, backend="gloo"
            )
            messages, nbytes = (max(counted) for counted in list(zip(*results, strict=True))[1:])
            on = f"the sum is right, but on {ranks(world_size)} a rank sends"
            if messages > steps:
                raise NotYet(f"{on} {messages} messages, not {steps}.")
            if nbytes > share * n * 8:
                raise NotYet(f"{on} {nbytes / (n * 8):g} times the vector, not {share:g} times.")


def _trial(all_reduce: Callable[..., Any], n: int) -> tuple[str, int, int]:
    """What is wrong on this rank, if anything; its messages, and their bytes."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ones = torch.arange(1, n + 1, dtype=torch.float64)
    x = ones * 10**rank
    wanted = ones * sum(10**other for other in range(world_size))
    with TrafficCounter() as traffic:
        result = all_reduce(x)
    if torch.equal(x, wanted):
        others = traffic.calls.keys() - {"barrier"} or traffic.control_messages
        wrong = "has the sum, but by a collective: use send, isend and recv" if others else ""
    elif isinstance(result, torch.Tensor) and torch.equal(result, wanted):
        wrong = "returns the sum, but x does not hold it"
    else:
        right = int((x == wanted).sum()) if x.shape == wanted.shape else 0
        wrong = f"has the sum in {right} of {n} elements"
    return wrong, traffic.sent_messages, traffic.sent_bytes
