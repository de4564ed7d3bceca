"""all_reduce by message size: the algorithms of Lesson 2 against gloo's own. Lesson 2."""

import time
from pathlib import Path

import torch
import torch.distributed as dist

import minidist as md
from minidist.bench import Row, show
from minidist.runtime import Pool

WORLD_SIZE = 4
SIZES = [1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24]  # bytes of float32
ALGORITHMS = ["naive", "ring", "tree", "recursive_doubling", "halving_doubling"]

Samples = dict[str, list[tuple[int, float]]]  # algorithm -> (bytes, seconds)


def run(rounds: int, picture: Path) -> None:
    """Time each algorithm in turns at each size, on 4 ranks over gloo."""
    with md.ranks(WORLD_SIZE) as pool:
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
    from minidist import plot

    figure = plot.time_against_size(samples).get_figure(root=True)
    assert figure is not None
    figure.savefig(picture)


def measure(pool: Pool, sizes: list[int], names: list[str], rounds: int) -> Samples:
    """Time all_reduce by size on a pool's ranks: a call takes as long as its slowest rank."""
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
                if name == "gloo":
                    dist.all_reduce(tensor)
                else:
                    md.collectives.all_reduce(tensor, algorithm=name)
                if turn > 0:  # the first one touches memory that is new
                    samples[name].append((size, time.perf_counter() - start))
    return samples


def _human(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
