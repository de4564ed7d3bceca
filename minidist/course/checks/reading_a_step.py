"""The puzzles and the exercise of the lesson reading_a_step."""

import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from minidist.course.checks.verdict import (
    NoTry,
    NotYet,
    check,
    function,
    puzzle,
    require_right,
    shown,
)
from minidist.instruments import tracing
from minidist.instruments.tracing import Event, Trace
from minidist.instruments.tracing.events import in_order

# By rank: start and end of one all_reduce of 228 bytes, in milliseconds of its own clock.
CALL = {
    0: (0.00, 4.03),
    1: (0.03, 4.03),
    2: (0.02, 4.03),
    3: (0.05, 4.03),
    4: (0.01, 4.03),
    5: (4.01, 4.03),
    6: (6.54, 10.53),
    7: (0.06, 4.03),
}


tokens_a_second = puzzle(__name__, "tokens_a_second")


@check
def late(answer: Any) -> None:
    """(rank, milliseconds): who is late in CALL, and how long after the median of the others."""
    try:
        rank, value = answer
        who = int(rank)
    except Exception:  # whatever an odd object raises
        raise NoTry(f"give (rank, milliseconds), not {shown(answer)}.") from None
    if who != 5:
        start, end = CALL.get(who, (0.0, 0.0))
        waits = f"rank {who} was in the call for {end - start:.2f} ms, so it waited for somebody"
        raise NotYet(f"{waits}." if who in CALL else f"there is no rank {who}.")
    near = isinstance(value, float) and abs(value - 3.98) < 0.008  # without rank 6, 3.985
    puzzle(__name__, "late").judge(3.98 if near else value)


# ---- the exercise -----------------------------------------------------------------------------


class Case(NamedTuple):
    says: str
    trace: Trace
    start: float
    end: float


NAMES = "computing", "overlapped", "exposed", "idle"


@check
def breakdown(answer: object) -> None:
    """`breakdown(trace, start, end)`: the seconds computing, overlapped, exposed and idle."""
    require_right(_trial, function(answer), world_size=1, of_rank="")


def _trial(answer: Callable[..., Any]) -> str:
    """What is wrong with it, if anything."""
    close = partial(math.isclose, rel_tol=0, abs_tol=1e-6)
    for case in _cases():
        found, account = answer(*case[1:]), tracing.breakdown(*case[1:])
        right = [getattr(account, name) for name in NAMES]
        try:
            four = [float(each) for each in found]
            if len(four) != len(right):
                raise ValueError
        except Exception:  # whatever an odd object raises
            return f"give ({', '.join(NAMES)}) in seconds, not {shown(found)}"
        if all(map(close, four, right)):
            continue
        if all(map(close, sorted(four), sorted(right))):
            return f"{case.says}, these are the right four, but not ({', '.join(NAMES)})"
        for name, mine, wanted in zip(NAMES, four, right, strict=True):
            if not close(mine, wanted):
                return f"{case.says}, {name} comes to {mine:.6g} s, and it is {wanted:.6g} s"
    return ""


def _cases() -> Iterator[Case]:
    def case(
        says: str, computing: list[Any], sent: list[Any], start: float = 0, end: float = 12
    ) -> Case:
        phases = [Event("ProfilerStep#0", "phase", 0, 14)]
        work = [Event("aten::mm", "compute", *span) for span in computing]
        calls = [Event("all_reduce", "communication", *span) for span in sent]
        return Case(says, Trace(0, in_order([*phases, *work, *calls])), start, end)

    yield case("with an operation and a message at once", [(1, 5)], [(3, 8)])
    yield case("where an operation holds another", [(1, 9), (2, 4)], [(5, 10)])
    yield case("where operations follow each other", [(1, 3), (3, 4), (6, 7)], [(2, 9)])
    yield case("where two messages are under way", [], [(1, 6), (2, 7), (9, 10)])
    yield case("where an operation hides two messages", [(0, 6)], [(1, 4), (2, 5)])
    yield case("where events stick out of the window", [(1, 5), (8, 14)], [(2, 6), (9, 15)], 3, 12)
    yield case("where events lie outside the window", [(0, 1), (5, 6)], [(1, 2), (13, 14)], 3, 12)
    yield case("with one event around the window", [], [(0, 20)], 3, 12)
    yield case("without any event but the step", [], [])
    draw = random.Random(0)
    spans = [(t := 14 * draw.random(), t + 2 * draw.random()) for _ in range(18)]
    yield case("with 18 events at random", spans[:9], spans[9:], 1, 12)
