"""Parameters that stages on several ranks share, as a first layer and a last one do.

Each rank that uses such a parameter has a copy, and finds a part of its gradient. The sum of these
parts is the gradient of them all, so that copies that were equal stay equal.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from minidist.collectives.peers import TAG, as_bytes


@dataclass(frozen=True)
class Tie:
    """A parameter, and the ranks (within the group) that have it."""

    parameter: nn.Parameter
    ranks: list[int]


def find_ties(layers: Sequence[nn.Module], rank_of_layer: Sequence[int]) -> list[Tie]:
    """The parameters that layers on different ranks share, in the order of the model."""
    ranks: dict[nn.Parameter, set[int]] = {}
    for layer, rank in zip(layers, rank_of_layer, strict=True):
        for parameter in layer.parameters():
            ranks.setdefault(parameter, set()).add(rank)
    return [Tie(p, sorted(own)) for p, own in ranks.items() if len(own) > 1]


@contextmanager
def set_aside(ties: Sequence[Tie]) -> Iterator[None]:
    """Within the block, which calls `add_up` at its end, the gradients of this rank's ties are what
    the block has found alone: what was there has been summed already, and is added after it."""
    before = [tie.parameter.grad for tie in ties]
    for tie in ties:
        tie.parameter.grad = None
    try:
        yield
    finally:
        for tie, gradient in zip(ties, before, strict=True):
            if gradient is not None:
                found = tie.parameter.grad
                tie.parameter.grad = gradient if found is None else gradient + found


def some_unused(ties: Sequence[Tie]) -> bool:
    """Whether one has no gradient on this rank."""
    return any(tie.parameter.grad is None for tie in ties)


def add_up(ties: Sequence[Tie], group: dist.ProcessGroup, some_unused: bool) -> None:
    """Make the gradient of each of this rank's ties the sum over the ranks that share it. Without
    gradient on all of these, it stays None. `some_unused`: on a rank of the group at least, some
    tie has none."""
    for tie in ties:
        tie.parameter.grad = _sum(tie, group, some_unused)


def _sum(tie: Tie, group: dist.ProcessGroup, some_unused: bool) -> torch.Tensor | None:
    """Each rank sends its part to all others (mostly there is one) and adds up in the order of the
    ranks, so that all have the same bits. Of two ranks, the first sends first: where they have one
    queue, as with NCCL, two sends would wait for each other."""
    rank, parameter = dist.get_rank(group), tie.parameter
    own = parameter.grad
    mine = parameter.new_zeros(parameter.numel()) if own is None else own.reshape(-1)
    if some_unused:  # with the part goes whether it is one
        mine = torch.cat([mine, mine.new_tensor([own is not None])])
    parts = {other: mine if other == rank else torch.empty_like(mine) for other in tie.ranks}
    works = []
    for other in tie.ranks:
        if other == rank:
            continue
        sent, came = (as_bytes(x) for x in (mine, parts[other]))
        for sends in (rank < other, rank > other):
            if sends:
                works.append(dist.isend(sent, group=group, group_dst=other, tag=TAG))
            else:
                works.append(dist.irecv(came, group=group, group_src=other, tag=TAG))
    for work in works:
        assert work is not None
        work.wait()
    total = torch.stack([parts[other] for other in tie.ranks]).sum(0)
    if some_unused and not total[-1]:
        return None
    return total[: parameter.numel()].view(parameter.shape)
