"""The puzzles and the exercise of the lesson zero."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from minidist.course import zoo
from minidist.course.checks.verdict import NotYet, check, hints, number, require_right, shown
from minidist.distributed_data_parallel import DistributedDataParallel
from minidist.instruments.measure import MemoryTracker
from minidist.instruments.parity import relative_difference

# What the answer's optimizer is made of: the first keeps a state of an element more.
OPTIMIZERS: tuple[partial[Any], ...] = (
    partial(torch.optim.Adam, lr=1e-3),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9),
)
COUNTS = 10  # numbers that Adam may keep besides: its steps, one for each tensor


@check
@hints(
    'See "Where 16 bytes a parameter go", and the ladder above the puzzle: which of the '
    "three kinds does stage 1 share out?",
    "In mixed precision weight and gradient have 2 bytes each, and the optimizer's states "
    "12. One of the three is divided by the number of ranks.",
    "Add the weight, the gradient and the divided states. For a billion parameters, bytes a"
    " parameter are GB.",
)
def stage_1_of_a_billion(answer: object) -> str:
    """GB of model states on each of 4 ranks: 1 billion parameters, stage 1, mixed precision."""
    number(
        answer,
        7,
        "GB",
        {
            16: "that is DDP, or one rank alone",
            10: "that is Adam in float32, 4 + 4 + 8/4",
            5.5: "that is stage 2: in stage 1 the gradients are whole",
            4: "that is stage 3: in stage 1 parameters and gradients are whole",
            28: "that is all 4 ranks together",
            7e9: "give GB",
        },
    )
    return "2 + 2 + 12/4 bytes a parameter."


@check
@hints(
    'It is the line *Each*, under "Accumulation: the trap of stage 2".',
    "Each micro-batch has a reduce_scatter of its gradients. What else is sent in a step, "
    "and how often?",
    "Count these collectives: one for each micro-batch, and one all_gather. In a ring each "
    "sends (N − 1)/N of Ψ.",
)
def accumulated_in_stage_2(answer: object) -> str:
    """Numbers that a rank sends in a step, in Ψ: 8 ranks, 16 micro-batches, each one reduced."""
    number(
        answer,
        14.875,
        "Ψ",
        {
            1.75: "that is a step without accumulation, or with no_sync",
            14: "the parameters are gathered, too, once a step",
            17: "a ring of 8 ranks sends 7/8 of that",
            2.625: "that is stage 1 behind a DDP, with no_sync",
            28: "gradients are reduced each time, but parameters are gathered once a step",
            28.875: "that is stage 1 behind a DDP that averages each time",
            12.75: "here are 8 ranks, not 4",
        },
    )
    return "16 reduce_scatters and one all_gather, each of 7/8 Ψ; with no_sync 1.75 Ψ."


@check
@hints(
    "`TinyZero` deals out whole tensors. Here one cuts through them: read again the idea "
    "under the exercise.",
    "Lay all parameters end to end in one flat tensor, with zeros at the end until N "
    "divides its length. Make each `parameter.data` a view of its place there.",
    "The inner optimizer gets one parameter: this rank's shard, a view of the flat tensor. "
    "In `step`, give it the same piece of all gradients, let it step, and all_gather the "
    "shards into the flat tensor.",
)
def my_zero(answer: object) -> str:
    """A class `MyZero(parameters, make_optimizer)` that keeps an N-th of the states."""
    if not callable(answer):
        raise NotYet(f"give the class itself, not {shown(answer)}.")
    for world_size in 2, 3:
        require_right(_trial, answer, world_size=world_size)
    return "it trains as DDP does, with Adam and with momentum, and every rank keeps its N-th part."


def _trial(answer: Callable[..., Any]) -> str:
    """What is wrong on this rank, if anything: the first of it. It goes on, as others wait."""
    wrong, held = zip(*(_compared(answer, make) for make in OPTIMIZERS), strict=True)
    if problem := next(filter(None, wrong), ""):
        return problem
    # Whatever an answer keeps besides, and wherever: Adam has a state more than momentum.
    more = (held[0] - held[1]) // 8
    # Each tensor may be cut for itself, by its rows, and rounded up.
    rows = [(-(-len(p) // dist.get_world_size()), p[0].numel()) for p in _model().parameters()]
    allowed = sum(most * wide for most, wide in rows)
    if more > allowed + COUNTS:
        return f"keeps {more:,} numbers for a state of Adam, and {allowed:,} are an N-th of them"
    return ""


def _model() -> nn.Module:
    return zoo.mlp(64, 32, 10, dtype=torch.float64)


def _compared(answer: Callable[..., Any], make: partial[Any]) -> tuple[str, int]:
    """What is wrong, and the bytes that live after a few steps of the answer."""
    made: list[torch.optim.Optimizer] = []

    def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
        made.append(make(parameters))
        return made[-1]

    alone, module = _model(), _model()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    _train(alone, make(alone.parameters()), slice(None))
    with MemoryTracker(module) as memory:
        optimizer = answer(module.parameters(), make_optimizer)
        _train(DistributedDataParallel(module), optimizer, slice(rank, None, world_size))
        gc.collect()
    held = sum(memory.live.values())
    if not made:
        return "has not called make_optimizer", held
    found, wanted = (dict(each.named_parameters()) for each in (module, alone))
    for name, right in wanted.items():
        if name not in found or found[name].shape != right.shape:
            return f"has lost the parameter {name}, or its shape", held
        if not relative_difference(found[name].detach(), right.detach()) < 1e-10:
            return f"has other weights than DDP in {name}, with {make.func.__name__}", held
    return "", held


def _train(model: nn.Module, optimizer: Any, mine: slice, steps: int = 3, size: int = 12) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        images = torch.randn(size, 64, generator=generator, dtype=torch.float64)
        labels = torch.randint(10, (size,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()
