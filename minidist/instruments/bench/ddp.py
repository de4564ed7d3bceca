"""A step of DistributedDataParallel, of 8.4 million parameters: ours, torch's, and none at all.

Lesson: distributed_data_parallel
"""

from collections.abc import Callable
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minidist as md
from minidist.instruments.bench import Row, Target
from minidist.instruments.bench.training import Trainer, mean_of_squares, measure, sgd, vectors

SIZES = 1024, 2048, 2048, 1024  # of the layers: 8,393,728 parameters
WORLD_SIZES = [2, 4]
BATCHES = [8, 64, 256]  # examples a rank
PLAIN = "no communication"


def by(backend: str, wrap: Callable[..., nn.Module]) -> Trainer:
    """A model that is wrapped, and the group of its messages."""
    group = dist.new_group(backend=backend)
    model = wrap(md.zoo.mlp(*SIZES), process_group=group)
    return Trainer(partial(mean_of_squares, model), sgd(model))


def plain() -> Trainer:
    """No communication."""
    model = md.zoo.mlp(*SIZES)
    return Trainer(partial(mean_of_squares, model), sgd(model))


WAYS: dict[str, Callable[[], Trainer]] = {
    "minidist": partial(by, "gloo", md.DistributedDataParallel),
    "torch": partial(by, "gloo", TorchDDP),
    "minidist, shm": partial(by, "shm", md.DistributedDataParallel),
    "torch, shm": partial(by, "shm", TorchDDP),
    PLAIN: plain,
}
PAIRS = [
    *[("minidist", there) for there in ("torch", PLAIN)],
    *[("minidist, shm", there) for there in ("torch", PLAIN)],
    ("torch, shm", "torch"),
]
TARGETS = [
    Target(
        "a DDP step on shm, batch 64, against torch's over gloo, and without communication",
        {
            ("2 ranks, batch 64: minidist, shm", "torch"): 1.6,
            ("2 ranks, batch 64: minidist, shm", PLAIN): 1 / 1.15,
        },
    )
]


def run(rounds: int) -> list[Row]:
    """Time forward and backward in turns, by world size and batch; over gloo, if not said."""
    rows = []
    for world_size in WORLD_SIZES:
        with md.ranks(world_size, backend="gloo") as pool:
            for batch in BATCHES:
                # A step is short beside the scheduler's slices: one says less than many.
                taken = measure(pool, WAYS, 5 * rounds, partial(vectors, batch, SIZES[0]))
                what = f"{world_size} ranks, batch {batch}"
                rows += [taken.row(f"{what}: {ours}", ours, theirs) for ours, theirs in PAIRS]
    return rows
