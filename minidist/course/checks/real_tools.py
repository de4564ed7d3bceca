"""The puzzles and the exercise of the lesson real_tools."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from minidist.course.checks.verdict import (
    NotYet,
    check,
    function,
    on_ranks,
    puzzle,
    shown,
)
from minidist.course.zoo import Transformer
from minidist.distributed_data_parallel import DistributedDataParallel
from minidist.instruments.parity import relative_difference

TOKENS = [(4, 4), (7, 1), (6, 0), (5, 2, 1)]  # on each rank, by case


accumulation = puzzle(__name__, "accumulation")


@check
def stages(answer: object) -> None:
    """DeepSpeed's stages that hold 5.5 bytes a parameter on 8 ranks: a list."""
    found = [*answer] if isinstance(answer, list | tuple | set) else [answer]
    if any(isinstance(each, bool) or each not in (0, 1, 2, 3) for each in found):
        raise NotYet(f"give a list of some of the stages 0, 1, 2 and 3, not {shown(answer)}.")
    for stage, why in {0: "its states are whole", 3: "it shards the weights, too"}.items():
        if stage in found:
            raise NotYet(f"stage {stage} holds {12 if stage == 0 else 2.5:g} bytes: {why}.")
    if set(found) != {1, 2}:
        raise NotYet("another stage holds as much after a step.")


@check
def by_tokens(answer: object) -> None:
    """A backward pass after which every rank has the gradient of the mean over all tokens."""
    backward = function(answer)
    for counts in TOKENS:
        where = f", with {', '.join(map(str, counts))} tokens"
        results = on_ranks(_trial, backward, counts, world_size=len(counts), where=where)
        for said in filter(None, results):
            raise NotYet(f"on ranks with {', '.join(map(str, counts))} tokens, {said}.")


def _trial(backward: Callable[..., Any], counts: tuple[int, ...]) -> str:
    """What is wrong on this rank, if anything."""
    alone, wanted = _model(), list[torch.Tensor]()
    inputs, targets = _texts(counts)
    F.cross_entropy(alone(inputs).flatten(0, 1), targets.flatten()).backward()
    wanted = [p.grad for p in alone.parameters() if p.grad is not None]
    model, rank = DistributedDataParallel(_model()), dist.get_rank()
    backward(model, inputs[rank : rank + 1], targets[rank : rank + 1])
    found = [p.grad for p in model.parameters() if p.grad is not None]
    who = f"rank {rank}"
    if len(found) < len(wanted):
        return f"{who} has no gradients"
    worst = max(map(relative_difference, found, wanted))
    if worst <= 1e-5:  # a scale in float32 will do
        return ""
    return f"{who} has another gradient than one process, relatively by {worst:.1g}"


def _model() -> Transformer:
    return Transformer(vocabulary=16, length=8, width=8, layers=1).double()


def _texts(counts: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """A text of 8 tokens a rank, (N, 8), and targets, of which only the first ones count."""
    draw = torch.Generator().manual_seed(0)
    inputs, targets = torch.randint(16, (2, len(counts), 8), generator=draw)
    for row, count in zip(targets, counts, strict=True):
        row[count:] = -100
    return inputs, targets
