"""The puzzles and the exercise of the lesson collectives."""

import math
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
    require_right,
    shown,
)
from minidist.instruments.measure import TrafficCounter

# What each of the four situations asks for.
WANTED = ["broadcast", "allgather", "reducescatter", "alltoall"]


@check
def which(answer: Any) -> None:
    """Which collective serves in each of four situations."""
    try:
        names = [each if isinstance(each, str) else each.__name__ for each in answer]
    except Exception:
        raise NotYet(f"give a list of four names, not {shown(answer)}.") from None
    if len(names) != len(WANTED):
        raise NotYet(f"give four names, not {len(names)}.")
    for place, (name, wanted) in enumerate(zip(names, WANTED, strict=True), start=1):
        if _plain(name) == "allreduce" and wanted == "reducescatter":
            raise NotYet("in 3 all_reduce gives every rank the whole sum: more than it needs.")
        if _plain(name) != wanted:
            raise NotYet(f"in {place} it is not {shown(name)}.")


def _plain(name: str) -> str:
    """Of dist.all_gather_single, "all-gather", NCCL's AllGather: allgather."""
    text = re.sub(r"[\W_]", "", name.rpartition(".")[2].lower())
    for ending in ("into", "tensor", "single"):
        text = text.replace(ending, "")
    return text


whole_gradient = puzzle(__name__, "whole_gradient")


@check
def scan(answer: object) -> str:
    """x becomes the sum over the ranks up to this one."""
    most = 0.0
    for world_size in range(1, 6):
        told = require_right(_scan, function(answer), world_size=world_size, backend="gloo")
        most = max(most, *(messages for _, messages in told))
    if most <= 1:
        return "on 1, 2, 3, 4 and 5 ranks, and with one message for each rank."
    return "on 1, 2, 3, 4 and 5 ranks. One message for each rank would do."


def _scan(scan: Callable[..., Any]) -> tuple[str, float]:
    """What is wrong on this rank, if anything; how many messages it sends in a call, at most. Those
    of torch's collectives cannot be seen: infinitely many."""
    lengths = (1, 7, 0, 1000)
    # One call after another: each must take its own messages. Who is wrong goes on: others wait.
    with TrafficCounter() as traffic:
        wrong = next(filter(None, [_scan_of(n, scan) for n in lengths]), "")
    return wrong, math.inf if traffic.calls else traffic.sent_messages / len(lengths)


def _scan_of(n: int, scan: Callable[..., Any]) -> str:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parts = [torch.arange(1, n + 1) * 10**other for other in range(world_size)]
    x = parts[rank].clone()
    result = scan(x)
    wanted = torch.stack(parts[: rank + 1]).sum(0)
    if torch.equal(x, wanted):
        return ""
    if x.shape != wanted.shape or x.dtype != wanted.dtype:
        return "has changed the shape or the dtype of x"
    if isinstance(result, torch.Tensor) and torch.equal(result, wanted):
        return "returns the right sum, but x does not hold it"
    if torch.equal(x, parts[rank]):
        return "has x as it was: change it in place, as `x += y` does and `x = x + y` does not"
    if torch.equal(x, torch.stack(parts).sum(0)):
        return f"has the sum over all ranks, not over 0 to {rank}"
    if torch.equal(x, parts[rank] * 0 if rank == 0 else torch.stack(parts[:rank]).sum(0)):
        return "leaves out its own x"
    if torch.equal(x, torch.stack(parts[rank:]).sum(0)):
        return "has the sum over itself and the ranks after it, not before it"
    got, right = x[0].item(), wanted[0].item()
    return f"has {got}, not {right}, where each rank began with 10 to the power of its number"
