"""The puzzles and the exercise of the lesson beyond_gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minidist.course.checks.verdict import NotYet, check, function, hints, number, on_ranks

MEETINGS = 3
OUTER: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD with momentum": lambda a: torch.optim.SGD(a, lr=0.7, momentum=0.9, nesterov=True),
    "Adam": lambda a: torch.optim.Adam(a, lr=0.1),
}


@check
@hints(
    "A meeting is an all_reduce of all parameters. How long does it take on this ring?",
    "A rank sends 2(N − 1)/N times the bytes of all parameters. The link carries bits: a "
    "byte has eight of them.",
    "That time may be a tenth of what a period computes. A step is one second, so the "
    "period has ten times as many steps as a meeting has seconds.",
)
def period(answer: object) -> str:
    """The shortest period with which meetings take a tenth of the computing at most: 10⁹ parameters
    of float32, 8 ranks, 1 Gb/s, 1 s a step."""
    number(
        answer,
        560,
        "steps",
        {
            56: "then a meeting takes as long as all the steps between two of them",
            70: "a link of 1 Gb/s carries an eighth of a gigabyte in a second",
            7: "a meeting is 56 Gbit",
            640: "a ring sends 2 (N - 1)/N times the vector, a little less than twice",
            320: "a ring sends 2 (N - 1)/N times the vector, not once",
            280: "an all_reduce has two halves, of (N - 1)/N vectors each",
            504: "a tenth of the computing, not of the whole time",
        },
    )
    return "a meeting sends 2 × 7/8 × 4 GB in 56 s, and 56 s is a tenth of 560 steps."


@check
@hints(
    "Write down, for both ways, how many bytes a rank sends for one parameter, with N ranks"
    " on a ring.",
    "All_gather: it passes on the bits of N − 1 ranks, each an eighth of a byte. "
    "All_reduce: 2(N − 1)/N times the bytes of a float32 number.",
    "Set the two equal. N − 1 cancels, and a simple equation for N is left.",
)
def gathered_bits(answer: object) -> str:
    """Ranks from which on an all_gather of everybody's bits saves nothing, beside an all_reduce of
    float32."""
    number(
        answer,
        64,
        "ranks",
        {
            32: "an all_reduce sends 2 (N - 1)/N vectors, not (N - 1)/N",
            8: "count bits on both sides, or bytes on both",
            16: "an all_reduce sends twice (N - 1)/N vectors, of 4 bytes a number",
            128: "each rank passes on the bits of N - 1 ranks",
        },
    )
    return "(N - 1)/8 bytes a parameter against 8 (N - 1)/N. The hook sends (N - 1)/(4 N)."


@check
@hints(
    "The formula above says which gradient the outer optimizer gets: anchor minus mean.",
    "The mean needs an all_reduce for each parameter, divided by the number of ranks. Put "
    "the difference into `anchor.grad`, on every rank.",
    "Then let `outer` step, which moves the anchors. Last, copy each anchor into its "
    "parameter, in place and without gradients.",
)
def meeting(answer: object) -> str:
    """`meet(parameters, anchors, outer)`: DiLoCo's outer step, on every rank."""
    for rank, wrong in enumerate(on_ranks(_trial, function(answer), world_size=3)):
        if wrong:
            raise NotYet(f"on rank {rank} of 3, {wrong}.")
    return "every rank took the same step from the anchors, and sets out from there again."


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
    if _equal(anchors, right):
        if _equal(parameters, right):
            return ""
        return "the anchors are right, and the parameters are not where the anchors are"
    if _equal(anchors, before):
        met = [a + m for a, m in zip(before, mean, strict=True)]
        local = "; the parameters are their mean, and that is local SGD"
        return f"the anchors have not moved{local if _equal(parameters, met) else ''}"
    mirrored = [2 * a - r for a, r in zip(before, right, strict=True)]
    if _equal(anchors, mirrored):
        return "the anchors went the wrong way: the gradient is anchor - parameter"
    return "the anchors are not those of one process that has the mean of all differences"


def _equal(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    pairs = zip(found, wanted, strict=True)
    return all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in pairs)
