"""The norm of what lies on several ranks (lesson 5): the norm of the ranks' norms."""

import torch
import torch.distributed as dist


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
