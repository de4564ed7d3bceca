"""Collectives and messages by the backend "shm" against gloo.

Each is timed *alone*, in blocks, as in a program that has one backend: in turns shm would pay for
what gloo's traffic has left in the caches.
Lesson: collectives
"""

import os
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

import minidist as md
from minidist.instruments.bench.rows import Row, Target
from minidist.instruments.bench.turns import Times, alone, in_turns
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
WORLD_SIZES = [2, 4]
GLOO, SHM, ARENA = "gloo", "shm", "shm in its arena"
SMALL = "send/recv", "barrier"  # no tensor of theirs need lie in an arena


def case(name: str, world_size: int, size: int, how: str) -> str:
    """What a row says."""
    return f"{name}, {world_size} ranks" + (f", {human_bytes(size)}" if size else "") + f": {how}"


def _target(said: str, how: str, reach: dict[tuple[str, int], float]) -> Target:
    """Of 2 ranks, by collective and size."""
    cases = {(case(name, 2, size, how), GLOO): times for (name, size), times in reach.items()}
    return Target(f"{said}, against gloo", cases)


_OTHERS = [(name, 16 * MB) for name in ("all_gather", "reduce_scatter", "broadcast")]
TARGETS = [
    _target(
        "all_reduce of 1, 16, 100 MB in the arena",
        ARENA,
        {("all_reduce", MB): 7, ("all_reduce", 16 * MB): 11, ("all_reduce", 100 * MB): 7},
    ),
    _target(
        "all_reduce, all_gather, reduce_scatter, broadcast of 16 MB",
        SHM,
        dict.fromkeys([("all_reduce", 16 * MB), *_OTHERS], 4),
    ),
    _target(
        "all_gather, reduce_scatter, broadcast of 16 MB in the arena",
        ARENA,
        dict.fromkeys(_OTHERS, 8),
    ),
    _target(
        "1 kB by send/recv, all_reduce; barrier",
        SHM,
        {("send/recv", 1000): 1.5, ("all_reduce", 1000): 10, ("barrier", 0): 10},
    ),
]


def run(rounds: int) -> list[Row]:
    """Every case on 2 and on 4 ranks."""
    rows = []
    for world_size in WORLD_SIZES:
        with md.ranks(world_size, backend="gloo") as pool:
            for name, size in ((name, size) for name, sizes in CASES.items() for size in sizes):
                hows = [SHM] if name in SMALL else [SHM, ARENA]
                programs = {how: partial(on, pool, name, size, how) for how in [GLOO, *hows]}
                taken = alone(programs, 2 * rounds)
                rows += [taken.row(case(name, world_size, size, how), how, GLOO) for how in hows]
    return rows


def on(pool: Pool, name: str, size: int, how: str, rounds: int) -> Times:
    """Seconds of a collective on a pool's ranks."""
    return pool(_collective_here, name, size, how, rounds, os.getpid())[0]


def _collective_here(name: str, size: int, how: str, rounds: int, root: int) -> Times:
    group = None if how == GLOO else dist.new_group(backend="shm")
    times = in_turns({how: _subject(name, size, how, group)}, rounds, 1, root)
    if group is not None:
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
        if rank < 2:
            for sender in (0, 1):
                (dist.send if rank == sender else dist.recv)(whole, 1 - rank, group=group)

    def all_gather() -> None:
        if how == ARENA:
            dist.all_gather_single(whole, part, group=group)
        else:  # lists are what gloo is faster with
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
        start = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - start) / messages

    return subject


# ---- the algorithms of the lesson ---------------------------------------------------------------


def measure(
    pool: Pool, sizes: list[int], names: list[str], rounds: int
) -> dict[str, list[tuple[int, float]]]:
    """Time all_reduce by size on a pool's ranks, in turns: {algorithm: [(bytes, seconds), …]}.

    The names are those of algorithms, and that of the pool's backend for its own all_reduce.
    Lesson: communication.
    """
    samples: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
    for size in sizes:
        taken = pool(_algorithms_here, size, names, rounds, os.getpid())[0]
        for name in names:
            samples[name] += [(size, seconds) for seconds in taken[name]]
    return samples


def _algorithms_here(size: int, names: list[str], rounds: int, root: int) -> Times:
    tensor = torch.ones(size // 4)

    def seconds(name: str) -> float:
        tensor.fill_(1)
        dist.barrier()
        start = time.perf_counter()
        if name == dist.get_backend():
            dist.all_reduce(tensor)
        else:
            md.collectives.all_reduce(tensor, algorithm=name)
        return time.perf_counter() - start

    subjects = {name: partial(seconds, name) for name in names}
    return in_turns(subjects, rounds, 1, root)  # the first one touches memory that is new
