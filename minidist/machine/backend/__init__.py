"""The backend "shm": `torch.distributed` for the ranks of one machine, by shared memory.

    dist.init_process_group("shm")          # also by md.ranks(4, backend="shm"), and under torchrun

What a call does, from Python to the other rank's memory: `dist.all_reduce(x)`, x of 1 MB, 4 ranks.

1. torch calls `ShmProcessGroup.allreduce` (process_group). That checks that x is a dense tensor of
   the CPU, and names the call: "all_reduce(float32(250000,), op=SUM)".
2. `_collective` makes an operation of it, which is a generator, and puts a `Task` of it into the
   queue of collectives (queues). torch gets the task, and calls its `wait`.
3. `Engine.wait` (engine): the thread that waits takes the steps. Of a call that nobody waits for,
   the engine's own thread takes them.
4. The first step begins `collectives.all_reduce`. `Members.call` (group) writes a checksum of the
   call's name. Then the three quarters of x that others add up are copied into this rank's staging
   area: a part of a segment (segment), which is memory that the other three have mapped, too.
5. `Members.agree` writes a word behind it: "I have come to barrier 17". Then the operation yields a
   `Wait`, until the words of all ranks say 17.
6. The thread asks again and again for 0.2 ms; then it sleeps until another rank rings (words).
7. All have come. If the checksums differ, every rank raises an error that shows all four calls.
8. Rank r reads the r-th quarter of the three other staging areas, adds it to its own (`Reduction`,
   in tensors), and leaves the total in x and in its area. One more barrier.
9. Each rank copies the three quarters that others have added up into x. The generator ends.
10. `Engine._complete` runs the callbacks, and the task's `wait` returns.

A tensor made by `empty` lies in a segment itself: step 4 copies nothing, and in step 8 a rank
writes its quarter into the tensors of all. `send` and `recv` go by slots instead (point_to_point).
If a rank dies, the others see after 0.1 s that its process is gone, in step 6.

To read in this order: segment, words, queues, engine, group, tensors, collectives, point_to_point,
process_group. `instruments/link` says how long a message takes on an emulated network.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from minidist.common.uncompiled import uncompiled

__all__ = ["empty", "purpose", "scratch"]


@uncompiled
def empty(
    *size: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
    short_lived: bool = False,
) -> torch.Tensor:
    """An uninitialized tensor: in the memory that the ranks of the group share, if they share any.

    The other ranks read such a tensor where it lies, in all_reduce, all_gather, reduce_scatter and
    broadcast: nothing is copied for them. With other backends it is an ordinary tensor. `group`:
    the default group if None. `short_lived`: see `scratch`. Lesson: communication.
    """
    members = getattr(dist.group.WORLD if group is None else group, "members", None)
    if members is None or torch.device(device).type != "cpu":
        return torch.empty(size, dtype=dtype, device=device)
    return members.arena.empty(math.prod(size), dtype, short_lived).view(size)


def scratch(*size: int, **options: Any) -> torch.Tensor:
    """Like `empty`, for a short-lived tensor: its memory is kept for the next one of this size, up
    to 64 MiB a group."""
    return empty(*size, **options, short_lived=True)


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


def _make(options: Any, _: Any) -> dist.ProcessGroup:
    # On first use: a program that never asks for "shm" does not wait for it.
    from minidist.machine.backend.process_group import ShmProcessGroup

    return ShmProcessGroup(options)


if "shm" not in dist.Backend.backend_list:
    dist.Backend.register_backend("shm", _make, extended_api=True, devices=["cpu"])
