"""How long ranks take to start and leave: `md.launch` against `torch.multiprocessing.spawn`.

Lesson: rank.
"""

import os.path
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import minidist as md
from minidist.instruments.bench import Row, Target, in_turns

WORLD_SIZE = 4
FIRST, WHOLE = "4 warm ranks, first all_reduce", "a whole launch of 4 ranks"
SPAWN = "spawn, gloo"
TARGETS = [
    Target("4 warm ranks to their first all_reduce, against mp.spawn", {(FIRST, SPAWN): 25}),
    Target("a whole launch of 4 ranks, against mp.spawn", {(WHOLE, SPAWN): 20}),
]


def run(rounds: int) -> list[Row]:
    """Time 4 ranks to their first all_reduce and to their end."""
    launched()  # the forkserver is warm from here on, as in a notebook after its first cell
    whole: dict[str, float] = {}

    def first(name: str, start: Callable[[], tuple[float, float]]) -> float:
        seconds, whole[name] = start()
        return seconds

    times = in_turns(
        {
            "ours, first": lambda: first("ours", launched),
            "ours, whole": lambda: whole["ours"],  # of the launch that has just ended
            "theirs, first": lambda: first("theirs", spawned),
            "theirs, whole": lambda: whole["theirs"],
        },
        rounds,
    )
    return [
        times.row(FIRST, "ours, first", "theirs, first", SPAWN),
        times.row(WHOLE, "ours, whole", "theirs, whole", SPAWN),
    ]


def _first_all_reduce() -> float:
    dist.all_reduce(torch.ones(1))
    return time.monotonic()


def launched() -> tuple[float, float]:
    """Seconds from `md.launch` to the last rank's first all_reduce, and to its return."""
    start = time.monotonic()
    ends = md.launch(_first_all_reduce, world_size=WORLD_SIZE)
    return max(ends) - start, time.monotonic() - start


def spawned() -> tuple[float, float]:
    """The same with `torch.multiprocessing.spawn`, whose processes import torch anew."""
    ends = torch.zeros(WORLD_SIZE, dtype=torch.float64).share_memory_()
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        mp.spawn(_spawned, (os.path.join(folder, "rendezvous"), ends), nprocs=WORLD_SIZE)
        whole = time.monotonic() - start
    return ends.max().item() - start, whole


def _spawned(rank: int, rendezvous: str, ends: torch.Tensor) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(rendezvous, WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    ends[rank] = _first_all_reduce()
    dist.destroy_process_group()
