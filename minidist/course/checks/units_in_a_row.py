"""Units in a row, each of which gathers the next while it computes: whether it does. For the check
`prefetch` of the lesson fully_sharded.

Each unit tells when it computes (`_Part`), and how many bytes of gathers have begun by then. Rank 1
begins with a unit only when rank 0 has computed it: so rank 0 must not wait for the gather of the
next one, which rank 1 begins there.
"""

import itertools
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minidist.instruments.measure.record import Event, observed

UNITS, PATIENCE = 4, timedelta(seconds=2)  # of a row; how long rank 1 waits for rank 0 to compute


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
        """Rank 1 waits here until rank 0 has computed this unit."""
        if self.on and not self.late and dist.get_rank() == 1:
            try:
                _store().wait([f"{self.number} {way} {number}"], PATIENCE)
            except dist.DistStoreError:
                self.late = way


_watch = _Watch()


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


class _Part(nn.Module):
    """A linear layer that tells when it computes."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.linear = number, nn.Linear(32, 32).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _watch.computes("forward", self.number)
        x = x.view_as(x)
        if x.requires_grad:
            x.register_hook(lambda _: _watch.computes("backward", self.number))
        return self.linear(x).tanh()


def parts() -> list[nn.Module]:
    """The modules of which an answer makes units."""
    torch.manual_seed(0)
    return [_Part(number) for number in range(UNITS)]


def in_a_row(units: list[nn.Module]) -> nn.Module:
    """One module of them. Nothing is watched yet."""
    global _watch
    _watch = _Watch()

    def follow(way: str, number: int, *_: Any) -> None:
        _watch.follow(way, number)

    for i, unit in enumerate(units):
        if i > 0:  # the first unit has nobody who gathers it ahead
            unit.register_forward_pre_hook(partial(follow, "forward", i), prepend=True)
        if i < UNITS - 1:
            unit.register_full_backward_pre_hook(partial(follow, "backward", i))
    return nn.Sequential(*units)


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
