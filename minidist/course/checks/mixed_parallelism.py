"""The puzzles and the exercise of the lesson mixed_parallelism."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from minidist.course.checks.verdict import (
    NotYet,
    check,
    function,
    require_right,
    shown,
)

Sizes = tuple[int, int, int]  # data, pipeline, tensor


class Part(NamedTuple):
    """One gradient of a rank. cut: the ranks along tensor have other parts of it; else they have
    the same. elsewhere: an earlier stage has the same parameter, and counts it."""

    gradient: torch.Tensor
    cut: bool
    elsewhere: bool


@check
def replicas_left(answer: object) -> None:
    """Whole replicas of four on a mesh of 4 × 2 × 4, nodes of 8, when one node fails: with data
    outermost; and with pipeline, data, tensor."""
    numbers = _whole_numbers(answer, "two numbers, such as (4, 4)")
    if len(numbers) != 2:
        raise NotYet("give two numbers, such as (4, 4).")
    data_first, pipeline_first = numbers
    if data_first != 3:
        raise NotYet(f"with data outermost it is not {data_first}: look whose ranks 8 to 15 are.")
    if pipeline_first == 0:
        raise NotYet("with pipeline outermost a node has one stage, but not that of all replicas.")
    if pipeline_first != 2:
        raise NotYet(f"with pipeline outermost it is not {pipeline_first}: look who shares a node.")


@check
def mesh(answer: object) -> None:
    """(data, pipeline, tensor) by the recipe: 64 GPUs, 8 a node, 900 GB, 60 GB on each."""
    sizes = tuple(_whole_numbers(answer, "three sizes, (data, pipeline, tensor)"))
    if len(sizes) != 3 or min(sizes) < 1:
        raise NotYet("give three sizes, (data, pipeline, tensor).")
    data, pipeline, tensor = sizes
    if data * pipeline * tensor != 64:
        raise NotYet(f"a mesh of {shown(sizes)} is for {data * pipeline * tensor} GPUs, not 64.")
    if tensor > 8:
        raise NotYet(f"{tensor} GPUs along tensor are more than a node has.")
    if pipeline * tensor < 15:
        each = 900 / (pipeline * tensor)
        raise NotYet(f"then each GPU holds {each:.0f} GB, and has room for 60.")
    if pipeline * tensor > 16:
        raise NotYet(f"the model fits on 16 GPUs, and you cut it into {pipeline * tensor}.")
    if tensor < 8:
        raise NotYet("the model fits, but tensor comes first, up to the size of a node.")


@check
def norm(answer: object) -> None:
    """`my_norm(parts, data, pipeline, tensor)`: the gradient norm of the whole model."""
    for sizes in (8, 1, 1), (2, 2, 2), (1, 2, 4), (1, 4, 2):
        on = " × ".join(map(str, sizes))
        results = require_right(
            _trial, function(answer), sizes, world_size=8, where=f", {on}", of_rank=""
        )
        require_norm((value for _, value in results), *_squares(sizes), on)


def require_norm(
    values: Iterable[float], squared: float, wrong: Mapping[str, float], on: str
) -> None:
    """Refuse the ranks' norms unless each is the root of `squared`, to 12 digits. `wrong` has the
    squares that mistakes give."""
    wanted = squared**0.5
    near = [(n**0.5, f": {says}") for says, n in wrong.items() if abs(n / squared - 1) > 1e-9]
    for rank, value in enumerate(values):
        if not abs(value / wanted - 1) <= 1e-12:  # nor is it nan
            hint = next((says for norm, says in near if abs(value / norm - 1) < 1e-6), "")
            raise NotYet(f"on {on}, rank {rank} has {value:.12g}, one process {wanted:.12g}{hint}.")


def _trial(my_norm: Callable[..., Any], sizes: Sizes) -> tuple[str, float]:
    """What is strange about the answer of this rank, if anything; and the answer."""
    axes = dist.init_device_mesh("cpu", sizes, mesh_dim_names=("data", "pipeline", "tensor"))
    coordinates = axes.get_coordinate()
    assert coordinates is not None
    _, p, t = coordinates
    groups = [axes.get_group(name) for name in ("data", "pipeline", "tensor")]
    parts = _parts(sizes, p, t)
    found = my_norm(parts, *groups)
    pairs = zip(parts, _parts(sizes, p, t), strict=True)
    if not all(torch.equal(part.gradient, before.gradient) for part, before in pairs):
        return "my_norm changes the gradients, and the optimizer still needs them", 0.0
    try:
        return "", float(found)
    except Exception:  # whatever an odd object raises
        return f"give a tensor with the norm, or a number: {shown(found)} is neither", 0.0


def _whole(sizes: Sizes) -> list[tuple[torch.Tensor, int, bool]]:
    """Gradients of a whole model, the stages that have them, and whether tensor cuts them."""
    draw = torch.Generator().manual_seed(0)
    whole = []
    for stage in range(sizes[1]):
        whole.append((torch.randn(16, 6, generator=draw, dtype=torch.float64), stage, True))
        whole.append((torch.randn(6, generator=draw, dtype=torch.float64), stage, False))
    return [(torch.randn(24, 6, generator=draw, dtype=torch.float64), 0, True), *whole]


def _parts(sizes: Sizes, p: int, t: int) -> list[Part]:
    """Those of a rank. The first is on the last stage, too: the embedding is tied."""
    parts = []
    for number, (gradient, stage, cut) in enumerate(_whole(sizes)):
        again = number == 0 and p == sizes[1] - 1 and p > 0
        if stage == p or again:
            own = gradient.chunk(sizes[2])[t] if cut else gradient
            parts.append(Part(own.clone(), cut, again))
    return parts


def _squares(sizes: Sizes) -> tuple[float, dict[str, float]]:
    """The square of the whole model's norm, and those that mistakes give."""
    data, pipeline, tensor = sizes
    whole = _whole(sizes)
    cut, kept = (sum(float(g.square().sum()) for g, _, c in whole if c is b) for b in (True, False))
    table = float(whole[0][0].square().sum()) if pipeline > 1 else 0.0
    right = cut + kept
    return right, {
        "it has no root": right**2,
        "along data the gradients are the same, and count once": data * right,
        "what the tensor group has whole counts once": cut + tensor * kept,
        "the tied embedding counts once": right + table,
        "what is whole, and the tied embedding, count once": right + table + (tensor - 1) * kept,
    }


def _whole_numbers(answer: Any, what: str) -> list[int]:
    try:
        given = list(answer)
        numbers = [int(each) for each in given]
    except Exception:  # whatever an odd object raises
        given, numbers = [answer], []
    if numbers != given:
        raise NotYet(f"give {what}, not {shown(answer)}.")
    return numbers
