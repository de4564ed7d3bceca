"""The backend "shm" (lesson 2): `torch.distributed` for the ranks of one machine, by shared memory.

    dist.init_process_group("shm")          # also by md.ranks(4, backend="shm"), and under torchrun

To read, in this order: `segment` (memory that all ranks see), `handle` (what a call gives back),
`engine` (one thread that communicates), `members` (barriers, and calls that are checked),
`operations` (the collectives), `messages` (send and recv), `link` (an emulated network), `arena`
(tensors in shared memory), `checks` (mistakes), `group` and `process_group` (what torch calls).
"""

import math
from typing import Any

import torch
import torch.distributed as dist

from minidist.backend.link import Link

__all__ = ["Link", "empty"]


def empty(
    *size: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """An uninitialized tensor, in the memory that the ranks of the group share, if they do.

    An all_reduce of such a tensor, on all ranks, is done in place and copies nothing. With other
    backends it is an ordinary tensor. `group`: the default group if None. Raises MemoryError if the
    machine has not so much memory. Lesson 2.
    """
    from minidist.backend.group import Group

    group = dist.group.WORLD if group is None else group
    if isinstance(group, Group) and torch.device(device).type == "cpu":
        return group.empty(math.prod(size), dtype).view(size)
    return torch.empty(size, dtype=dtype, device=device)


def _make(options: Any, _: Any) -> dist.ProcessGroup:
    # On first use: a program that never asks for "shm" does not wait for it.
    from minidist.backend.process_group import ShmProcessGroup

    return ShmProcessGroup(options)


if "shm" not in dist.Backend.backend_list:
    dist.Backend.register_backend("shm", _make, extended_api=True, devices=["cpu"])
