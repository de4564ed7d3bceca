"""A step of fully sharded training, with Adam: ours, and both of torch's forms.

Lesson: fully_sharded
"""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import minidist as md
from minidist.instruments.bench import Row, Target, draw, show
from minidist.instruments.bench.training import (
    BACKENDS,
    Wrapped,
    measure,
    on_each_backend,
    show_peaks,
    vectors,
)

SIZES = (1024,) * 9  # of the layers: eight units, 8,396,800 parameters
WORLD_SIZES = [2, 4]
BATCHES = [8, 64]  # examples a rank


def ours(model: nn.Module, group: dist.ProcessGroup) -> Wrapped:
    """`md.fully_shard`, a unit for each layer. The wrapper makes the same."""
    return _in_place(md.fully_shard, model, group)


def torch_1(model: nn.Module, group: dist.ProcessGroup) -> Wrapped:
    """torch's wrapper, whose successor is `fully_shard`."""
    with warnings.catch_warnings():  # it tells how to get other state_dicts
        warnings.simplefilter("ignore")
        device = torch.device("cpu")
        policy = ModuleWrapPolicy({nn.Linear})
        return _with_adam(TorchFSDP(model, group, None, None, policy, device_id=device))


def torch_2(model: nn.Module, group: dist.ProcessGroup) -> Wrapped:
    """torch's `fully_shard`."""
    return _in_place(fully_shard, model, group)


def _in_place(shard: Callable[..., Any], model: nn.Module, group: dist.ProcessGroup) -> Wrapped:
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            shard(layer, mesh=mesh)
    shard(model, mesh=mesh)
    return _with_adam(model)


def _with_adam(model: nn.Module) -> Wrapped:
    return model, torch.optim.Adam(model.parameters())


STRATEGIES: dict[str, Callable[..., Wrapped]] = {
    "minidist FSDP": ours,
    "torch FSDP1": torch_1,
    "torch fully_shard": torch_2,
}


TARGETS = [
    Target(
        f"an FSDP step on shm, batch 8 and 64, against {there}",
        {(f"2 ranks, batch {batch}, FSDP, shm", there): reach for batch in BATCHES},
    )
    for there, reach in (("torch fully_shard, gloo", 2.5), ("torch FSDP1, shm", 1.3))
] + [
    Target(
        "an FSDP step against torch's fully_shard, on 2 and 4 ranks, shm and gloo",
        {
            (
                f"{ranks} ranks, batch {batch}, FSDP, {backend}",
                f"torch fully_shard, {backend}",
            ): 1.1
            for ranks in WORLD_SIZES
            for batch in BATCHES
            for backend in BACKENDS
        },
    )
]


def run(rounds: int, picture: Path) -> list[Row]:
    """Time whole steps in turns, by batch, backend and world size; and count their memory."""
    rows, ways = [], on_each_backend(STRATEGIES, SIZES)
    for world_size in WORLD_SIZES:
        with md.ranks(world_size, backend="gloo") as pool:
            for batch in BATCHES:
                data = partial(vectors, batch, SIZES[0], SIZES[-1])
                taken = measure(pool, ways, rounds, data)
                what = f"{world_size} ranks, batch {batch}, FSDP"
                rows += [
                    taken.row(f"{what}, {backend}", f"minidist FSDP, {backend}", there)
                    for backend in BACKENDS
                    for there in taken
                    if not there.startswith("minidist") and there.endswith(("gloo", backend))
                ]
            show_peaks(pool, ways, batch, data)
    title = "fsdp: a step with Adam, 8.4 million parameters in eight units"
    show(title, rows)
    draw(title, rows, picture)
    return rows
