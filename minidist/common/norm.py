"""The norm of what lies on several ranks: the norm of the ranks' norms."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


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


def clip_over_ranks(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float,
    group: dist.ProcessGroup,
    device: torch.device,
) -> torch.Tensor:
    """Scale the gradients of all ranks' `parameters` so that their norm is at most `max_norm`.
    Returns what it was, a number on `device`. All ranks must call it."""
    own = list(parameters)
    gradients = [p.grad for p in own if p.grad is not None]
    # As float64 on every rank: one without gradients would have no other dtype to choose.
    norm = get_total_norm(gradients, norm_type).to(device, torch.float64)
    total = norm_over_ranks(norm, norm_type, group)
    clip_grads_with_norm_(own, max_norm, total)
    return total
