"""Units in a row, each of which gathers the next while it computes: whether they do, and whether
they train as they should. For the checks of the lessons fully_sharded and hiding_gathers.

Each unit notes when it computes (`_Part`). Afterwards we know how many bytes of gathers had begun
by then, and how many had arrived. Messages travel for a while, so who computes after the next
gather has arrived has waited for it.
"""

import time

import torch
import torch.distributed as dist
from torch import nn

from minidist.course.checks.verdict import same
from minidist.instruments.link import Link
from minidist.instruments.measure.record import Event, observed

UNITS = 4  # of a row
SLOW = Link(gbps=10, latency_us=20_000)

_moments: dict[tuple[str, int], float] = {}  # when a unit computed forward, and backward


class _Part(nn.Module):
    """A linear layer that notes when it computes."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.linear = number, nn.Linear(32, 32).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.note("forward")
        x = x.view_as(x)
        if x.requires_grad:
            x.register_hook(lambda _: self.note("backward"))
        return self.linear(x).tanh()

    def note(self, way: str) -> None:
        _moments.setdefault((way, self.number), time.perf_counter())


def parts() -> list[nn.Module]:
    """The modules of which an answer makes units."""
    torch.manual_seed(0)
    return [_Part(number) for number in range(UNITS)]


def trains_otherwise(module: nn.Module, alone: nn.Module, data: torch.Tensor) -> str:
    """Each rank trains on its rows, one process on all: data (steps, rows, T, C)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (module, alone)]
    for step, rows in enumerate(data):
        x, y = (each.clone().requires_grad_() for each in (rows[rank::size], rows))
        found, wanted = module(x), alone(y)
        if not same(found, wanted[rank::size]):
            if step == 0:
                return "its output is not that of the module"
            return (
                f"after {step} step{'s' if step > 1 else ''} its output is not that of one process "
                "that trained on all rows: is .grad this rank's shard of the ranks' mean gradient"
            )
        for optimizer in optimizers:
            optimizer.zero_grad()
        found.square().mean().backward()
        wanted.square().mean().backward()
        if y.grad is None or not same(x.grad, y.grad[rank::size] * size):
            return "the gradient of its input is not that of the module"
        for optimizer in optimizers:
            optimizer.step()
    return ""


def gathers_otherwise(row: nn.Module, x: torch.Tensor) -> str:
    """What is wrong in a step of the row, if anything: in each of three, as one may be held up."""
    said = [_wrong_in_a_step(row, x) for _ in range(3)]
    return said[0] if all(said) else ""


def _wrong_in_a_step(row: nn.Module, x: torch.Tensor) -> str:
    _moments.clear()
    with observed() as events:
        y = row(x.requires_grad_())
        between = time.perf_counter()
        y.square().mean().backward()
    sent = [e for e in events if e.kind in ("collective", "sent")]
    gathers = [e for e in sent if "reduce" not in (e.scope or e.operation)]
    forward = [e for e in gathers if e.start < between]
    unit = sum(e.nbytes for e in forward) / UNITS
    backward = [e for e in gathers if e.start > between]
    return _wrong_in("forward", forward, unit) or _wrong_in("backward", backward, unit)


def _wrong_in(way: str, gathers: list[Event], unit: float) -> str:
    """Whether a unit computes before the next gather has begun, when it has arrived, or after one
    that is not next."""
    if not gathers:
        return f"{way} gathers nothing"
    times = sum(e.nbytes for e in gathers) / unit
    kept = UNITS - times  # the last unit may stay from forward to backward
    if kept not in (0, 1):
        return f"{way} gathers {times:.3g} times a unit, and there are {UNITS}"
    order = range(UNITS) if way == "forward" else range(UNITS)[::-1]
    for place, i in enumerate(order):
        moment = _moments[way, i]
        own = place + 1 - kept  # gathers, with that of this unit
        begun = sum(e.nbytes for e in gathers if e.start < moment) / unit
        there = sum(e.nbytes for e in gathers if e.end and e.end < moment) / unit
        if begun > own + 1:
            return (
                f"in {way}, when unit {i} computes, {begun - own:.3g} more have been gathered: one "
                "is enough, and takes less memory"
            )
        if place + 1 < UNITS and begun < own + 1:
            following = order[place + 1]
            return f"in {way}, when unit {i} computes, the gather of unit {following} has not begun"
        if place + 1 < UNITS and there == own + 1:
            return (
                f"in {way} it waits for the gather of the next unit before it computes: begin that "
                "with async_op=True, and wait for it where the unit is used"
            )
    return ""
