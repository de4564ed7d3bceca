"""The puzzles and the exercise of the lesson layer_splitting."""

import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from minidist.course.checks.verdict import (
    NotYet,
    check,
    function,
    puzzle,
    ranks,
    require_right,
    same,
    shown,
)
from minidist.pipeline import instructions as do
from minidist.pipeline import simulate, with_messages

WIDTH = 8
Passes = list[tuple[str, int]]  # ("forward" or "backward", the micro-batch), in order


idle_part = puzzle(__name__, "idle_part")
slow_stage = puzzle(__name__, "slow_stage")


@check
def one_f_one_b(answer: object) -> None:
    """A training step in the order 1F1B, on a backend whose `send` waits for the receiver."""
    for world_size, m in (1, 3), (2, 2), (3, 4), (4, 2), (4, 6):
        where = f", with {m} micro-batches"
        results = require_right(
            _trial, function(answer), m, world_size=world_size, where=where, backend="gloo"
        )
        _judge([passes for _, passes in results], m, f"{ranks(world_size)}{where}")


def _judge(passes: list[Passes], m: int, on: str) -> None:
    """Refuse what keeps more than 1F1B, or waits longer."""
    world_size = len(passes)
    for rank, mine in enumerate(passes):
        kept = max(accumulate(1 if kind == "forward" else -1 for kind, _ in mine))
        limit = min(m, world_size - rank)
        if kept > limit:
            raise NotYet(
                f"the gradients are right, but on {on}, rank {rank} keeps {kept} micro-batches, "
                f"not {limit}."
            )
    kinds = {"forward": do.Forward, "backward": do.Backward}
    orders = [[kinds[kind](rank, i) for kind, i in mine] for rank, mine in enumerate(passes)]
    idle = simulate(with_messages("yours", orders, world_size, m)).idle
    if idle > (wanted := (world_size - 1) / (m + world_size - 1)) + 1e-9:
        raise NotYet(
            f"the gradients are right, but on {on}, the ranks are idle for {idle:.0%} of the "
            f"time, with 1F1B {wanted:.0%}."
        )


def _trial(step: Callable[..., Any], m: int) -> tuple[str, Passes]:
    """What is wrong on this rank, if anything; and which passes it made, in order."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(world_size)]
    stages = [nn.Sequential(layer, nn.Tanh()) for layer in layers]
    batch = torch.randn(2 * m, WIDTH, dtype=torch.float64)
    labels = torch.randint(WIDTH, (2 * m,))
    stage = stages[rank]
    passes: Passes = []
    rows: list[int] = []
    loss = F.cross_entropy(nn.Sequential(*stages)(batch), labels)
    loss.backward()
    wanted = [p.grad.clone() for p in stage.parameters() if p.grad is not None]
    stage.zero_grad()

    def forward(_: nn.Module, __: Any, y: torch.Tensor) -> None:
        i = len(rows)
        rows.append(len(y))
        passes.append(("forward", i))
        if y.requires_grad:
            y.register_hook(lambda _: passes.append(("backward", i)))

    stage.register_forward_hook(forward)
    returned = step(stage, batch, labels, m, WIDTH)
    found = [p.grad for p in stage.parameters() if p.grad is not None]
    if rows != [2] * m:
        return f"runs forward on micro-batches of {rows or 'no'} rows, not {[2] * m}", passes
    if len(found) < len(wanted):
        return "has no gradients", passes
    if m > 1 and same(found, [m * each for each in wanted]):
        return f"has gradients {m} times as large as those of one process", passes
    if not same(found, wanted):
        return "has other gradients than one process", passes
    if sorted(passes) != sorted((kind, i) for kind in ("forward", "backward") for i in range(m)):
        return "does not run each micro-batch forward once and backward once", passes
    if rank == world_size - 1 and not _is(returned, loss.item()):
        return f"returns {shown(returned)}; the loss is {loss.item():.6f}", passes
    return "", passes


def _is(returned: Any, loss: float) -> bool:
    try:
        return math.isclose(float(returned), loss, rel_tol=1e-6)
    except Exception:  # whatever an odd object raises
        return False
