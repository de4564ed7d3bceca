"""The puzzles and the exercise of the lesson beyond_gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minidist.course.checks.verdict import NotYet, check, function, on_ranks, puzzle, same

MEETINGS = 3
OUTER: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD with momentum": lambda a: torch.optim.SGD(a, lr=0.7, momentum=0.9, nesterov=True),
    "Adam": lambda a: torch.optim.Adam(a, lr=0.1),
}


worth_it = puzzle(__name__, "worth_it")
gathered_bits = puzzle(__name__, "gathered_bits")


@check
def meeting(answer: object) -> None:
    """`meet(parameters, anchors, outer)`: DiLoCo's outer step, on every rank."""
    for rank, wrong in enumerate(on_ranks(_trial, function(answer), world_size=3)):
        if wrong:
            raise NotYet(f"on rank {rank} of 3, {wrong}.")


def _trial(meet: Callable[..., Any]) -> str:
    """What is first wrong on this rank. It goes on to the end, for others wait for it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    wrong = []
    for name, make in OUTER.items():
        random = torch.Generator().manual_seed(0)
        start = [_randn(random, shape) for shape in ((3, 2), (4,))]
        parameters, anchors, alone = ([nn.Parameter(t.clone()) for t in start] for _ in range(3))
        outer, oracle = make(anchors), make(alone)
        for count in range(1, MEETINGS + 1):
            before = [a.detach().clone() for a in alone]
            moves = [[_randn(random, t.shape) for t in start] for _ in range(world_size)]
            mean = [torch.stack(each).mean(0) for each in zip(*moves, strict=True)]
            with torch.no_grad():
                for parameter, anchor, move in zip(parameters, before, moves[rank], strict=True):
                    parameter.copy_(anchor + move)
            for anchor, step in zip(alone, mean, strict=True):
                anchor.grad = -step
            oracle.step()
            meet(parameters, anchors, outer)
            said = _compare(parameters, anchors, alone, before, mean)
            wrong += [f"after meeting {count} with {name}, {said}"] if said else []
    return wrong[0] if wrong else ""


def _randn(random: torch.Generator, shape: Sequence[int]) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=random)


def _compare(
    parameters: list[nn.Parameter],
    anchors: list[nn.Parameter],
    right: list[nn.Parameter],
    before: list[torch.Tensor],
    mean: list[torch.Tensor],
) -> str:
    """What is wrong with the parameters and anchors of this rank, if anything."""
    if same(anchors, right):
        if same(parameters, right):
            return ""
        return "the anchors are right, and the parameters are not where the anchors are"
    if same(anchors, before):
        return "the anchors have not moved"
    mirrored = [2 * a - r for a, r in zip(before, right, strict=True)]
    if same(anchors, mirrored):
        return "the anchors went the wrong way: the gradient is anchor - parameter"
    return "the anchors are not those of one process that has the mean of all differences"
