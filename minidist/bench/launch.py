"""How long until ranks are ready: `md.ranks` against `torch.multiprocessing.spawn`. Lesson 1."""

import os.path
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import minidist as md
from minidist.bench import Row, draw, in_turns, show
from minidist.runtime import Pool
from minidist.runtime.cell import run_cell

WORLD_SIZE = 4


def run(rounds: int, picture: Path) -> None:
    """Time 4 ranks to their first all_reduce, and a call of ranks that are kept."""
    by_ranks()  # the forkserver is warm from here on, as in a notebook after its first cell
    taken = in_turns({"md.ranks": by_ranks, "spawn": by_spawn}, rounds)
    with md.ranks(WORLD_SIZE) as pool:
        _cell(pool)
        trips = [_cell(pool) for _ in range(20 * rounds)]
    rows = [
        Row(
            "4 warm ranks, first all_reduce",
            taken["md.ranks"],
            "spawn, gloo",
            tuple(taken["spawn"]),
        ),
        Row("a %%ranks cell, there and back", trips),
    ]
    title = "launch: 4 ranks"
    show(title, rows)
    draw(title, rows, picture)


def _first_all_reduce() -> float:
    dist.all_reduce(torch.ones(1))
    return time.monotonic()


def by_ranks() -> float:
    """Seconds from `md.ranks` to the end of the last rank's first all_reduce."""
    start = time.monotonic()
    with md.ranks(WORLD_SIZE) as pool:
        return max(pool(_first_all_reduce)) - start


def by_spawn() -> float:
    """The same with `torch.multiprocessing.spawn`, whose processes import torch anew."""
    ends = torch.zeros(WORLD_SIZE, dtype=torch.float64).share_memory_()
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        mp.spawn(_spawned, (os.path.join(folder, "rendezvous"), ends), nprocs=WORLD_SIZE)
    return ends.max().item() - start


def _spawned(rank: int, rendezvous: str, ends: torch.Tensor) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(rendezvous, WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    ends[rank] = _first_all_reduce()
    dist.destroy_process_group()


def _cell(pool: Pool) -> float:
    start = time.monotonic()
    pool(run_cell, "x = 1", "a cell")
    return time.monotonic() - start
