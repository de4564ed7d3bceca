"""The puzzles and the exercise of the lesson rank."""

import re
import time
from collections.abc import Callable
from itertools import product
from operator import index
from typing import Any

import torch
import torch.distributed as dist

from minidist.course.checks.verdict import NotYet, check, function, puzzle, require_right, shown
from minidist.instruments.measure import TrafficCounter

two_tokens = puzzle(__name__, "two_tokens")


@check
def twins(answer: Any) -> None:
    """Groups that make the sums of two nodes, of 4 ranks each, the sum of all eight."""
    try:
        groups = sorted(sorted(index(rank) for rank in group) for group in answer)
    except Exception:
        raise NotYet(f"give a list of lists of ranks, not {shown(answer)}.") from None
    if sorted(rank for group in groups for rank in group) != list(range(8)):
        raise NotYet("each of the ranks 0 to 7 belongs to one group.")
    for group, node in product(groups, (0, 1)):
        there = [rank for rank in group if rank // 4 == node]
        if len(there) != 1:
            said = (
                f"adds the sum of node {node} {len(there)} times" if there else f"lacks node {node}"
            )
            raise NotYet(f"the group {shown(group)} {said}.")


@check
def shift(answer: object) -> None:
    """x goes to the rank on the right, on a backend whose `send` waits for the receiver."""
    shift = function(answer)
    for world_size in range(1, 6):
        try:
            require_right(_shift, shift, world_size=world_size, backend="gloo")
        except NotYet as reason:
            # A rank that waited in vain for too long has gone: its neighbour sees that, or waits.
            if not re.search(r"(lost the connection|waited) .*in send\b", str(reason)):
                raise
            said = (
                "a rank waits in `send`, and its neighbour never receives. Perhaps all send first."
            )
            raise NotYet(f"on {world_size} ranks: {said}") from None


def _shift(shift: Callable[..., Any]) -> str:
    """What is wrong on this rank, if anything."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    wanted = _tensor((rank - 1) % world_size)
    x = _tensor(rank)
    time.sleep(0.1 if rank == 0 else 0)  # who does not wait for its neighbour is caught by it
    with TrafficCounter() as traffic:
        got = shift(x)
    if not isinstance(got, torch.Tensor):
        return f"returns {shown(got)}, not a tensor"
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return f"returns a tensor of shape {tuple(got.shape)} and {got.dtype}, unlike x"
    for other in range(world_size):
        if not torch.equal(got, wanted) and torch.equal(got, _tensor(other)):
            return f"returns the x of rank {other}, not that of rank {(rank - 1) % world_size}"
    if not torch.equal(got, wanted):
        return "returns values that no rank has sent"
    if not torch.equal(x, _tensor(rank)):
        return "returns the right tensor, but has changed its own x"
    if traffic.calls.keys() - {"barrier"} or traffic.control_messages:
        return "returns the right tensor, but by a collective: use send, isend and recv"
    return ""


def _tensor(rank: int) -> torch.Tensor:
    """What a rank sends: (2, 3), numbers that nobody can guess from its own."""
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
