"""A step of ZeRO, stages 1 and 2, with Adam: ours, and torch's stage 1.

Lesson: zero
"""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minidist as md
from minidist.instruments.bench import Row, draw, show
from minidist.instruments.bench.training import (
    BACKENDS,
    Wrapped,
    measure,
    on_each_backend,
    show_peaks,
    vectors,
)

SIZES = 1024, 2048, 2048, 1024  # of the layers: 8,393,728 parameters
WORLD_SIZES = [2, 4]
BATCHES = [8, 64]  # examples a rank


def ours_1(model: nn.Module, group: dist.ProcessGroup) -> Wrapped:
    """Gradients by DDP, on every rank; optimizer states are shared out."""
    wrapped = md.DistributedDataParallel(model, process_group=group)
    return wrapped, _ours(model, group)


def ours_2(model: nn.Module, group: dist.ProcessGroup) -> Wrapped:
    """Gradients are shared out as well."""
    optimizer = _ours(model, group)
    return md.ShardedDataParallel(model, optimizer), optimizer


def _ours(model: nn.Module, group: dist.ProcessGroup) -> md.ZeroRedundancyOptimizer:
    return md.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, group)


def torch_1(model: nn.Module, group: dist.ProcessGroup) -> Wrapped:
    """torch's, which knows stage 1."""
    with warnings.catch_warnings():  # its module still uses what torch has deprecated
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZeRO
    wrapped = TorchDDP(model, process_group=group, gradient_as_bucket_view=True)
    optimizer = TorchZeRO(model.parameters(), torch.optim.Adam, group)
    optimizer.state = optimizer.optim.state  # where it keeps them: for `show_peaks`
    return wrapped, optimizer


def no_zero(model: nn.Module, group: dist.ProcessGroup) -> Wrapped:
    """Everything on every rank."""
    wrapped = md.DistributedDataParallel(model, process_group=group)
    return wrapped, torch.optim.Adam(model.parameters())


STRATEGIES: dict[str, Callable[..., Wrapped]] = {
    "minidist, stage 1": ours_1,
    "minidist, stage 2": ours_2,
    "torch, stage 1": torch_1,
    "minidist, DDP": no_zero,
}


def run(rounds: int, picture: Path) -> list[Row]:
    """Time whole steps in turns, by batch, backend and world size; and count their memory."""
    rows, ways = [], on_each_backend(STRATEGIES, SIZES)
    for world_size in WORLD_SIZES:
        with md.ranks(world_size, backend="gloo") as pool:
            for batch in BATCHES:
                data = partial(vectors, batch, SIZES[0], SIZES[-1])
                taken = measure(pool, ways, rounds, data)
                for name in ("minidist, stage 1", "minidist, stage 2"):
                    for backend in BACKENDS:
                        what = f"{world_size} ranks, batch {batch}, {name[10:]}, {backend}"
                        for there in ("torch, stage 1, gloo", f"minidist, DDP, {backend}"):
                            rows.append(taken.row(what, f"{name}, {backend}", there))
            show_peaks(pool, ways, batch, data)
    title = "zero: a step with Adam, 8.4 million parameters"
    show(title, rows)
    draw(title, rows, picture)
    return rows
