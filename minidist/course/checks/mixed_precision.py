"""The puzzles and the exercise of the lesson mixed_precision."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from minidist.course.checks.verdict import NoTry, NotYet, check, function, on_ranks, puzzle, shown
from minidist.course.zoo import mlp
from minidist.fully_sharded import NaiveFullySharded
from minidist.mixed_precision import ShardedGradScaler

WORLD_SIZE = 3


stuck = puzzle(__name__, "stuck")
WAYS = {"ddp": False, "sharded": True, "pipeline": True, "tensor": True}  # whether they need it


@check
def need_agreement(answer: object) -> None:
    """The ways in which ranks must agree to leave out a step: a set of names of WAYS."""
    if isinstance(answer, str) or not isinstance(answer, set | list | tuple | frozenset):
        raise NoTry(f'give a set of names, such as {{"ddp", "pipeline"}}, not {shown(answer)}.')
    if strange := [each for each in answer if each not in [*WAYS]]:
        raise NotYet(f"{shown(strange[0])} is none of {', '.join(WAYS)}.")
    if "ddp" in answer:
        raise NotYet("with DDP an infinity of one rank is in the mean of all: they see it anyway.")
    missing = [name for name, needs in WAYS.items() if needs and name not in answer]
    if missing:
        raise NotYet(f"{len(missing)} more of them need it, too.")


@check
def agreed(answer: object) -> None:
    """A step that all ranks take, or none."""
    step = function(answer)
    inf, nan = float("inf"), float("nan")
    cases = [(None, 0.0, 0), (0, inf, 0), (1, -inf, -1), (2, nan, 1)]  # the last: which parameter
    for bad_rank, bad, place in cases:
        where = "where all gradients are finite" if bad_rank is None else f"with {bad} on one rank"
        spoilt = bad_rank, bad, place
        results = on_ranks(_trial, step, *spoilt, world_size=WORLD_SIZE, where=f", {where}")
        for said in sorted(filter(None, results), key=lambda said: "scales" not in said):
            raise NotYet(f"{where}, {said}.")


def _trial(step: Callable[..., Any], bad_rank: int | None, bad: float, place: int) -> str:
    """What is wrong on this rank, if anything."""
    wanted, right = _training(None, bad_rank, bad, place)
    found, weights = _training(step, bad_rank, bad, place)
    who = f"rank {dist.get_rank()}"
    if found != wanted:
        return f"{who} returns the scales {shown(found)} in four steps, not {wanted}"
    if not torch.allclose(weights, right, rtol=1e-5, atol=1e-7):
        return f"{who} has other weights than with md.ShardedGradScaler"
    return ""


def _training(
    step: Callable[..., Any] | None, bad_rank: int | None, bad: float, place: int
) -> tuple[list[Any], torch.Tensor]:
    """The scale after each of four steps, the second of them spoilt; this rank's weights."""
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(120, 64, generator=generator), torch.arange(120) % 10
    layers = mlp(64, 16, 10)
    model = nn.Sequential(NaiveFullySharded(layers[0]), layers[1], NaiveFullySharded(layers[2]))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler, scale, scales = ShardedGradScaler(init_scale=2.0**10), 2.0**10, list[Any]()
    for number_ in range(4):
        mine = slice(30 * number_ + dist.get_rank(), 30 * number_ + 30, dist.get_world_size())
        optimizer.zero_grad()
        (F.cross_entropy(model(images[mine]), labels[mine]) * scale).backward()
        if number_ == 1 and dist.get_rank() == bad_rank:
            held = [p.grad for p in model.parameters() if p.grad is not None and p.numel()]
            held[place].view(-1)[place] = bad
        if step is None:
            scaler.scale(torch.ones(()))  # it makes the scale when it is first asked
            scaler.step(optimizer)
            scaler.update()
            returned = scaler.get_scale()
        else:
            returned = step(optimizer, scale)
        try:
            scale = float(returned)
            scales.append(scale)
        except Exception:  # whatever an odd object raises; go on, for others wait
            scales.append(shown(returned))
    return scales, torch.cat([p.detach().flatten() for p in model.parameters()])
