"""The puzzles and the exercise of the lesson collectives."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

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
from minidist.instruments.measure import TrafficCounter

# What each of the four situations asks for.
WANTED = ["broadcast", "all_gather", "reduce_scatter", "all_to_all"]


@check
@hints(
    'Look at the pictures under "Nine operations": who has what before, and who has what after?',
    "Ask of each case: is it with one rank at first, or with all? Does a rank end with the "
    "whole or with a part? Is anything added up?",
    "In 1 one rank has it, and all get it. In 2 parts become a whole, on all. In 3 there is"
    " a sum, and each keeps a part of it. In 4 each has something else for each.",
)
def which(answer: Any) -> str:
    """Which collective serves in each of four situations."""
    try:
        names = [_plain(each) for each in answer]
    except Exception:
        raise NotYet(f"give a list of four names, not {shown(answer)}.") from None
    if len(names) != len(WANTED):
        raise NotYet(f"give four names, not {len(names)}.")
    for place, (name, wanted) in enumerate(zip(names, WANTED, strict=True), start=1):
        if _bare(name) == "allreduce" and wanted == "reduce_scatter":
            raise NotYet("in 3 all_reduce gives every rank the whole sum: more than it needs.")
        if _bare(name) != _bare(wanted):
            raise NotYet(f"in {place} it is not {shown(name)}.")
    return "the last three are what FSDP and mixtures of experts consist of."


def _bare(name: str) -> str:
    """MPI and NCCL write allgather, AllGather."""
    return name.replace("_", "")


def _plain(name: Any) -> str:
    """`dist.all_gather_single`, "all-gather", "All gather": all are all_gather."""
    text = name if isinstance(name, str) else name.__name__
    text = text.lower().strip().replace("-", "_").replace(" ", "_").rpartition(".")[2]
    for ending in ("_into_tensor", "_tensor", "_single"):
        text = text.removesuffix(ending)
    return text


@check
@hints(
    "In the training on four ranks the mean of the ranks' gradients was right because all "
    "had equally many images. Here they have not.",
    "Each of the four images must count the same. Turn the mean of rank 0 back into a sum "
    "over its images.",
    "Add the sums of both ranks, and divide by the number of all images.",
)
def whole_gradient(answer: object) -> str:
    """The gradient of four images: three with mean 4 on rank 0, one with 8 on rank 1."""
    number(
        answer,
        5,
        wrong={
            6: "the mean of the means counts the image on rank 1 three times as much as the others",
            12: "that is the sum of the two means",
            20: "that is the sum over all four images",
            7: "rank 0 has three of the images, not one",
        },
    )
    return "(3 × 4 + 1 × 8) / 4. With unequal shares, weigh each rank by its images."


@check
@hints(
    "Think of two ranks first. Which of them has to change its x, and what must it know for that?",
    "A rank needs the sum over all ranks before it. Its left neighbour has that, as soon as"
    " its own x is right.",
    "A chain: receive from the left and add it to x, in place; then send x to the right. "
    "The first rank receives nothing, the last one sends nothing.",
)
def scan(answer: object) -> str:
    """x becomes the sum over the ranks up to this one."""
    scan, most = function(answer), 0.0
    for world_size in range(1, 6):
        told = on_ranks(_scan, scan, world_size=world_size, where=" over gloo", backend="gloo")
        for rank, (wrong, messages) in enumerate(told):
            if wrong:
                raise NotYet(f"on {ranks(world_size)}, rank {rank} {wrong}.")
            most = max(most, messages)
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
        return "has x as it was"
    if torch.equal(x, torch.stack(parts).sum(0)):
        return f"has the sum over all ranks, not over 0 to {rank}"
    if torch.equal(x, parts[rank] * 0 if rank == 0 else torch.stack(parts[:rank]).sum(0)):
        return "leaves out its own x"
    if torch.equal(x, torch.stack(parts[rank:]).sum(0)):
        return "has the sum over itself and the ranks after it, not before it"
    got, right = x[0].item(), wanted[0].item()
    return f"has {got}, not {right}, where each rank began with 10 to the power of its number"
