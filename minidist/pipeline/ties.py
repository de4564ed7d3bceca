"""Parameters that stages on several ranks share (lesson 5), as a first layer and a last one do.

Each rank that uses such a parameter has a copy, and finds a part of its gradient. The sum of these
parts is the gradient of them all, so that copies that were equal stay equal.
"""

from collections.abc import Sequence
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
    """The parameters to train that layers on different ranks share, in the order of the model."""
    ranks: dict[nn.Parameter, set[int]] = {}
    for layer, rank in zip(layers, rank_of_layer, strict=True):
        for parameter in layer.parameters():
            ranks.setdefault(parameter, set()).add(rank)
    return [Tie(p, sorted(own)) for p, own in ranks.items() if len(own) > 1 and p.requires_grad]


def sum_gradients(ties: Sequence[Tie], group: dist.ProcessGroup) -> None:
    """Replace the gradients of this rank's ties by their sums over the ranks that share them.

    Each sends its part to all others (mostly there is one) and adds up in the order of the ranks,
    so that all have the same bits.
    """
    rank = dist.get_rank(group)
    for tie in ties:
        found = tie.parameter.grad
        mine = torch.zeros_like(tie.parameter) if found is None else found.contiguous()
        parts = {other: mine if other == rank else torch.empty_like(mine) for other in tie.ranks}
        works = []
        for other in tie.ranks:
            if other != rank:
                sent, came = (as_bytes(x.view(-1)) for x in (mine, parts[other]))
                works += [
                    dist.isend(sent, group=group, group_dst=other, tag=TAG),
                    dist.irecv(came, group=group, group_src=other, tag=TAG),
                ]
        for work in works:
            assert work is not None
            work.wait()
        tie.parameter.grad = torch.stack([parts[other] for other in tie.ranks]).sum(0)
