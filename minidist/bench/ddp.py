"""A step of DistributedDataParallel: ours, torch's, and none at all. Lesson 4."""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minidist as md
from minidist.bench import Row, draw, show
from minidist.runtime import Pool

SIZES = 1024, 2048, 2048, 1024  # of the layers: 8,393,728 parameters
WORLD_SIZES = [2, 4]
BATCHES = [8, 64, 256]  # examples a rank
WARM = 3  # steps before the first that counts: buckets are made anew, memory is touched

Wrappers = dict[str, Callable[[nn.Module], nn.Module]]


def plain(module: nn.Module) -> nn.Module:
    """No communication."""
    return module


def torch_views(module: nn.Module) -> nn.Module:
    """torch's, with gradients that are views of its buckets, as ours always are."""
    return TorchDDP(module, gradient_as_bucket_view=True)


WRAPPERS: Wrappers = {
    "minidist": md.DistributedDataParallel,
    "torch": TorchDDP,
    "torch, views": torch_views,
    "no communication": plain,
}


def run(rounds: int, picture: Path) -> None:
    """Time forward and backward in turns, by world size and batch, over gloo."""
    rows = []
    for world_size in WORLD_SIZES:
        with md.ranks(world_size) as pool:
            for batch in BATCHES:
                # A step is short beside the scheduler's slices: one says less than many.
                taken = measure(pool, WRAPPERS, batch, 5 * rounds)
                what = f"{world_size} ranks, batch {batch}"
                ours = taken.pop("minidist")
                rows += [Row(what, ours, other, tuple(times)) for other, times in taken.items()]
    title = "ddp: forward and backward, 8.4 million parameters, over gloo"
    show(title, rows)
    for row in rows:
        ratio = median(row.seconds) / median(row.theirs)
        print(f"{row.what}: {ratio:.2f} × the median time of {row.against}")
    draw(title, rows, picture)


def measure(
    pool: Pool,
    wrappers: Wrappers,
    batch: int,
    rounds: int,
    sizes: tuple[int, ...] = SIZES,
) -> dict[str, list[float]]:
    """Seconds of each step, by wrapper, taken in turns; it lasts as long as its slowest rank."""
    by_rank = pool(_measure_here, wrappers, batch, rounds, sizes)
    return {
        name: [max(times) for times in zip(*(taken[name] for taken in by_rank), strict=True)]
        for name in wrappers
    }


def _measure_here(
    wrappers: Wrappers, batch: int, rounds: int, sizes: tuple[int, ...]
) -> dict[str, list[float]]:
    models = {name: wrap(md.zoo.mlp(*sizes)) for name, wrap in wrappers.items()}
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(batch, sizes[0], generator=generator)  # (B, D)
    taken: dict[str, list[float]] = {name: [] for name in wrappers}
    for turn in range(WARM + rounds):
        for name, model in models.items():
            model.zero_grad()
            dist.barrier()
            start = time.perf_counter()
            model(x).square().mean().backward()
            if turn >= WARM:
                taken[name].append(time.perf_counter() - start)
    return taken
