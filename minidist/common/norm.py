"""The norm of gradients that lie on several ranks: the norm of the ranks' norms."""

from collections.abc import Iterable, Set

import torch
import torch.distributed as dist
from torch.nn.utils import get_total_norm

from minidist.common.tensors_in import local_of


def clip_grad_norm_(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    groups: Iterable[dist.ProcessGroup | None],
    device: torch.device,
    elsewhere: Set[torch.Tensor] = frozenset(),
) -> torch.Tensor:
    """Scale the gradients of all ranks' `parameters` so that their norm is at most `max_norm`, and
    return what it was: the same number on every rank.

    parameters: this rank's: its shards, its layers, or both.
    groups: the ranks that have the others, along each axis of a mesh. One all_reduce of one number
        for each group, which all of its ranks must call.
    device: where that number is.
    elsewhere: those of `parameters` that another rank counts. Here they are only scaled.
    """
    own = {p: local_of(p.grad).detach() for p in parameters if p.grad is not None}
    counted = [grad for p, grad in own.items() if p not in elsewhere and grad.numel()]
    # As float64 on every rank: one without gradients would have no other dtype to choose.
    total = get_total_norm(counted, norm_type).to(device, torch.float64)
    largest = norm_type == float("inf")
    power, op = (1, dist.ReduceOp.MAX) if largest else (norm_type, dist.ReduceOp.SUM)
    total **= power
    for group in groups:
        dist.all_reduce(total, op, group)
    total **= 1 / power
    scale = (max_norm / (total + 1e-6)).clamp(max=1)  # as torch's clip_grads_with_norm_
    for where in {grad.device for grad in own.values()}:
        here = [grad for grad in own.values() if grad.device == where]
        torch._foreach_mul_(here, scale.to(where))
    return total
