"""The puzzles and the exercise of the lesson scaling_out."""

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from minidist.course.checks.verdict import check, function, puzzle, require_right, shown

Events = Sequence[float | tuple[str, float]]

fastest_ranks = puzzle(__name__, "fastest_ranks")
what_helps = puzzle(__name__, "what_helps")

CASES: dict[str, Events] = {
    "computing alone": [1.0, 2.0],
    "a message that is hidden": [("begin", 1.0), 3.0, ("wait", 0)],
    "a message that is hidden in part": [("begin", 3.0), 1.0, ("wait", 0), 1.0],
    "two messages, which share the line": [("begin", 2.0), ("begin", 2.0), 1.0, ("wait", 1), 1.0],
    "a line that was idle": [("begin", 1.0), 3.0, ("begin", 1.0), ("wait", 1), 1.0],
    "a wait for the first of two messages": [("begin", 1.0), ("begin", 5.0), ("wait", 0), 9.0],
    "a message that nobody waits for": [1.0, ("begin", 4.0), 2.0],
}


@check
def play(answer: object) -> None:
    """`play(events)`: the seconds of a step that computes, begins messages and waits for them."""
    require_right(_trial, function(answer), world_size=1, of_rank="")


def _trial(given: Callable[[Events], Any]) -> str:
    """What is wrong with it, if anything."""
    random, cases = Random(0), dict(CASES)
    for number in range(20):
        cases[f"random trace {number}"] = _random(random)
    for name, events in cases.items():
        found, right = given(list(events)), _seconds(events)
        if isinstance(found, bool) or not isinstance(found, int | float):
            return f"it returns {shown(found)}, not seconds"
        if not math.isclose(found, right, rel_tol=1e-9):
            said = f": {list(events)}" if len(events) < 6 else ""
            return f"{name}: this takes {right:g} s, not {found:g}{said}"
    return ""


def _random(random: Random) -> Events:
    events: list[float | tuple[str, float]] = []
    begun = 0
    for _ in range(12):
        kind = random.choice(["compute", "begin", "wait"])
        if kind == "compute":
            events.append(random.random())
        elif kind == "begin":
            events.append(("begin", 2 * random.random()))
            begun += 1
        elif begun:
            events.append(("wait", random.randrange(begun)))
    return events


def _seconds(events: Events) -> float:
    computed = line = 0.0
    arrived: list[float] = []
    for event in events:
        if not isinstance(event, tuple):
            computed += event
        elif event[0] == "begin":
            line = max(line, computed) + event[1]
            arrived.append(line)
        else:
            computed = max(computed, arrived[int(event[1])])
    return max(computed, line)
