"""Units in a row, each of which gathers the next while it computes: whether it does. For the check
`prefetch` of the lesson fully_sharded.

Each unit tells when it computes (`_Part`), and how many bytes of gathers have begun by then. Rank 1
begins with a unit only when rank 0 has computed it (`_Gate`): so rank 0 must not wait for the
gather of the next one.
"""

import itertools
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minidist.instruments.measure.record import Event, observed

UNITS, PATIENCE = 4, 2.0  # of a row; seconds that rank 1 waits for rank 0 to compute


class _Watch:
    """What this rank has gathered when a unit computes. While it is on, rank 1 follows rank 0."""

    numbers = itertools.count()

    def __init__(self) -> None:
        self.number = next(self.numbers)
        self.events: list[Event] = []
        self.on = False
        self.late = ""
        self.gathered: dict[tuple[str, int], int] = {}

    def bytes(self) -> int:
        """Of gathers that have begun."""
        sums = [e for e in self.events if "reduce" in (e.scope or e.operation)]
        other = [e for e in self.events if e.kind in ("collective", "sent") and e not in sums]
        return sum(event.nbytes for event in other)

    def computes(self, way: str, number: int) -> None:
        """Unit `number` computes forward, or has just computed backward."""
        if self.on and (way, number) not in self.gathered:
            self.gathered[way, number] = self.bytes()
            if dist.get_rank() == 0:
                _store().set(f"{self.number} {way} {number}", "")

    def follow(self, way: str, number: int) -> None:
        """Rank 1 begins with a unit when rank 0 has computed it. So rank 0 must not wait for what
        rank 1 begins there, the gather of the next one."""
        if not self.on or self.late or dist.get_rank() == 0:
            return
        end = time.monotonic() + PATIENCE
        while not _store().check([f"{self.number} {way} {number}"]):
            time.sleep(1e-3)
            if time.monotonic() > end:
                self.late = way
                return


_watch = _Watch()


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


class _Told(torch.autograd.Function):
    """Changes nothing. `forward` and `backward` are what is said where it stands."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, say: str, forward: int, backward: int) -> torch.Tensor:
        ctx.said = say, backward
        getattr(_watch, say)("forward", forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        say, number = ctx.said
        getattr(_watch, say)("backward", number)
        return gradient, None, None, None


class _Part(nn.Module):
    """A linear layer that tells when it computes."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.linear = number, nn.Linear(32, 32).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(_Told.apply(x, "computes", self.number, self.number)).tanh()


class _Gate(nn.Module):
    """Stands before unit `number`."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Told.apply(x, "follow", self.number, self.number - 1)


def parts() -> list[nn.Module]:
    """The modules of which an answer makes units."""
    torch.manual_seed(0)
    return [_Part(number) for number in range(UNITS)]


def in_a_row(units: list[nn.Module]) -> nn.Module:
    """One module of them, with a gate before each but the first. Nothing is watched yet."""
    global _watch
    _watch = _Watch()
    row = nn.Sequential()
    for i, each in enumerate(units):
        row.extend([_Gate(i), each] if i else [each])
    return row


def gathers_otherwise(row: nn.Module, x: torch.Tensor) -> str:
    """What is wrong in a step of the row, if anything."""
    dist.barrier()
    with observed() as _watch.events:
        _watch.on = True
        y = row(x.requires_grad_())
        of_forward = _watch.bytes()
        y.square().mean().backward()
        _watch.on = False
        of_all = _watch.bytes()
    if _watch.late:
        return (
            f"in {_watch.late} it waits for the gather of the next unit before it computes: begin "
            "that with async_op=True, and wait for it where the unit is used"
        )
    wrong = _wrong_in("forward", of_forward)
    return wrong or _wrong_in("backward", of_all - of_forward, of_forward)


def _wrong_in(way: str, total: int, before: int = 0) -> str:
    """Whether a unit computes before the next gather has begun, or after one that is not next."""
    if not total:
        return f"{way} gathers nothing"
    each = (before or total) / UNITS
    order = range(UNITS) if way == "forward" else range(UNITS)[::-1]
    kept = UNITS - total / each  # the last unit may stay from forward to backward
    if kept not in (0, 1):
        return f"{way} gathers {total / each:.3g} times a unit, and there are {UNITS}"
    for place, i in enumerate(order):
        ahead = (_watch.gathered[way, i] - before) / each - (place + 1 - kept)
        if ahead < 1 and place + 1 < UNITS:
            following = order[place + 1]
            return f"in {way}, when unit {i} computes, the gather of unit {following} has not begun"
        if ahead > 1:
            return (
                f"in {way}, when unit {i} computes, {ahead:.3g} more have been gathered: one "
                "is enough, and takes less memory"
            )
    return ""
