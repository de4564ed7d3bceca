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
from minidist.course.checks.verdict import NotYet, check, puzzle, require_right, same, shown
from minidist.distributed_data_parallel import DistributedDataParallel
from minidist.instruments.measure import MemoryTracker

# What the answer's optimizer is made of: the first keeps a state of an element more.
OPTIMIZERS: tuple[partial[Any], ...] = (
    partial(torch.optim.Adam, lr=1e-3),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9),
)
COUNTS = 10  # numbers that Adam may keep besides: its steps, one for each tensor


FINE = {  # which changes of its own rows a rank may make: None; else why not
    "a": None,
    "b": None,
    "c": "in c a rank knows the mean of its own rows only, not that of the matrix",
    "d": "in d a rank would need the whole matrix: no rows alone have its singular values",
    "e": None,
}

largest_in_stage_1 = puzzle(__name__, "largest_in_stage_1")


@check
def own_rows_alone(answer: object) -> None:
    """The letters of the changes that train as one process does."""
    try:
        letters = {str(letter).strip().lower() for letter in answer}  # type: ignore[attr-defined]
    except Exception:  # whatever an odd object raises
        letters = set()
    letters -= {"", ","}
    if not letters or letters - FINE.keys():
        raise NotYet(f'give letters from a to e, such as {{"a", "c"}}, not {shown(answer)}.')
    for letter, why_not in FINE.items():
        if why_not and letter in letters:
            raise NotYet(f"{why_not}.")
    if missing := [
        letter for letter, why_not in FINE.items() if not why_not and letter not in letters
    ]:
        raise NotYet(f"{len(missing)} more would be right.")


@check
def my_zero(answer: object) -> None:
    """A class `MyZero(parameters, make_optimizer)` that keeps an N-th of the states."""
    if not callable(answer):
        raise NotYet(f"give the class itself, not {shown(answer)}.")
    for world_size in 2, 3:
        require_right(_trial, answer, world_size=world_size)


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
    alone, module = _model(), _model()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    _train(alone, make(alone.parameters()), slice(None))
    with MemoryTracker(module) as memory:
        optimizer = answer(module.parameters(), make)
        _train(DistributedDataParallel(module), optimizer, slice(rank, None, world_size))
        gc.collect()
    held = sum(memory.live.values())
    found = dict(module.named_parameters())
    for name, right in alone.named_parameters():
        if not same(found.get(name), right):
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
