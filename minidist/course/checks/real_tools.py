"""The puzzles and the exercise of the lesson real_tools."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from minidist.course.checks.verdict import NotYet, check, function, hints, number, on_ranks
from minidist.course.zoo import Transformer
from minidist.distributed_data_parallel import DistributedDataParallel
from minidist.instruments.parity import relative_difference

TOKENS = [(4, 4), (7, 1), (6, 0), (5, 2, 1)]  # on each rank, by case


@check
@hints(
    "What stage 1 divides stands in the lesson on ZeRO: one of weights, gradients and states.",
    "In float32 each number has 4 bytes. Adam has two states for each parameter.",
    "Add a whole weight, a whole gradient, and this rank's part of the two states.",
)
def held(answer: object) -> str:
    """Bytes a parameter from step to step: ZeRO-1 on 4 ranks, with Adam, all in float32."""
    number(
        answer,
        10,
        "bytes",
        {
            6: "the gradients count, too",
            16: "the states are on all ranks then, as with DDP",
            4: "that is ZeRO-3: weights and gradients are sharded, too",
            7: "that is ZeRO-2: gradients are sharded, too",
            9: "Adam has two states",
            12: "that is on 2 ranks",
            8: "a rank has a quarter of the states, too",
        },
    )
    return "4 + 4 + 8/4: weight, gradient, a quarter of two states."


@check
@hints(
    "One of the two settings says how many examples a rank takes at once, the other how "
    "often it does that before a step.",
    "First find how many examples one rank sees until the optimizer steps.",
    "The ranks see different examples: multiply by their number.",
)
def global_batch(answer: object) -> str:
    """Examples a step of the optimizer: 4 in a micro-batch, 8 of them accumulated, 16 ranks."""
    number(
        answer,
        512,
        "examples",
        {
            64: "each rank accumulates 8 micro-batches before the step",
            32: "that is on one rank",
            128: "each micro-batch has 4 examples",
            4: "that is one micro-batch on one rank",
        },
    )
    return "4 × 8 × 16, which DeepSpeed calls train_batch_size."


@check
@hints(
    'See "Break it: divided by the wrong number". A mean of means counts a token more where'
    " there are few of them.",
    "Take the sum of the losses on this rank, over the targets that are not -100. All ranks"
    " together must know how many such targets there are.",
    "Divide the sum by the number of all tokens, and multiply it by the number of ranks, by"
    " which DDP divides. A rank without tokens has the sum zero, and goes backward like the"
    " others.",
)
def by_tokens(answer: object) -> str:
    """A backward pass after which every rank has the gradient of the mean over all tokens."""
    backward = function(answer)
    for counts in TOKENS:
        where = f", with {', '.join(map(str, counts))} tokens"
        results = on_ranks(_trial, backward, counts, world_size=len(counts), where=where)
        for said in filter(None, results):
            raise NotYet(f"on ranks with {', '.join(map(str, counts))} tokens, {said}.")
    return "every token counts the same, on whichever rank it is, also where a rank has none."


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
