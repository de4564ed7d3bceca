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

    Raises ValueError for a `norm_type` of 0 or less.
    """
    own = {p: local_of(p.grad).detach() for p in parameters if p.grad is not None}
    counted = [grad for p, grad in own.items() if p not in elsewhere and grad.numel()]
    # As float64 on every rank: one without gradients would have no other dtype to choose.
    total = get_total_norm(counted, norm_type).to(device, torch.float64)
    for group in groups:
        total = norm_over_ranks(total, norm_type, group)
    scale = (max_norm / (total + 1e-6)).clamp(max=1)  # as torch's clip_grads_with_norm_
    for where in {grad.device for grad in own.values()}:
        here = [grad for grad in own.values() if grad.device == where]
        torch._foreach_mul_(here, scale.to(where))
    return total


def norm_over_ranks(
    own: torch.Tensor, norm_type: float, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """The norm of all that the ranks of a group have, from that of what each has: a number, the
    same on every rank. One all_reduce of one number. Raises ValueError for a `norm_type` of 0 or
    less."""
    if norm_type <= 0:
        raise ValueError(f"norm_type must be more than 0, not {norm_type}")
    if norm_type == float("inf"):
        total = own.clone()
        dist.all_reduce(total, dist.ReduceOp.MAX, group)
        return total
    total = own**norm_type
    dist.all_reduce(total, group=group)
    return total ** (1 / norm_type)
