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
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
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
KINDS = {"": False, ", sequence parallel": True}


TARGETS = [
    Target(
        "a tensor parallel step on shm, plain and sequence parallel, against torch's over gloo",
        {(f"2 ranks{kind}, shm", "torch, gloo"): 2.3 for kind in KINDS},
    )
]


def run(rounds: int) -> list[Row]:
    """Time forward and backward in turns, by backend and world size."""
    rows = []
    for world_size in WORLD_SIZES:
        with md.ranks(world_size, backend="gloo") as pool:
            taken = measure(pool, ways(), 2 * rounds, partial(text, ROWS, LENGTH))
        for kind in KINDS:
            for backend in BACKENDS:
                for there in dict.fromkeys(["torch, gloo", f"torch, {backend}"]):
                    what, ours = (
                        f"{world_size} ranks{kind}, {backend}",
                        f"minidist, {backend}{kind}",
                    )
                    rows.append(taken.row(what, ours, there + kind, there))
    return rows


def ways() -> dict[str, Make]:
    """Ours and torch's over each backend, with and without sequence parallel."""
    found: dict[str, Make] = {}
    for kind, sequence_parallel in KINDS.items():
        for backend in BACKENDS:
            found[f"minidist, {backend}{kind}"] = partial(by_minidist, backend, sequence_parallel)
            found[f"torch, {backend}{kind}"] = partial(by_torch, backend, sequence_parallel)
    return found


def by_minidist(backend: str, sequence_parallel: bool) -> Trainer:
    """`md.tensor_parallel.parallelize_module`."""
    group = dist.new_group(backend=backend)
    mesh, model = DeviceMesh.from_group(group, "cpu"), transformer(LAYERS, WIDTH, LENGTH)
    md.tensor_parallel.parallelize_module(model, mesh, sequence_parallel=sequence_parallel)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        loss = md.vocab_parallel_cross_entropy(model(inputs), targets, group)
        loss.backward()
        return loss.item()

    return Trainer(step, sgd(model))


def by_torch(backend: str, sequence_parallel: bool) -> Trainer:
    """The same model by torch, as its tutorial has it."""
    model = transformer(LAYERS, WIDTH, LENGTH)
    group = dist.new_group(backend=backend)
    split_by_torch(model, DeviceMesh.from_group(group, "cpu"), sequence_parallel)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        with loss_parallel():
            loss: Any = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
        return loss.full_tensor().item() if isinstance(loss, DTensor) else loss.item()

    return Trainer(step, sgd(model))


def split_by_torch(
    model: md.zoo.Transformer, mesh: DeviceMesh, sequence_parallel: bool = False
) -> None:
    """Split the model in place, each block after its attention has become a module."""
    model.blocks = nn.Sequential(*[_Block(block, mesh.size()) for block in model.blocks])
    parallelize_module(model, mesh, _plan(sequence_parallel))
    for block in model.blocks:
        parallelize_module(block, mesh, _block_plan(sequence_parallel))


def _plan(sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """How torch is to cut what is around the blocks."""
    if not sequence_parallel:
        return {
            "tokens": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        }
    return {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "positions": PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=Shard(0)
        ),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }


def _block_plan(sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """The same for a block. `PrepareModuleInput` has q, k and v send one gradient, not three."""
    layout = Shard(1) if sequence_parallel else Replicate()
    norms = {"norm1": SequenceParallel(), "norm2": SequenceParallel()} if sequence_parallel else {}
    return norms | {
        "attention": PrepareModuleInput(
            input_layouts=layout, desired_input_layouts=Replicate(), use_local_output=False
        ),
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=layout),
        "mlp": PrepareModuleInput(
            input_layouts=layout, desired_input_layouts=Replicate(), use_local_output=False
        ),
        "mlp.0": ColwiseParallel(),
        "mlp.2": RowwiseParallel(output_layouts=layout),
    }


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
