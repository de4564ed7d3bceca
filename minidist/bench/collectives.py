"""Collectives by message size: the algorithms of Lesson 2 and the backend "shm", against gloo;
"shm" against MPICH too, where it is installed. Lesson 2."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import minidist as md
from minidist.bench import Row, mpich, show
from minidist.runtime import Pool

WORLD_SIZE = 4
SIZES = [1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24]  # bytes of float32
ALGORITHMS = ["naive", "ring", "tree", "recursive_doubling", "halving_doubling"]

SHARED = {  # collective: bytes of the whole vector, a multiple of 16
    "all_reduce": [1000, 10**6, 16 * 10**6, 100 * 10**6],
    "all_gather": [16 * 10**6],
    "reduce_scatter": [16 * 10**6],
    "broadcast": [16 * 10**6],
}

Samples = dict[str, list[tuple[int, float]]]  # algorithm -> (bytes, seconds)


def run(rounds: int, picture: Path) -> None:
    """Time each algorithm in turns at each size, on 4 ranks over gloo."""
    lacking = mpich.missing()
    if lacking:
        print(f"MPICH is left out: {lacking}")
    with md.ranks(WORLD_SIZE, backend="gloo") as pool:
        # Messages are short and the scheduler's slices long: one round says less than in others.
        samples = measure(pool, SIZES, ["gloo", *ALGORITHMS], 3 * rounds)
    rows = []
    for size in SIZES:
        seconds = {name: [s for n, s in taken if n == size] for name, taken in samples.items()}
        for name in ALGORITHMS:
            what = f"{name}, {_human(size)}"
            rows.append(Row(what, seconds[name], "gloo", tuple(seconds["gloo"])))
        what = f"ring, {_human(size)}"
        rows.append(Row(what, seconds["ring"], "naive", tuple(seconds["naive"])))
    show("collectives: all_reduce of float32, 4 ranks", rows)
    shared = [row for p in (2, 4) for row in by_shared_memory(p, rounds, with_mpich=not lacking)]
    shared += [by_checking(world_size, rounds) for world_size in (2, 4)]
    show("collectives of float32 by shared memory", shared)
    from matplotlib import pyplot as plt

    from minidist import plot

    figure = plot.time_against_size(samples).get_figure(root=True)
    assert figure is not None
    figure.savefig(picture)
    plt.close(figure)


def measure(pool: Pool, sizes: list[int], names: list[str], rounds: int) -> Samples:
    """Time all_reduce by size on a pool's ranks: a call takes as long as its slowest rank.

    The names are those of algorithms, and that of the pool's backend for its own all_reduce.
    """
    by_rank = pool(_measure_here, sizes, names, rounds)
    return {
        name: [
            (samples[0][0], max(seconds for _, seconds in samples))
            for samples in zip(*(taken[name] for taken in by_rank), strict=True)
        ]
        for name in names
    }


def _measure_here(sizes: list[int], names: list[str], rounds: int) -> Samples:
    samples: Samples = {name: [] for name in names}
    for size in sizes:
        tensor = torch.ones(size // 4)
        for turn in range(rounds + 1):
            for name in names:
                tensor.fill_(1)
                dist.barrier()
                start = time.perf_counter()
                if name == dist.get_backend():
                    dist.all_reduce(tensor)
                else:
                    md.collectives.all_reduce(tensor, algorithm=name)
                if turn > 0:  # the first one touches memory that is new
                    samples[name].append((size, time.perf_counter() - start))
    return samples


def by_shared_memory(world_size: int, rounds: int, with_mpich: bool = False) -> list[Row]:
    """The backend "shm" against gloo on the same ranks, in turns.

    MPICH has ranks of its own: all its rounds of a case follow those of the others, which sleep.
    """
    rows = []
    with md.ranks(world_size, backend="gloo") as pool:
        for name, sizes in SHARED.items():
            for size in sizes:
                taken = [
                    [max(times) for times in zip(*each, strict=True)]
                    for each in zip(*pool(_shared_here, name, size, 2 * rounds), strict=True)
                ]
                gloo, *ours = taken
                case, others = f"{name}, {world_size} ranks, {_human(size)}", {"gloo": gloo}
                if with_mpich:
                    try:
                        others["MPICH"] = mpich.seconds(name, world_size, size, 2 * rounds)
                    except RuntimeError as error:
                        print(f"MPICH is left out from {case} on: {error}")
                        with_mpich = False
                for how, seconds in zip(["shm", "shm, in its arena"], ours, strict=False):
                    for other, theirs in others.items():
                        rows.append(Row(f"{case}: {how}", seconds, other, tuple(theirs)))
    return rows


def _shared_here(name: str, size: int, rounds: int) -> list[list[float]]:
    group, n, p = dist.new_group(backend="shm"), size // 4, dist.get_world_size()
    whole, part = torch.zeros(n), torch.zeros(n // p)
    calls: dict[str, Callable[[torch.Tensor, dist.ProcessGroup | None], object]] = {
        "all_reduce": lambda x, where: dist.all_reduce(x, group=where),
        "broadcast": lambda x, where: dist.broadcast(x, 0, group=where),
        "all_gather": lambda x, where: dist.all_gather(list(x.chunk(p)), part, group=where),
        "reduce_scatter": lambda x, where: dist.reduce_scatter(part, list(x.chunk(p)), group=where),
    }
    subjects = [(whole, None), (whole, group)]
    if name == "all_reduce":
        subjects.append((md.backend.empty(n, group=group).zero_(), group))
    taken: list[list[float]] = [[] for _ in subjects]
    for turn in range(rounds + 1):
        for times, (x, where) in zip(taken, subjects, strict=True):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(mpich.in_a_row(size)):
                calls[name](x, where)
            if turn > 0:
                times.append((time.perf_counter() - start) / mpich.in_a_row(size))
    dist.destroy_process_group(group)
    return taken


def by_checking(world_size: int, rounds: int) -> Row:
    """What it costs that "shm" compares the calls of all ranks, beside a whole small call."""
    with md.ranks(world_size, backend="gloo") as pool:
        whole, check = pool(_checking_here, 2 * rounds)[0]
    what = f"all_reduce, {world_size} ranks, 1 kB: its check"
    return Row(what, check, "all of it", tuple(whole))


def _checking_here(rounds: int) -> tuple[list[float], list[float]]:
    """Of an all_reduce of 1 kB: the seconds it takes, and those of them that its check takes."""
    from minidist.backend.checks import tell
    from minidist.backend.group import Group, caller

    group, x = dist.new_group(backend="shm"), torch.zeros(250)
    assert isinstance(group, Group)
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
            group.members.call(f"all_reduce({tell(x)}, op=SUM)", caller(), 0, 0)
        seconds = time.perf_counter() - start
        dist.barrier()  # nobody reads what another still writes
        start = time.perf_counter()
        for _ in range(20):
            group.members.compare()
        check.append((seconds + time.perf_counter() - start) / 20)
    dist.destroy_process_group(group)
    return whole, check


def _human(size: int) -> str:
    from minidist.plot import human_bytes

    if size % 1000 == 0:
        return human_bytes(size)
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
