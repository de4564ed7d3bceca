"""The backend "shm": `torch.distributed` for the ranks of one machine, by shared memory.

    dist.init_process_group("shm")          # also by md.ranks(4, backend="shm"), and under torchrun

To read, in this order:

file            what it holds
segment         memory that all ranks see
meeting         how they find it, and see that another rank has died
words           how one sees what another has done, and is woken for it
queues          calls that are under way, and one step of each
engine          who takes the steps
handle          what a call gives back, and the order of what callbacks call
members         the ranks of a group: barriers, and calls that are checked
tensors         mistakes, flat tensors, and what ReduceOp means
collectives     all_reduce and the others, on memory that all ranks share
point_to_point  send and recv
arena           tensors in shared memory
group           how calls become tasks
process_group   the calls of torch

The way of an all_reduce: `ShmProcessGroup.allreduce` checks the tensor, `Group._collective` makes a
`Task`, and `Engine.submit` puts it into a queue. The call takes its first steps; whoever waits for
it takes the others, or else the engine's own thread. In `collectives.all_reduce` the rank copies
the tensor to where all see it, says so by a word (`Members.barrier`), waits until all have, and
adds up. Then `Engine._complete` tells those who wait.

The room `minidist.instruments.link` says how long a message takes on an emulated network.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from minidist.common.uncompiled import uncompiled

if TYPE_CHECKING:
    from minidist.machine.backend.arena import Arena

__all__ = ["empty", "purpose", "scratch"]


@uncompiled
def empty(
    *size: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """An uninitialized tensor: in the memory that the ranks of the group share, if they share any.

    The other ranks read such a tensor where it lies, in all_reduce, all_gather, reduce_scatter and
    broadcast: nothing is copied for them. With other backends it is an ordinary tensor. `group`:
    the default group if None. Raises MemoryError if the machine has too little memory left.
    Lesson: communication.
    """
    arena = _arena(group, device)
    if arena is None:
        return torch.empty(size, dtype=dtype, device=device)
    return arena.empty(math.prod(size), dtype).view(size)


def scratch(
    *size: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Like `empty`, for a short-lived tensor: its memory is kept for the next one of this size, up
    to 64 MiB a group."""
    arena = _arena(group, device)
    if arena is None:
        return torch.empty(size, dtype=dtype, device=device)
    return arena.scratch(math.prod(size), dtype).view(size)


@contextmanager
def purpose(group: dist.ProcessGroup, what: str) -> Iterator[None]:
    """Say what the collectives are for that this group begins within the block. If ranks make one
    for different purposes, "shm" raises an error that names them. Other backends cannot tell."""
    named: Any = getattr(group, "purpose", None)
    if named is None:
        yield
        return
    before, named.what = named.what, what
    try:
        yield
    finally:
        named.what = before


def _arena(group: dist.ProcessGroup | None, device: torch.device | str) -> "Arena | None":
    from minidist.machine.backend.group import Group

    group = dist.group.WORLD if group is None else group
    shared = isinstance(group, Group) and torch.device(device).type == "cpu"
    return group.members.arena if shared else None  # type: ignore[union-attr]


def _make(options: Any, _: Any) -> dist.ProcessGroup:
    # On first use: a program that never asks for "shm" does not wait for it.
    from minidist.machine.backend.process_group import ShmProcessGroup

    return ShmProcessGroup(options)


if "shm" not in dist.Backend.backend_list:
    dist.Backend.register_backend("shm", _make, extended_api=True, devices=["cpu"])
