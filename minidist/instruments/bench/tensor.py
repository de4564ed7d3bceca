"""A step of a transformer split by features: ours, and torch's `parallelize_module`.

Lesson: feature_splitting
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import minidist as md
from minidist.instruments.bench import Row, Target
from minidist.instruments.bench.training import (
    BACKENDS,
    Make,
    Trainer,
    measure,
    sgd,
    text,
    transformer,
)

LAYERS, WIDTH, LENGTH, ROWS = 2, 256, 64, 4  # 1.7 million parameters; tokens a row, rows a batch
WORLD_SIZES = [2, 4]


TARGETS = [
    Target(
        "a tensor parallel step on shm, against torch's over gloo",
        {("2 ranks, shm", "torch, gloo"): 2.3},
    )
]


def run(rounds: int) -> list[Row]:
    """Time forward and backward in turns, by backend and world size."""
    rows = []
    ways: dict[str, Make] = {}
    for backend in BACKENDS:
        ways[f"minidist, {backend}"] = partial(by_minidist, backend)
        ways[f"torch, {backend}"] = partial(by_torch, backend)
    for world_size in WORLD_SIZES:
        with md.ranks(world_size, backend="gloo") as pool:
            taken = measure(pool, ways, 2 * rounds, partial(text, ROWS, LENGTH))
        rows += [
            taken.row(f"{world_size} ranks, {backend}", f"minidist, {backend}", there)
            for backend in BACKENDS
            for there in dict.fromkeys(["torch, gloo", f"torch, {backend}"])
        ]
    return rows


def by_minidist(backend: str) -> Trainer:
    """`md.tensor_parallel.parallelize_module`."""
    group = dist.new_group(backend=backend)
    mesh, model = DeviceMesh.from_group(group, "cpu"), transformer(LAYERS, WIDTH, LENGTH)
    md.tensor_parallel.parallelize_module(model, mesh)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        loss = md.vocab_parallel_cross_entropy(model(inputs), targets, group)
        loss.backward()
        return loss.item()

    return Trainer(step, sgd(model))


def by_torch(backend: str) -> Trainer:
    """The same model by torch, as its tutorial has it."""
    model = transformer(LAYERS, WIDTH, LENGTH)
    group = dist.new_group(backend=backend)
    split_by_torch(model, DeviceMesh.from_group(group, "cpu"))

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        with loss_parallel():
            loss: Any = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
        return loss.full_tensor().item() if isinstance(loss, DTensor) else loss.item()

    return Trainer(step, sgd(model))


def split_by_torch(model: md.zoo.Transformer, mesh: DeviceMesh) -> None:
    """Split the model in place, each block after its attention has become a module."""
    model.blocks = nn.Sequential(*[_Block(block, mesh.size()) for block in model.blocks])
    around: dict[str, ParallelStyle] = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, around)
    # It has q, k and v send one gradient, not three.
    whole = partial(
        PrepareModuleInput,
        input_layouts=Replicate(),
        desired_input_layouts=Replicate(),
        use_local_output=False,
    )
    for block in model.blocks:
        plan: dict[str, ParallelStyle] = {
            "attention": whole(),
            **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
            "attention.out": RowwiseParallel(),
            "mlp": whole(),
            "mlp.0": ColwiseParallel(),
            "mlp.2": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)


class _Attention(nn.Module):
    """That of a `zoo.Block`, with queries, keys and values apart: torch would cut across them."""

    def __init__(self, block: Any, ranks: int) -> None:
        super().__init__()
        self.heads, width = block.heads // ranks, block.qkv.in_features
        like: Any = dict(device=block.qkv.weight.device, dtype=block.qkv.weight.dtype)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False, **like) for _ in range(3))
        with torch.no_grad():
            for layer, weight in zip(
                (self.q, self.k, self.v), block.qkv.weight.chunk(3), strict=True
            ):
                layer.weight.copy_(weight)
        self.out = block.out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class _Block(nn.Module):
    """A `zoo.Block` whose attention is a module, as torch's plans need it."""

    def __init__(self, block: Any, ranks: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.mlp = block.norm1, block.norm2, block.mlp
        self.attention = _Attention(block, ranks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))
