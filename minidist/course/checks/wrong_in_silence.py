"""The puzzles and the exercise of the lesson wrong_in_silence."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from minidist.course.checks.verdict import check, function, puzzle, require_right
from minidist.course.zoo import mlp

Tensors = dict[str, torch.Tensor]
FIRST, LAST, BIASES = {"0.weight", "0.bias"}, {"2.weight", "2.bias"}, {"0.bias", "2.bias"}
ALL, LR = FIRST | LAST, 0.1


owner_learns = puzzle(__name__, "owner_learns")


first_weighs = puzzle(__name__, "first_weighs")


# ---- an oracle for one step ---------------------------------------------------------------------


class Step(NamedTuple):
    """A step of SGD without momentum, as the answer gets it: weights before and after by rank, the
    gradients of each rank's micro-batches, and how many rows these have."""

    before: list[Tensors]
    after: list[Tensors]
    own: list[list[Tensors]]
    counts: list[list[int]]


Fault = Callable[[list[Tensors], Step], None]  # changes what the optimizer of each rank sees
EVEN, UNEVEN = [[4, 4], [4, 4]], [[7, 1], [5, 3]]


@check
def find(answer: object) -> None:
    """`find(before, after, own, counts, lr)` gives the names of all parameters that moved, or
    began, otherwise than in one process: twelve faults, four right runs."""
    require_right(_trial, function(answer), world_size=1, of_rank="")


def _trial(find: Callable[..., Any]) -> str:
    """What is wrong with it, if anything."""
    for says, counts, options in RIGHT:
        if found := _named(find, _step(counts, **options)):
            return f"it finds {', '.join(sorted(found))} in a right run, {says}"
    for says, (wanted, counts, fault) in FAULTS.items():
        found = _named(find, _step(counts, fault))
        if not found:
            return f"it passes a run in which {says}"
        if found != wanted:
            both = [", ".join(sorted(names)) for names in (found, wanted)]
            return f"where {says}, it names {both[0]}; it should name {both[1]}"
    return ""


def _named(find: Callable[..., Any], step: Step) -> set[str]:
    found = find(*step, LR)
    if isinstance(found, str) or not isinstance(found, Iterable | None):
        return {"what is no list of names"}
    return {str(each) for each in found or []}


def _step(
    counts: list[list[int]],
    fault: Fault | None = None,
    dtype: torch.dtype = torch.float64,
    dead: bool = False,
) -> Step:
    """dead: no row reaches the first layer."""
    draw = torch.Generator().manual_seed(0)
    before, own = list[Tensors](), list[list[Tensors]]()
    for rank, of_rank in enumerate(counts):
        model = mlp(8, 6, 3, dtype=dtype)
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            parameters["0.bias"].add_(-9 if dead else 0.3)
            parameters["2.bias"].add_(0.01 * rank * (fault is _another_start))
        before.append({name: p.detach().clone() for name, p in parameters.items()})
        own.append([])
        for count in of_rank:
            inputs = torch.rand(count, 8, generator=draw).to(dtype)
            targets = torch.randint(3, (count,), generator=draw)
            loss = F.cross_entropy(model(inputs), targets)
            gradients = torch.autograd.grad(loss, list(parameters.values()))
            own[-1].append(dict(zip(parameters, gradients, strict=True)))
    step = Step(before, [], own, counts)
    rows = sum(map(sum, counts))
    shares = [[count / rows for count in each] for each in counts]
    seen = [_sum(step, shares) for _ in counts]  # of each rank
    if fault:
        fault(seen, step)
    for w, g in zip(before, seen, strict=True):
        step.after.append({name: w[name] - LR * g[name] for name in w})
    return step


def _sum(step: Step, weights: list[list[float]]) -> Tensors:
    """Of all micro-batches' gradients, with these weights by rank."""
    parts = [
        (w, g)
        for of_rank, own in zip(weights, step.own, strict=True)
        for w, g in zip(of_rank, own, strict=True)
    ]
    return {name: sum(w * g[name] for w, g in parts) for name in step.before[0]}  # type: ignore


def _times(factor: float, names: set[str], rank: int | None = None) -> Fault:
    def fault(seen: list[Tensors], step: Step) -> None:
        for each in seen if rank is None else [seen[rank]]:
            for name in names:
                each[name] = factor * each[name]

    return fault


def _weights(weights: list[list[float]], names: set[str] = ALL, only: int | None = None) -> Fault:
    def fault(seen: list[Tensors], step: Step) -> None:
        for each in seen if only is None else [seen[only]]:
            each.update({n: g for n, g in _sum(step, weights).items() if n in names})

    return fault


def _another_start(seen: list[Tensors], step: Step) -> None:
    """`_step` gives the ranks other weights."""


def _decay(seen: list[Tensors], step: Step) -> None:
    for each, w in zip(seen, step.before, strict=True):
        each.update({name: each[name] + 0.1 * w[name] for name in BIASES})


def _half(seen: list[Tensors], step: Step) -> None:
    for each in seen:
        each["0.weight"] = torch.cat([each["0.weight"][:3], 0 * each["0.weight"][3:]])


def _left_over(seen: list[Tensors], step: Step) -> None:
    for each in seen:
        each.update({name: each[name] + step.own[1][0][name].flip(0) for name in LAST})


RIGHT: list[tuple[str, list[list[int]], dict[str, Any]]] = [
    ("an ordinary one", EVEN, {}),
    ("with 7, 1, 5 and 3 rows", UNEVEN, {}),
    ("in which no row reaches the first layer", EVEN, {"dead": True}),
    ("in float32", UNEVEN, {"dtype": torch.float32}),
]
FAULTS: dict[str, tuple[set[str], list[list[int]], Fault]] = {
    "gradients are added up, and not averaged": (ALL, EVEN, _times(2, ALL)),
    "the sign is wrong": (ALL, EVEN, _times(-1, ALL)),
    "the first layer's gradients are divided twice": (FIRST, EVEN, _times(0.5, FIRST)),
    "7 rows, 1, 5 and 3 count the same": (ALL, UNEVEN, _weights([[0.25] * 2] * 2)),
    "an earlier micro-batch is divided again": (ALL, EVEN, _weights([[0.125, 0.25]] * 2)),
    "rank 1 keeps its own gradient of the last layer": (
        LAST,
        EVEN,
        _weights([[0, 0], [0.5, 0.5]], LAST, only=1),
    ),
    "all ranks take the gradient of rank 0": (ALL, EVEN, _weights([[0.5, 0.5], [0, 0]])),
    "rank 1 weighs a hundredth too much in one bias": (
        {"2.bias"},
        EVEN,
        _weights([[0.25, 0.25], [0.2525, 0.2525]], {"2.bias"}),
    ),
    "half of a weight's gradient did not arrive": ({"0.weight"}, EVEN, _half),
    "an earlier step's gradient of the last layer was left": (LAST, EVEN, _left_over),
    "biases have weight decay": (BIASES, EVEN, _decay),
    "the ranks began with other biases": ({"2.bias"}, EVEN, _another_start),
}
