"""A step of fully sharded training with Adam, 8.4 million parameters: ours, and both of torch's.

Lesson: fully_sharded
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import minidist as md
from minidist.instruments.bench import Row, Target
from minidist.instruments.bench.training import (
    BACKENDS,
    Trainer,
    mean_of_squares,
    measure,
    vectors,
)

WIDTH, LAYERS = 1024, 8  # eight units, 8,396,800 parameters
WORLD_SIZES = [2, 4]
BATCHES = [8, 64]  # examples a rank


def in_place(shard: Callable[..., Any], model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """By a `fully_shard`, a unit for each layer. Our wrapper makes the same."""
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            shard(layer, mesh=mesh)
    shard(model, mesh=mesh)
    return model


def torch_1(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """torch's wrapper, whose successor is `fully_shard`."""
    with warnings.catch_warnings():  # it tells how to get other state_dicts
        warnings.simplefilter("ignore")
        policy = ModuleWrapPolicy({nn.Linear})
        return TorchFSDP(model, group, None, None, policy, device_id=torch.device("cpu"))


STRATEGIES: dict[str, Callable[..., nn.Module]] = {
    "minidist FSDP": partial(in_place, md.fully_shard),
    "torch FSDP1": torch_1,
    "torch fully_shard": partial(in_place, fully_shard),
}


def trainer(wrap: Callable[..., nn.Module], backend: str) -> Trainer:
    """A whole step: forward, backward, and that of the optimizer."""
    model = wrap(md.zoo.mlp(*[WIDTH] * (LAYERS + 1)), dist.new_group(backend=backend))
    optimizer = torch.optim.Adam(model.parameters())

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = mean_of_squares(model, inputs, targets)
        optimizer.step()
        return loss

    return Trainer(step)


def case(ranks: int, batch: int, backend: str) -> str:
    """What a row says."""
    return f"{ranks} ranks, batch {batch}, FSDP, {backend}"


TARGETS = [
    Target(
        f"an FSDP step on shm, batch 8 and 64, against {there}",
        {(case(2, batch, "shm"), there): reach for batch in BATCHES},
    )
    for there, reach in (("torch fully_shard, gloo", 2.5), ("torch FSDP1, shm", 1.3))
] + [
    Target(
        "an FSDP step against torch's fully_shard, on 2 and 4 ranks, shm and gloo",
        {
            (case(ranks, batch, backend), f"torch fully_shard, {backend}"): 1.1
            for ranks in WORLD_SIZES
            for batch in BATCHES
            for backend in BACKENDS
        },
    )
]


def run(rounds: int) -> list[Row]:
    """Time whole steps in turns, by batch, backend and world size."""
    rows = []
    ways: dict[str, Callable[[], Trainer]] = {
        f"{name}, {backend}": partial(trainer, wrap, backend)
        for name, wrap in STRATEGIES.items()
        for backend in BACKENDS
    }
    for world_size in WORLD_SIZES:
        with md.ranks(world_size, backend="gloo") as pool:
            for batch in BATCHES:
                taken = measure(pool, ways, rounds, partial(vectors, batch, WIDTH))
                rows += [
                    taken.row(case(world_size, batch, backend), f"minidist FSDP, {backend}", there)
                    for backend in BACKENDS
                    for there in taken
                    if not there.startswith("minidist") and there.endswith(("gloo", backend))
                ]
    return rows
