"""A step of fully sharded training, with Adam: ours, torch's FSDP1 and `fully_shard`.

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
from minidist.bench import Row, Target, draw, show
from minidist.bench.training import Make, Trainer, measure, peaks, trainer, vectors
from minidist.fully_sharded import by_class

SIZES = (1024,) * 9  # of the layers: eight units, 8,396,800 parameters
WORLD_SIZES = [2, 4]
BATCHES = [8, 64]  # examples a rank
BACKENDS = ["gloo", "shm"]


def ours(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """`md.FullyShardedDataParallel`, a unit for each layer."""
    return md.FullyShardedDataParallel(model, group, by_class(nn.Linear))


def torch_1(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """torch's wrapper, whose successor is `fully_shard`."""
    with warnings.catch_warnings():  # it tells how to get other state_dicts
        warnings.simplefilter("ignore")
        device = torch.device("cpu")
        return TorchFSDP(model, group, None, None, ModuleWrapPolicy({nn.Linear}), device_id=device)


def torch_2(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """torch's `fully_shard`."""
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


STRATEGIES: dict[str, Callable[..., nn.Module]] = {
    "minidist": ours,
    "torch FSDP1": torch_1,
    "torch fully_shard": torch_2,
}


TARGETS = [
    Target(
        f"an FSDP step on shm, batch 8 and 64, against {there}",
        {(f"2 ranks, batch {batch}, shm", there): reach for batch in BATCHES},
    )
    for there, reach in (("torch fully_shard, gloo", 2.5), ("torch FSDP1, shm", 1.3))
]


def run(rounds: int, picture: Path) -> list[Row]:
    """Time whole steps in turns, by batch, backend and world size; and count their memory."""
    rows = []
    for world_size in WORLD_SIZES:
        with md.ranks(world_size, backend="gloo") as pool:
            for batch in BATCHES:
                data = partial(vectors, batch, SIZES[0], SIZES[-1])
                taken = measure(pool, ways(), rounds, data)
                what = f"{world_size} ranks, batch {batch}, {{}}"
                rows += [
                    taken.row(what.format(backend), f"minidist, {backend}", there)
                    for backend in BACKENDS
                    for there in taken
                    if not there.startswith("minidist") and there.endswith(("gloo", backend))
                ]
            gloo = {name: make for name, make in ways().items() if name.endswith("gloo")}
            print(f"\nthe most bytes that live on one of {world_size} ranks, batch {batch}")
            for name, nbytes in peaks(pool, gloo, data).items():
                print(f"{name:24} {nbytes:13,}")
    title = "fsdp: a step with Adam, 8.4 million parameters in eight units"
    show(title, rows)
    draw(title, rows, picture)
    return rows


def ways(sizes: tuple[int, ...] = SIZES) -> dict[str, Make]:
    """Every strategy over each backend."""
    return {
        f"{name}, {backend}": partial(by, wrap, backend, sizes)
        for name, wrap in STRATEGIES.items()
        for backend in BACKENDS
    }


def by(wrap: Callable[..., nn.Module], backend: str, sizes: tuple[int, ...]) -> Trainer:
    """A strategy over a backend."""
    group: Any = dist.new_group(backend=backend)
    model = wrap(md.zoo.mlp(*sizes), group)
    return trainer(model, torch.optim.Adam(model.parameters()))
