"""The puzzles and the exercise of the lesson wrong_in_silence."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from minidist.course.checks.verdict import NotYet, check, function, puzzle, require_right, shown
from minidist.course.zoo import mlp

Tensors = dict[str, torch.Tensor]
FIRST, LAST, BIASES = {"0.weight", "0.bias"}, {"2.weight", "2.bias"}, {"0.bias", "2.bias"}
ALL, LR = FIRST | LAST, 0.1


owner_learns = puzzle(__name__, "owner_learns")
NOT_SO = {
    "a": "the mean of what is equal on all ranks is the same again: that run is right",
    "c": "then both micro-batches are averaged: that run is right",
    "d": "then no rank would have rows of the other",
}


@check
def culprit(answer: object) -> None:
    """The letter of what the run does."""
    letter = answer.strip().lower() if isinstance(answer, str) else ""
    if letter in NOT_SO:
        raise NotYet(f"{letter} is not it: {NOT_SO[letter]}.")
    if letter != "b":
        raise NotYet(f'give "a", "b", "c" or "d", not {shown(answer)}.')


# ---- an oracle for one step ---------------------------------------------------------------------


class Step(NamedTuple):
    """A step of SGD without momentum, as the answer gets it: weights before and after by rank, the
    gradients of each rank's micro-batches, and how many rows these have."""

    before: list[Tensors]
    after: list[Tensors]
    own: list[list[Tensors]]
    counts: list[list[int]]

    def sum(self, name: str, weights: Sequence[Sequence[float]]) -> Any:
        """Of the gradients of all micro-batches, with these weights by rank."""
        pairs = zip(chain(*weights), chain(*self.own), strict=True)
        return sum(weight * gradient[name] for weight, gradient in pairs)


class Run(NamedTuple):
    """seen(g, step, name, rank): what the optimizer of a rank sees in place of the gradient g that
    one process has, of these names. dead: no row reaches the first layer."""

    says: str
    names: set[str] = set()
    counts: Sequence[Sequence[int]] = ((4, 4), (4, 4))
    seen: Callable[[Any, Step, str, int], Any] = lambda g, *_: g
    other_biases: bool = False
    dead: bool = False
    dtype: torch.dtype = torch.float64


UNEVEN = ((7, 1), (5, 3))
RIGHT = [
    Run("an ordinary one"),
    Run("with 7, 1, 5 and 3 rows", counts=UNEVEN),
    Run("in which no row reaches the first layer", dead=True),
    Run("in float32", counts=UNEVEN, dtype=torch.float32),
]
FAULTS = [
    Run("gradients are added up, and not averaged", ALL, seen=lambda g, *_: 2 * g),
    Run("the sign is wrong", ALL, seen=lambda g, *_: -g),
    Run("the first layer's gradients are divided twice", FIRST, seen=lambda g, *_: g / 2),
    Run(
        "7 rows, 1, 5 and 3 count the same",
        *(ALL, UNEVEN),
        lambda g, step, name, rank: step.sum(name, [[0.25, 0.25]] * 2),
    ),
    Run(
        "an earlier micro-batch is divided again",
        ALL,
        seen=lambda g, step, name, rank: step.sum(name, [[0.125, 0.25]] * 2),
    ),
    Run(
        "rank 1 keeps its own gradient of the last layer",
        LAST,
        seen=lambda g, step, name, rank: step.sum(name, [[0, 0], [0.5, 0.5]]) if rank else g,
    ),
    Run(
        "all ranks take the gradient of rank 0",
        ALL,
        seen=lambda g, step, name, rank: step.sum(name, [[0.5, 0.5], [0, 0]]),
    ),
    Run(
        "rank 1 weighs a hundredth too much in one bias",
        {"2.bias"},
        seen=lambda g, step, name, rank: step.sum(name, [[0.25, 0.25], [0.2525, 0.2525]]),
    ),
    Run(
        "half of a weight's gradient did not arrive",
        {"0.weight"},
        seen=lambda g, *_: torch.cat([g[:3], 0 * g[3:]]),
    ),
    Run(
        "an earlier step's gradient of the last layer was left",
        LAST,
        seen=lambda g, step, name, rank: g + step.own[1][0][name].flip(0),
    ),
    Run(
        "biases have weight decay",
        BIASES,
        seen=lambda g, step, name, rank: g + 0.1 * step.before[rank][name],
    ),
    Run("the ranks began with other biases", {"2.bias"}, other_biases=True),
]


@check
def find(answer: object) -> None:
    """`find(before, after, own, counts, lr)` gives the names of all parameters that moved, or
    began, otherwise than in one process: twelve faults, four right runs."""
    require_right(_trial, function(answer), world_size=1, of_rank="")


def _trial(find: Callable[..., Any]) -> str:
    """What is wrong with it, if anything."""
    for run in [*RIGHT, *FAULTS]:
        found = find(*_step(run), LR)
        if isinstance(found, str) or not isinstance(found, Iterable | None):
            found = ["what is no list of names"]
        names = {str(each) for each in found or []}
        it_names, wanted = (", ".join(sorted(each)) for each in (names, run.names))
        if names and not wanted:
            return f"it finds {it_names} in a right run, {run.says}"
        if wanted and not names:
            return f"it passes a run in which {run.says}"
        if names != run.names:
            return f"where {run.says}, it names {it_names}; it should name {wanted}"
    return ""


def _step(run: Run) -> Step:
    draw = torch.Generator().manual_seed(0)
    step = Step([], [], [], [[*counts] for counts in run.counts])
    for rank, counts in enumerate(run.counts):
        model = mlp(8, 6, 3, dtype=run.dtype)
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            parameters["0.bias"].add_(-9 if run.dead else 0.3)
            parameters["2.bias"].add_(0.01 * rank * run.other_biases)
        step.before.append({name: p.detach().clone() for name, p in parameters.items()})
        step.own.append([])
        for count in counts:
            inputs = torch.rand(count, 8, generator=draw).to(run.dtype)
            targets = torch.randint(3, (count,), generator=draw)
            loss = F.cross_entropy(model(inputs), targets)
            gradients = torch.autograd.grad(loss, list(parameters.values()))
            step.own[-1].append(dict(zip(parameters, gradients, strict=True)))
    rows = sum(map(sum, run.counts))
    shares = [[count / rows for count in counts] for counts in run.counts]
    for rank, before in enumerate(step.before):
        seen = {name: step.sum(name, shares) for name in before}
        seen |= {name: run.seen(seen[name], step, name, rank) for name in run.names}
        step.after.append({name: before[name] - LR * seen[name] for name in before})
    return step
