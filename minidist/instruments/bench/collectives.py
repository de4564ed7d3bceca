"""All_reduce by size, algorithm by algorithm; collectives of "shm" against gloo.

The algorithms are those of the lesson, over gloo.
Lesson: collectives
"""

import os
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import minidist as md
from minidist.instruments.bench import Row, Times, in_turns, shared, show
from minidist.instruments.bench.shared import TARGETS as TARGETS
from minidist.machine.runtime import Pool

WORLD_SIZE = 4
SIZES = [1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24]  # bytes of float32
ALGORITHMS = ["naive", "ring", "tree", "recursive_doubling", "halving_doubling"]

Samples = dict[str, list[tuple[int, float]]]  # algorithm -> (bytes, seconds)


def run(rounds: int, picture: Path) -> list[Row]:
    """Time each algorithm in turns at each size, on 4 ranks over gloo; then the backend "shm"."""
    with md.ranks(WORLD_SIZE, backend="gloo") as pool:
        # Messages are short and the scheduler's slices long: one round says less than in others.
        taken = by_size(pool, SIZES, ["gloo", *ALGORITHMS], 3 * rounds)
    rows = []
    for size, times in taken.items():
        rows += [times.row(f"{name}, {_human(size)}", name, "gloo") for name in ALGORITHMS]
        rows.append(times.row(f"ring, {_human(size)}", "ring", "naive"))
    show("collectives: all_reduce of float32, 4 ranks", rows)
    by_shared_memory = [row for p in (2, 4) for row in shared.rows(p, 2 * rounds)]
    by_shared_memory += [by_checking(world_size, rounds) for world_size in (2, 4)]
    show("collectives of float32 by shared memory", by_shared_memory)
    from matplotlib import pyplot as plt

    from minidist.instruments import plot

    figure = plot.time_against_size(samples(taken)).get_figure(root=True)
    assert figure is not None
    figure.savefig(picture)
    plt.close(figure)
    return rows + by_shared_memory


def measure(pool: Pool, sizes: list[int], names: list[str], rounds: int) -> Samples:
    """Time all_reduce by size on a pool's ranks: a call takes as long as its slowest rank.

    The names are those of algorithms, and that of the pool's backend for its own all_reduce.
    """
    return samples(by_size(pool, sizes, names, rounds))


def samples(taken: dict[int, Times]) -> Samples:
    """The same as a plot takes it."""
    names = next(iter(taken.values()))
    return {n: [(size, s) for size, times in taken.items() for s in times[n]] for n in names}


def by_size(pool: Pool, sizes: list[int], names: list[str], rounds: int) -> dict[int, Times]:
    """See `measure`."""
    return {size: pool(_here, size, names, rounds, os.getpid())[0] for size in sizes}


def _here(size: int, names: list[str], rounds: int, root: int) -> Times:
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


def by_checking(world_size: int, rounds: int) -> Row:
    """What it costs that "shm" compares the calls of all ranks, beside a whole small call."""
    with md.ranks(world_size, backend="gloo") as pool:
        whole, check = pool(_checking_here, 2 * rounds)[0]
    what = f"all_reduce, {world_size} ranks, 1 kB: its check"
    return Row(what, check, "all of it", tuple(whole))


def _checking_here(rounds: int) -> tuple[list[float], list[float]]:
    """Of an all_reduce of 1 kB: the seconds it takes, and those of them that its check takes."""
    from minidist.machine.backend.process_group import ShmProcessGroup, caller
    from minidist.machine.backend.tensors import describe

    group, x = dist.new_group(backend="shm"), torch.zeros(250)
    assert isinstance(group, ShmProcessGroup)
    whole, check = [], []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(20):
            dist.all_reduce(x, group=group)
        whole.append((time.perf_counter() - start) / 20)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(20):
            group.members.call(f"all_reduce({describe(x)}, op=SUM)", caller())
        seconds = time.perf_counter() - start
        dist.barrier()  # nobody reads what another still writes
        start = time.perf_counter()
        for _ in range(20):
            group.members.same()
        check.append((seconds + time.perf_counter() - start) / 20)
    dist.destroy_process_group(group)
    return whole, check


def _human(size: int) -> str:
    from minidist.instruments.plot import human_bytes

    if size % 1000 == 0:
        return human_bytes(size)
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
