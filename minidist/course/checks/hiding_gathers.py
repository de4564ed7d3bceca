"""The puzzles and the exercise of the lesson hiding_gathers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from minidist.course.checks.units_in_a_row import (
    SLOW,
    UNITS,
    gathers_otherwise,
    parts,
    trains_otherwise,
)
from minidist.course.checks.verdict import (
    NoTry,
    NotYet,
    check,
    function,
    puzzle,
    require_right,
    shown,
)

tokens = puzzle(__name__, "tokens")

HELP = {3, 6}
NO_HELP = {
    1: "a unit of twice the size takes twice as long to compute, and twice as long to gather",
    2: "each GPU has as many tokens as before",
    4: "each GPU has half of the rows then",
    5: "each GPU has computed earlier then, and waits longer",
}


@check
def helps(answer: Any) -> None:
    """Which of six changes leave a GPU less to wait for: a set of their numbers."""
    try:
        numbers = {int(each) for each in answer}
    except Exception:
        raise NoTry(f"give numbers, such as {{1, 2}}, not {shown(answer)}.") from None
    for number in sorted(numbers - HELP):
        raise NotYet(f"{number} does not help: {NO_HELP.get(number, 'there is no such change')}.")
    if missing := len(HELP - numbers):
        raise NotYet(f"so far it is right, but {missing} more would help.")


@check
def prefetch(answer: object) -> None:
    """A function that makes of modules a list of units: one computes, the next is gathered."""
    require_right(_in_a_row, function(answer), world_size=2, of_rank=": ", link=SLOW)


def _in_a_row(make: Callable[..., Any]) -> str:
    """What is wrong on this rank, if anything."""
    made = make(parts())
    try:
        units = list(made)
    except TypeError:
        return f"it must return a list of units, not {shown(made)}"
    if len(units) != UNITS or not all(isinstance(each, nn.Module) for each in units):
        return f"it must return {UNITS} units, one of each module, not {shown(made)}"
    data = torch.randn(3, 6, 2, 32, dtype=torch.float64)
    row = nn.Sequential(*units)
    return trains_otherwise(row, nn.Sequential(*parts()), data) or gathers_otherwise(row, data[0])
