"""The puzzles and the exercise of the lesson rank."""

import time
from collections.abc import Callable
from operator import index
from typing import Any

import torch
import torch.distributed as dist

from minidist.course.checks.verdict import (
    NotYet,
    check,
    function,
    hints,
    number,
    require_right,
    shown,
)
from minidist.instruments.measure import TrafficCounter


@check
@hints(
    "Draw the picture of the relay again, for two tokens: a row for each rank, and time to "
    "the right.",
    "Follow each token round the ring, and write down when it reaches each rank. A rank "
    "works on one token at a time: where does one of them have to wait?",
    "The token of rank 0 finds rank 2 at work. Add up what it goes through: two short "
    "works, the wait, the long work, the last short one.",
)
def two_tokens(answer: object) -> str:
    """Milliseconds until two tokens, from ranks 0 and 2, are back, if each rank works on each: rank
    2 for 50 ms, the other three for 20."""
    number(
        answer,
        120,
        "ms",
        {
            80: "that is a relay in which all four work for 20 ms",
            110: "the first token reaches rank 2 after 40 ms, which still works on its own then",
            220: "the two tokens are on their way at the same time",
            230: "the two tokens are on their way at the same time",
            240: "the two tokens are on their way at the same time",
            0.12: "give milliseconds",
        },
    )
    return "the first waits 10 ms at rank 2, and is back after 20 + 20 + 10 + 50 + 20."


@check
@hints(
    'What the local rank is stands under "What makes a process a rank": each node counts '
    "its own ranks from 0.",
    "Write the eight ranks into two rows, one for each node.",
    "Each column is a group: as many groups as a node has ranks, and in each one rank of "
    "either node.",
)
def twins(answer: Any) -> str:
    """The groups of the ranks with the same local rank, on 2 nodes of 4 ranks."""
    try:
        groups = sorted(sorted(index(rank) for rank in group) for group in answer)
    except Exception:
        raise NotYet(f"give a list of lists of ranks, not {shown(answer)}.") from None
    if sorted(rank for group in groups for rank in group) != list(range(8)):
        raise NotYet("each of the ranks 0 to 7 belongs to one group.")
    if groups == [[0, 1, 2, 3], [4, 5, 6, 7]]:
        raise NotYet("these are the ranks of one node. Wanted is one rank from each node.")
    if groups != [[rank, rank + 4] for rank in range(4)]:
        raise NotYet("the local rank is the rank minus 4 × the node rank.")
    return "rank 1 and rank 5 are both number 1 on their nodes."


@check
@hints(
    'Under "Does `send` wait?" you saw that on gloo it does. If all ranks send first, '
    "nobody is there to receive.",
    "Some ranks must receive first. Each rank can decide that alone, by whether its number "
    "is even or odd.",
    "Even ranks send and then receive, odd ranks the other way round. Receive into a tensor"
    " of its own, not into x. One rank alone has nobody to send to.",
)
def shift(answer: object) -> str:
    """x goes to the rank on the right, on a backend whose `send` waits for the receiver."""
    shift = function(answer)
    for world_size in range(1, 6):
        require_right(_shift, shift, world_size=world_size, where=" over gloo", backend="gloo")
    return "on 1, 2, 3, 4 and 5 ranks, over gloo, where `send` waits."


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
