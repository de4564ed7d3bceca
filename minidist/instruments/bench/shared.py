"""Collectives and messages by the backend "shm" against gloo.

Each case is timed twice: gloo and shm *in turns* on the same ranks, where shm pays for what gloo's
traffic has left in the caches; and each *alone*, in blocks, as in a program that has one backend.
Lesson: collectives
"""

import os
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

import minidist as md
from minidist.instruments.bench import Row, Target, Times, alone, in_turns
from minidist.instruments.plot import human_bytes
from minidist.machine.runtime import Pool

MB = 10**6
CASES = {  # collective: bytes of the whole vector, multiples of 16
    "send/recv": [1000],
    "barrier": [0],
    "all_reduce": [1000, MB, 16 * MB, 100 * MB],
    "all_gather": [16 * MB],
    "reduce_scatter": [16 * MB],
    "broadcast": [16 * MB],
}
GLOO, SHM, ARENA = "gloo", "shm", "shm in its arena"
SMALL = "send/recv", "barrier"  # no tensor of theirs need lie in an arena


def case(name: str, world_size: int, size: int) -> str:
    """What a row says, but for the backend and how it was timed."""
    return f"{name}, {world_size} ranks" + (f", {human_bytes(size)}" if size else "")


def _reach(how: str, reach: dict[Any, float]) -> dict[tuple[str, str], float]:
    """`reach`, of a collective and a size, as a target of 2 ranks has it."""
    return {
        (f"{case(name, 2, size)}: {how}, alone", GLOO): times
        for (name, size), times in reach.items()
    }


_SIZES = [("all_reduce", size) for size in (MB, 16 * MB, 100 * MB)]
_OTHERS = [(name, 16 * MB) for name in ("all_gather", "reduce_scatter", "broadcast")]
TARGETS = [
    Target(
        "all_reduce of 1, 16, 100 MB in the arena, against gloo",
        _reach(ARENA, dict(zip(_SIZES, (7, 11, 7), strict=True))),
    ),
    Target(
        "all_reduce, all_gather, reduce_scatter, broadcast of 16 MB, against gloo",
        _reach(SHM, dict.fromkeys([("all_reduce", 16 * MB), *_OTHERS], 4)),
    ),
    Target(
        "all_gather, reduce_scatter, broadcast of 16 MB in the arena, against gloo",
        _reach(ARENA, dict.fromkeys(_OTHERS, 8)),
    ),
    Target(
        "1 kB by send/recv, all_reduce; barrier; against gloo",
        _reach(SHM, {("send/recv", 1000): 1.5, ("all_reduce", 1000): 10, ("barrier", 0): 10}),
    ),
]


def rows(world_size: int, rounds: int) -> list[Row]:
    """Every case on so many ranks: what was timed in turns, and what was timed alone."""
    found = []
    with md.ranks(world_size, backend="gloo") as pool:
        for name, size in ((name, size) for name, sizes in CASES.items() for size in sizes):
            if name == "send/recv" and world_size > 2:
                continue
            what, hows = case(name, world_size, size), [SHM] if name in SMALL else [SHM, ARENA]
            taken = on(pool, name, size, [GLOO, *hows], rounds)
            found += [taken.row(f"{what}: {how}, in turns", how, GLOO) for how in hows]
            programs = {how: partial(on, pool, name, size, [how]) for how in [GLOO, *hows]}
            taken = alone(programs, rounds)
            found += [taken.row(f"{what}: {how}, alone", how, GLOO) for how in hows]
    return found


def on(pool: Pool, name: str, size: int, hows: list[str], rounds: int) -> Times:
    """Seconds of a collective on a pool's ranks, in turns."""
    return pool(_here, name, size, rounds, hows, os.getpid())[0]


def _here(name: str, size: int, rounds: int, hows: list[str], root: int) -> Times:
    group = dist.new_group(backend="shm")
    subjects = {how: _subject(name, size, how, None if how == GLOO else group) for how in hows}
    times = in_turns(subjects, rounds, 1, root)
    dist.destroy_process_group(group)
    return times


def _subject(
    name: str, size: int, how: str, group: dist.ProcessGroup | None
) -> Callable[[], float]:
    """A function that makes the call some times and returns the seconds of one."""
    n, p, rank = size // 4, dist.get_world_size(), dist.get_rank()
    empty = partial(md.backend.empty, group=group) if how == ARENA else torch.empty
    whole, part = empty(n).zero_(), empty(n // p).zero_()

    def there_and_back() -> None:
        for sender in (0, 1):
            (dist.send if rank == sender else dist.recv)(whole, 1 - rank, group=group)

    def all_gather() -> None:
        if how == ARENA:
            dist.all_gather_single(whole, part, group=group)
        else:
            dist.all_gather(list(whole.chunk(p)), part, group=group)

    def reduce_scatter() -> None:
        if how == ARENA:
            dist.reduce_scatter_single(part, whole, group=group)
        else:
            dist.reduce_scatter(part, list(whole.chunk(p)), group=group)

    call: Callable[[], object] = {
        "send/recv": there_and_back,
        "barrier": lambda: dist.barrier(group),
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
    }[name]
    # A short call alone would say more of when the ranks leave the barrier before it.
    times = max(1, min(20, 4 * MB // max(size, 1)))
    messages = times * (2 if name == "send/recv" else 1)

    def subject() -> float:
        dist.barrier(group)
        start = perf_counter()
        for _ in range(times):
            call()
        return (perf_counter() - start) / messages

    return subject
