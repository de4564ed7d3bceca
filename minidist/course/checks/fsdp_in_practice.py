"""The puzzles and the exercise of the lesson fsdp_in_practice."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from minidist.course.checks.verdict import check, function, puzzle, require_right, shown
from minidist.course.zoo import Transformer
from minidist.instruments.measure import MemoryTracker, TrafficCounter

BLOCKS = 4


norm_of_whole = puzzle(__name__, "norm_of_whole")
pairs_of_nodes = puzzle(__name__, "pairs_of_nodes")


@check
def prepare(answer: object) -> float | None:
    """A function that shards a transformer of four blocks by parts of a block, and gives it an
    Adam. The score: the numbers of parameters that are in memory at the peak of a step."""
    results = require_right(_trial, function(answer), world_size=2, of_rank=": ")
    most = max(peak for _, peak in results)
    return most if math.isfinite(most) else None


def _model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(width=32, heads=2, layers=BLOCKS, vocabulary=64, length=8).double()


def _trial(prepare: Callable[..., Any]) -> tuple[str, float]:
    """What is wrong on this rank, if anything, and the peak; of torch's units it is not known."""
    alone, rank, size = _model(), dist.get_rank(), dist.get_world_size()
    pair = prepare(_model())
    if not (isinstance(pair, tuple | list) and len(pair) == 2):
        return f"it must return two things, the model and its optimizer, not {shown(pair)}", 0
    model, optimizer = pair
    if not (isinstance(model, nn.Module) and isinstance(optimizer, torch.optim.Optimizer)):
        return f"it must return a model and its optimizer, not {shown(pair)}", 0
    if wrong := _holds_more(model, alone):
        return wrong, 0
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
            said = "does the optimizer have the parameters of the sharded model"
            return f"the weights have not changed in three steps: {said}", 0
        said = "is not that of one process with Adam, lr=1e-3, that trained on all rows"
        return f"after three steps its output {said}", 0
    of_torch = any(isinstance(m, FSDPModule | FullyShardedDataParallel) for m in model.modules())
    peak = math.inf if of_torch else memory.peak_of["parameters"] / 8
    return _costs(memory, sent, alone, of_torch), peak


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


def _costs(memory: MemoryTracker, sent: TrafficCounter, alone: Transformer, of_torch: bool) -> str:
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
    if of_torch and gathers < 4 * BLOCKS:
        return f"with {gathers} all_gathers of torch's units, two neighbours are more than a block"
    return ""
