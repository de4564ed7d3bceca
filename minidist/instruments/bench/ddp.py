"""A step of DistributedDataParallel: ours, torch's, and none at all.

Lesson: distributed_data_parallel
"""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minidist as md
from minidist.instruments.bench import Row, Target, Times, in_turns, show
from minidist.machine.runtime import Pool

SIZES = 1024, 2048, 2048, 1024  # of the layers: 8,393,728 parameters
WORLD_SIZES = [2, 4]
BATCHES = [8, 64, 256]  # examples a rank
WARM = 3  # steps before the first that counts: buckets are made anew, memory is touched


def plain(module: nn.Module) -> nn.Module:
    """No communication."""
    return module


def torch_views(module: nn.Module) -> nn.Module:
    """torch's, with gradients that are views of its buckets, as ours always are."""
    return TorchDDP(module, gradient_as_bucket_view=True)


def ours_shared(module: nn.Module) -> nn.Module:
    """Ours, by shared memory."""
    return md.DistributedDataParallel(module, process_group=dist.new_group(backend="shm"))


def torch_shared(module: nn.Module) -> nn.Module:
    """torch's, by shared memory."""
    return TorchDDP(module, process_group=dist.new_group(backend="shm"))


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "minidist": md.DistributedDataParallel,
    "torch": TorchDDP,
    "torch, views": torch_views,
    "minidist, shm": ours_shared,
    "torch, shm": torch_shared,
    "no communication": plain,
}
PAIRS = [
    ("minidist", "torch"),
    ("minidist", "torch, views"),
    ("minidist", "no communication"),
    ("minidist, shm", "torch"),
    ("minidist, shm", "no communication"),
    ("torch, shm", "torch"),
]


TARGETS = [
    Target(
        "a DDP step on shm, batch 64, against torch's over gloo, and without communication",
        {
            ("2 ranks, batch 64: minidist, shm", "torch"): 1.6,
            ("2 ranks, batch 64: minidist, shm", "no communication"): 1 / 1.15,
        },
    )
]


def run(rounds: int, picture: Path) -> list[Row]:
    """Time forward and backward in turns, by world size and batch; over gloo, if not said."""
    rows, steps = [], {}
    for world_size in WORLD_SIZES:
        with md.ranks(world_size, backend="gloo") as pool:
            for batch in BATCHES:
                # A step is short beside the scheduler's slices: one says less than many.
                taken = measure(pool, batch, 5 * rounds)
                what = f"{world_size} ranks, batch {batch}"
                steps[what] = taken
                rows += [taken.row(f"{what}: {ours}", ours, theirs) for ours, theirs in PAIRS]
    title = "ddp: forward and backward, 8.4 million parameters"
    show(title, rows)
    for row in rows:
        ratio = median(row.seconds) / median(row.theirs)
        print(f"{row.what}: {ratio:.2f} × the median time of {row.against}")
    _draw(title, steps, picture)
    return rows


def _draw(title: str, steps: dict[str, Times], picture: Path) -> None:
    """A group of lines for each case: dots are medians, lines reach from fastest to slowest."""
    from minidist.instruments.plot import frame, palette

    shades = dict(zip(WRAPPERS, palette.RANKS, strict=False)) | {"no communication": palette.INK}
    with palette.style() as plt:
        figure, axes = plt.subplots(figsize=(8, 6), layout="constrained")
        for y, taken in enumerate(steps.values()):
            for place, (name, seconds) in enumerate(taken.items()):
                at = y + 0.13 * (place - (len(taken) - 1) / 2)
                ends, shade = [1e3 * min(seconds), 1e3 * max(seconds)], shades[name]
                axes.plot(ends, [at, at], color=shade, linewidth=1.5)
                label = name if y == 0 else None
                axes.plot(1e3 * median(seconds), at, "o", color=shade, markersize=5, label=label)
        axes.set_xscale("log")
        frame.ticks(axes.xaxis, lambda ms: f"{ms:g}")
        axes.set_yticks(range(len(steps)), list(steps))
        axes.invert_yaxis()
        axes.set_xlabel("time of a step (ms)")
        axes.set_title(title, loc="left", fontweight="bold")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02))
        figure.savefig(picture)
        plt.close(figure)


def measure(pool: Pool, batch: int, rounds: int) -> Times:
    """Seconds of each step, by wrapper, taken in turns; it lasts as long as its slowest rank."""
    return pool(_here, SIZES, batch, rounds, os.getpid())[0]


def _here(sizes: tuple[int, ...], batch: int, rounds: int, root: int) -> Times:
    models = {name: wrap(md.zoo.mlp(*sizes)) for name, wrap in WRAPPERS.items()}
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(batch, sizes[0], generator=generator)  # (B, D)

    def step(model: nn.Module) -> float:
        model.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        model(x).square().mean().backward()
        return time.perf_counter() - start

    subjects = {name: partial(step, model) for name, model in models.items()}
    return in_turns(subjects, rounds, WARM, root)
