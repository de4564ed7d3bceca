"""The puzzles and the exercise of the lesson layer_splitting."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from minidist.course.checks.verdict import (
    NotYet,
    check,
    function,
    hints,
    number,
    on_ranks,
    ranks,
    shown,
)
from minidist.pipeline import instructions as do
from minidist.pipeline import simulate, with_messages

WIDTH = 8
Passes = list[tuple[str, int]]  # ("forward" or "backward", the micro-batch), in order


@check
@hints(
    'The formula stands above the puzzle, under "The bubble". There are two: of the total '
    "time, and of the ideal time.",
    "The total is asked for. N is the number of ranks, and m that of micro-batches.",
    "Divide N − 1 by m + N − 1. Type it as an expression; then nothing is rounded.",
)
def idle_part(answer: object) -> str:
    """Of the total time, for 8 ranks and 32 micro-batches."""
    number(
        answer,
        7 / 39,
        wrong={
            7 / 32: "that is the idle time as a part of the ideal time, not of the total",
            8 / 39: "a rank waits for the other 7",
            8 / 40: "a rank waits for the other 7",
            7 / 40: "a step takes 3 (m + N - 1) units of time",
            100 * 7 / 39: "give a part of 1, not per cent",
            32 / 39: "that is the part in which it works",
        },
    )
    return "7 / (32 + 7). Of the ideal time it would be 7 / 32."


@check
@hints(
    'Draw a row for each stage, as under "Who works when?", but with the micro-batches of '
    "GPipe. The third stage is twice as slow as the others. Forward first.",
    "Once it has begun, the slow stage works without a pause. What does the first "
    "micro-batch pass before it, and the last one after it?",
    "Forward: two quick stages, then the slow one for each micro-batch, then one quick "
    "stage. Backward is the same at twice the time. Add both.",
)
def slow_stage(answer: object) -> str:
    """Milliseconds of a GPipe step in which one of four stages is slow."""
    number(
        answer,
        570,
        "ms",
        {
            330: "that is a step without the slow stage",
            660: "only one of the four stages is slow",
            1200: "the stages work at the same time",
            190: "that is forward only; backward comes after it",
            480: "that is what the slow stage works; it also waits, for the others",
            412.5: "that is a step of four stages of 12.5 ms",
            0.57: "give milliseconds",
        },
    )
    return "(10 + 10 + 8 × 20 + 10) forward, and twice that backward. The slow stage sets the pace."


@check
@hints(
    'Look at the lower panel under "1F1B". How many forward passes has each rank before its'
    " first backward pass?",
    "The last rank has one, and each rank before it one more, but never more than m. Then "
    "forward and backward take turns, and at the end backward passes are left.",
    "Make two functions of the body of `gpipe_step`, one for forward and one for backward, "
    "and a queue of what is in flight. Send by `isend`, keep the work and the tensor, and "
    "wait for all of them at the end.",
)
def one_f_one_b(answer: object) -> str:
    """A training step in the order 1F1B, on a backend whose `send` waits for the receiver."""
    step = function(answer)
    for world_size, m in (1, 3), (2, 2), (3, 4), (4, 2), (4, 6):
        results = on_ranks(
            _trial, step, m, world_size=world_size, where=" over gloo", backend="gloo"
        )
        _judge(results, world_size, m)
    return (
        "on 1, 2, 3 and 4 ranks, over gloo: the gradients, the loss, what is kept, and the idle "
        "time."
    )


def _judge(results: list[tuple[str, Passes]], world_size: int, m: int) -> None:
    on = f"{ranks(world_size)}, with {m} micro-batches"
    for rank, (wrong, _) in enumerate(results):
        if wrong:
            raise NotYet(f"on {on}, rank {rank} {wrong}.")
    for rank, (_, passes) in enumerate(results):
        kept, limit = _most_in_flight(passes), min(m, world_size - rank)
        if kept > limit:
            raise NotYet(
                f"the gradients are right, but on {on}, rank {rank} keeps {kept} micro-batches, "
                f"not {limit}."
            )
    kinds = {"forward": do.Forward, "backward": do.Backward}
    orders = [
        [kinds[kind](rank, i) for kind, i in passes] for rank, (_, passes) in enumerate(results)
    ]
    idle = simulate(with_messages("yours", orders, world_size, m)).idle
    if idle > (wanted := (world_size - 1) / (m + world_size - 1)) + 1e-9:
        raise NotYet(
            f"the gradients are right, but on {on}, the ranks are idle for {idle:.0%} of the "
            f"time, with 1F1B {wanted:.0%}."
        )


def _most_in_flight(passes: Passes) -> int:
    kept = most = 0
    for kind, _ in passes:
        kept += 1 if kind == "forward" else -1
        most = max(most, kept)
    return most


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
    pairs = list(zip(found, wanted, strict=True))
    if all(torch.allclose(a, m * b, rtol=1e-9, atol=1e-12) for a, b in pairs) and m > 1:
        return f"has gradients {m} times as large as those of one process", passes
    if not all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in pairs):
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
