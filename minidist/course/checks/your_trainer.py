"""The puzzles and the exercise of the lesson your_trainer."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from minidist.course.checks.mixed_parallelism import require_norm
from minidist.course.checks.verdict import (
    NoTry,
    NotYet,
    check,
    function,
    require_right,
    shown,
)

# In the order of the lesson.
OPERATIONS = "average along data", "unscale", "norm and clip", "join along tensor", "step"


@check
def unscaled_late(answer: object) -> None:
    """What a step of SGD does if the norm is taken of gradients that still have the loss scale."""
    says = {
        "too long": "the gradients are 1,024 times too large, and so is their norm; clipping takes "
        "that back, and the scaler still divides",
        "nothing": "clipping makes the norm 0.5, whatever it was; the scaler divides afterwards",
    }
    given = answer.strip().lower() if isinstance(answer, str) else ""
    if given not in (*says, "too short"):
        raise NoTry(f'give "too long", "too short" or "nothing", not {shown(answer)}.')
    if given != "too short":
        raise NotYet(f"it is not {given}: {says[given]}.")


@check
def order(answer: object) -> None:
    """The operations of a step, in the other order that trains as one process does."""
    given = list(answer) if isinstance(answer, list | tuple) else []
    if not all(isinstance(each, str) for each in given) or sorted(given) != sorted(OPERATIONS):
        raise NotYet(f"give a list of all five, each once, not {shown(answer)}.")
    at = {each: given.index(each) for each in OPERATIONS}
    for first, then, why in (
        ("average along data", "norm and clip", "the norm is that of the mean gradient"),
        ("unscale", "norm and clip", "the limit is for gradients without the scale"),
        ("norm and clip", "join along tensor", "once joined, a cut gradient counts on both ranks"),
        ("join along tensor", "step", "the optimizer needs whole gradients"),
    ):
        if at[first] > at[then]:
            raise NotYet(f"`{first}` comes before `{then}`: {why}.")
    if given == list(OPERATIONS):
        raise NotYet("that is the order of the lesson, and right: one more is.")


@check
def norm_of_stages(answer: object) -> None:
    """`norm_of_stages(shards, replicated, data, pipeline)`: the norm of all gradients."""
    for sizes in (2, 2), (4, 1), (1, 4):
        on = " × ".join(map(str, sizes))
        results = require_right(_trial, function(answer), sizes, world_size=4, where=f", {on}")
        values = (value for _, value in results)
        require_norm(values, *_squares(sizes), f"data × pipeline = {on}")


def _trial(norm: Callable[..., Any], sizes: tuple[int, int]) -> tuple[str, float]:
    """What is wrong with the answer of this rank, if anything; and the answer."""
    mesh = dist.init_device_mesh("cpu", sizes, mesh_dim_names=("data", "pipeline"))
    d, p = mesh.get_local_rank("data"), mesh.get_local_rank("pipeline")
    sharded, replicated = _gradients(p)
    shards = [each.chunk(sizes[0])[d].clone() for each in sharded]
    before = [each.clone() for each in (*shards, *replicated)]
    found = norm(shards, replicated, mesh.get_group("data"), mesh.get_group("pipeline"))
    if not all(map(torch.equal, before, (*shards, *replicated))):
        return "changes the gradients, and the optimizer still needs them", 0.0
    try:
        return "", float(found)
    except Exception:  # whatever an odd object raises
        return f"returns {shown(found)}, which is no number", 0.0


def _gradients(stage: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A stage's flat gradients, of which each rank along data has a shard, and its whole ones."""
    draw = torch.Generator().manual_seed(stage)
    sharded = [torch.randn(each, generator=draw, dtype=torch.float64) for each in (24, 8)]
    whole = [torch.randn(6, generator=draw, dtype=torch.float64)] if stage == 0 else []
    return sharded, whole


def _squares(sizes: tuple[int, int]) -> tuple[float, dict[str, float]]:
    """The square of the whole model's norm, and those that mistakes give."""
    data, stages = sizes
    pairs = [_gradients(stage) for stage in range(stages)]
    cut, whole = (sum(float(g.square().sum()) for p in pairs for g in p[i]) for i in (0, 1))
    right = cut + whole
    return right, {
        "it has no root": right**2,
        "what the ranks along data have whole counts once": cut + data * whole,
    }
