"""The layer: a router, its experts, and how rows come to them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minidist.common.wrapper import copy_sharing, in_backward
from minidist.experts.balance import Inject, switch_loss
from minidist.experts.capacity import with_places
from minidist.experts.dispatch import Group, Plan, every_choice, once_to_each_rank
from minidist.experts.grouped import Experts
from minidist.experts.router import Router


class MoE(nn.Module):
    """A mixture of experts, in the place of an MLP: (..., C) to (..., C). Lesson: experts.

        y = sum over the k chosen experts e of  weight_e(x) FFN_e(x), and FFN_shared(x)

    width, hidden: C, and the features H of an expert's hidden layer.
    experts, k: how many there are, and how many a token takes.
    shared: so many times `hidden` features of a network that all tokens use.
    aux: the coefficient of the auxiliary loss (`switch_loss`), added in backward. On ranks its
        fractions are those of all ranks' tokens, by an all_reduce of E numbers.
    capacity: a factor. Each expert then has places for so many times its even share, and other
        choices are dropped. None: none is.
    once: a token travels once to each rank, and not once to each expert.
    sigmoid, normalize, nodes, of_nodes: those of `Router`.

    After a forward pass of this rank's tokens: `counts` (E,), rows for each expert; `plan`, rows to
    and from each rank; `dropped`, choices without a place.

    Raises ValueError for what the router refuses, and for `once` with a capacity.

    Limits: the auxiliary loss does not see what the loss is multiplied by: for m micro-batches set
    `layer.aux` to its m-th part, and for a scaled loss to so many times. Its gradient for m
    micro-batches is not that for their union; nor is it a mixture of the ranks' own, as `md.watch`
    expects. A rank that computes without gradients while others train makes them wait: until the
    timeout on gloo, an error on "shm".
    """

    plan: Plan | None = None
    dropped = 0

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        k: int,
        *,
        shared: int = 0,
        aux: float = 0.0,
        capacity: float | None = None,
        once: bool = False,
        **routing: Any,
    ) -> None:
        super().__init__()
        if once and capacity is not None:
            raise ValueError("with a capacity, a token travels to each expert, not once to a rank")
        self.router = Router(width, experts, k, **routing)
        self.experts = Experts(experts, width, hidden)
        self.shared = None
        if wide := shared * hidden:
            up, down = (nn.Linear(*sizes, bias=False) for sizes in ((width, wide), (wide, width)))
            self.shared = nn.Sequential(up, nn.GELU(), down)
        self.aux, self.capacity, self.once = aux, capacity, once
        self.counts = torch.zeros(experts, dtype=torch.long)
        self.group: Group = None  # whose ranks have the experts; None: this process has them all

    def extra_repr(self) -> str:
        names = "k", "sigmoid", "normalize", "nodes", "of_nodes", "aux", "capacity", "once"
        options = vars(self.router) | vars(self)
        sizes = f"{len(self.counts)} experts, {tuple(self.experts.up.shape[1:])}"
        return ", ".join([sizes, *(f"{name}={options[name]}" for name in names)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])  # (N, C)
        weights, chosen, scores = routing = self.router(rows)
        self.counts = routing.counts()
        if self.training and not in_backward():  # there a checkpoint computes it once more
            self.router.seen = self.router.seen.to(x.device) + self.counts
        given = rows, weights.to(rows.dtype), chosen, self.counts, self.experts, self.group
        if self.capacity is not None:
            y, self.dropped = with_places(*given, self.capacity)
        else:
            y, self.plan = (once_to_each_rank if self.once else every_choice)(*given)
        if self.shared is not None:
            y = y + self.shared(rows)
        if self.aux and torch.is_grad_enabled():
            y = Inject.apply(y, self.aux * switch_loss(scores, self._counts_of_all()))
        return y.view_as(x)

    def _counts_of_all(self) -> torch.Tensor:
        """The mean over the ranks of f P, with this f, is that of one process, and so is its
        gradient. With a rank's own f it is not."""
        counts = self.counts.clone()
        if self.router.batch_group is not None:
            dist.all_reduce(counts, group=self.router.batch_group)
        return counts

    def __deepcopy__(self, memo: dict[int, Any]) -> "MoE":
        return copy_sharing(self, memo, self.group, self.router.batch_group, self.experts.replicas)
