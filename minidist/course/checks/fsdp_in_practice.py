"""The puzzles and the exercise of the lesson fsdp_in_practice."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from minidist.course.checks.verdict import check, function, hints, number, require_right, shown
from minidist.course.zoo import Transformer
from minidist.instruments.measure import MemoryTracker, TrafficCounter

BLOCKS = 4


@check
@hints(
    'Under "Hybrid sharding: what leaves a node" there are two formulas, one for full '
    "sharding and one for hybrid.",
    "In hybrid sharding only the average with the replicas crosses the cable. Ψ is the "
    "number of parameters, and M that of nodes.",
    "2Ψ(M − 1)/M numbers leave a node. Put in M, and the bytes of all parameters for Ψ, in GB.",
)
def leaves_a_node(answer: object) -> str:
    """GB that leave a node in a step: 8 nodes of 8 GPUs, 7 billion parameters of 2 bytes."""
    number(
        answer,
        24.5,
        "GB",
        {
            41.34375: "that is full sharding, 3Ψ (N - 1)/N",
            3.0625: "one rank sends that, and a node has eight",
            12.25: "a parameter has 2 bytes",
            28: "a ring sends 2 (M - 1)/M of the vector, not twice all of it",
            27.5625: "the ring between the nodes has one rank of each of the 8 nodes, not 64",
            36.75: "the all_gathers and the reduce_scatter stay within the node",
            24.5e9: "give GB",
        },
    )
    return "2 × 7/8 × 14 GB. In full sharding it is 3 × 63/64 × 14 GB, 1.7 times as much."


@check
@hints(
    "Count for each micro-batch what travels: gathers for forward, gathers for backward,"
    " reductions. `no_sync` is about one of the three.",
    "Every unit is resharded after forward: so backward gathers it again. A number that is "
    "gathered has 2 bytes, one that is reduced has 4.",
    "Micro-batches times (gathers times 2 bytes), plus reductions times 4 bytes.",
)
def accumulated(answer: object) -> str:
    """Bytes a parameter, of the vectors that are gathered and reduced in a step: 4 micro-batches,
    gathers in bfloat16, reductions in float32, and only after the last one."""
    number(
        answer,
        20,
        "bytes a parameter",
        {
            32: "that is a reduction after each micro-batch",
            8: "parameters are freed after each pass: every micro-batch gathers them again",
            12: "with reshard_after_forward, backward gathers once more",
            6: "parameters are freed after each pass: every micro-batch gathers them twice",
            36: "what is gathered has 2 bytes",
            18: "what is reduced has 4 bytes",
            48: "that is all in float32, with a reduction after each micro-batch",
            16: "the gradients are reduced, too, once",
        },
    )
    return "4 × (2 + 2) + 4: no_sync saves reductions, and no gather. Reduced each time it is 32."


@check
@hints(
    'See "What to wrap": two units are in memory at once, one that computes and its '
    "neighbour. See also when the optimizer must be made.",
    "A unit for each block is too large, since two blocks are there at once. A unit for each "
    "Linear is too small: print a block, and count its parameters part by part.",
    "The MLP has two thirds of a block. With it as one unit, and `qkv` and `out` as two more, "
    "no two neighbours are more than a block. Then the model itself, then the optimizer.",
)
def prepare(answer: object) -> str:
    """A function that shards a transformer of four blocks by parts of a block, and gives it an
    Adam."""
    require_right(_trial, function(answer), world_size=2, of_rank=": ")
    return "it trains as one process does, gathers little at a time, and sends few messages."


def _model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(width=32, heads=2, layers=BLOCKS, vocabulary=64, length=8).double()


def _trial(prepare: Callable[..., Any]) -> str:
    """What is wrong on this rank, if anything."""
    alone, rank, size = _model(), dist.get_rank(), dist.get_world_size()
    pair = prepare(_model())
    if not (isinstance(pair, tuple | list) and len(pair) == 2):
        return f"it must return two things, the model and its optimizer, not {shown(pair)}"
    model, optimizer = pair
    if not (isinstance(model, nn.Module) and isinstance(optimizer, torch.optim.Optimizer)):
        return f"it must return a model and its optimizer, not {shown(pair)}"
    if wrong := _holds_more(model, alone):
        return wrong
    single = torch.optim.Adam(alone.parameters(), lr=1e-3)
    data = torch.randint(0, 64, (3, 2, 9), generator=torch.Generator().manual_seed(1))
    for rows in data[:-1]:
        _step(model, optimizer, rows[rank::size])
    with MemoryTracker(model, optimizer) as memory, TrafficCounter() as sent:
        _step(model, optimizer, data[-1, rank::size])
    for rows in data:
        _step(alone, single, rows)
    found, wanted, fresh = (m(data[0, :, :-1]).detach() for m in (model, alone, _model()))
    if not torch.allclose(found, wanted, rtol=1e-6, atol=1e-9):
        if torch.allclose(found, fresh, rtol=1e-12):
            return (
                "the weights have not changed in three steps: does the optimizer have the "
                "parameters of the sharded model"
            )
        return (
            "after three steps its output is not that of one process with Adam, lr=1e-3, that "
            "trained on all rows"
        )
    return _costs(memory, sent, alone, model)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    optimizer.step()


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _holds_more(model: nn.Module, alone: nn.Module) -> str:
    held = sum(getattr(p, "_local_tensor", p).numel() for p in model.parameters())
    if held > _numel(alone) / 2 + 100:  # and padding
        return (
            f"its parameters() have {held:,} elements here, more than half of {_numel(alone):,}: "
            "is all of the model in a unit, the embeddings too"
        )
    return ""


def _costs(memory: MemoryTracker, sent: TrafficCounter, alone: Transformer, model: Any) -> str:
    whole, block = _numel(alone), _numel(alone.blocks[0])
    most = whole / 2 + (whole - BLOCKS * block) + block
    at_once = memory.peak_of["parameters"] / 8
    if at_once > 1.02 * most:
        return (
            f"within a step {at_once:,.0f} numbers of parameters are in memory; the shard, the "
            f"root and one block are {most:,.0f}"
        )
    gathers = sum(count for name, (count, _) in sent.calls.items() if "all_gather" in name)
    if gathers > 2 * (3 * BLOCKS + 1):
        return (
            f"a step has {gathers} all_gathers, and each has its latency: {2 * (3 * BLOCKS + 1)} "
            "are enough"
        )
    # Of torch's own units the tracker sees only the shards.
    torchs = any(isinstance(m, FSDPModule | FullyShardedDataParallel) for m in model.modules())
    if torchs and gathers < 4 * BLOCKS:
        return f"with {gathers} all_gathers of torch's units, two neighbours are more than a block"
    return ""
