"""What a check is made of: the verdict, the sentence that a wrong answer gets, ranks to try it on.

A lesson's check is a function with the decorator `check`. It raises `NotYet`, with a sentence that
helps, or returns a sentence for the right answer:

    @check
    def bytes_sent(answer: object) -> str:
        number(answer, 6_000_000, "bytes", {24e6: "all ranks together send that"})
        return "every rank sends 2 (N - 1)/N of the vector."
"""

import functools
import math
import signal
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from minidist.rank import launch
from minidist.runtime import RankError

WAIT = 3.0  # seconds that a rank waits for another
DEADLINE = 6.0  # seconds that an answer may take, once


class NotYet(Exception):  # noqa: N818 (it is what a check says, not a fault)
    """The answer is wrong, for this reason."""


class Verdict(NamedTuple):
    """Whether an answer is right, and what to say about it. A notebook shows the sentence."""

    right: bool
    says: str

    def __repr__(self) -> str:
        return self.says


def check(judge: Callable[..., str]) -> Callable[..., Verdict]:
    """The check that gives the verdict of `judge`; an answer that is None is none yet."""

    @functools.wraps(judge)
    def verdict(answer: object) -> Verdict:
        try:
            if answer is None:
                raise NotYet("the answer is None. Put yours in its place.")
            return Verdict(True, f"Right: {judge(answer)}")
        except NotYet as reason:
            return Verdict(False, f"Not yet: {reason}")

    return verdict


def number(
    answer: Any, right: float, unit: str = "", wrong: Mapping[float, str] | None = None
) -> None:
    """Refuse all but the number `right` (to a millionth). `wrong` has hints for other numbers."""
    what = f"a number ({unit})" if unit else "a number"
    try:
        if isinstance(answer, str | bool):
            raise TypeError
        value = float(answer)
    except Exception:  # whatever an odd object raises
        raise NotYet(f"give {what}, not {shown(answer)}.") from None
    for other, hint in (wrong or {}).items():
        if math.isclose(value, other, rel_tol=1e-6):
            raise NotYet(f"{value:,g} is not it: {hint}.")
    if not math.isclose(value, right, rel_tol=1e-6):
        if value in [float(f"{right:.{digits}g}") for digits in range(2, 7)]:
            raise NotYet(f"{value:,g} is rounded: give all digits, or an expression such as 1 / 3.")
        raise NotYet(f"it is not {value:,g}{f' {unit}' if unit else ''}.")


def shown(thing: object) -> str:
    """The thing in a few characters, for a sentence."""
    try:
        text = " ".join(repr(thing).split())
    except Exception:
        text = f"this {type(thing).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def function(answer: object) -> Callable[..., Any]:
    """Refuse what cannot be called."""
    if not callable(answer) or isinstance(answer, type):
        raise NotYet(f"give the function itself, not {shown(answer)}.")
    return answer


def ranks(world_size: int) -> str:
    """1 rank, 2 ranks."""
    return f"{world_size} rank{'s' if world_size > 1 else ''}"


def on_ranks(
    trial: Callable[..., Any], *args: Any, world_size: int, where: str = "", **options: Any
) -> list[Any]:
    """`trial(*args)` on so many ranks. `trial` calls the answer; if it fails, the answer did."""
    try:
        sized = dict(world_size=world_size, timeout=WAIT, **options)
        return launch(_in_time, DEADLINE, trial, args, **sized)
    except RankError as error:
        first, _, rest = str(error).partition("\n\n")
        line = rest.strip().partition("\n\n")[0].split("\n")[-1].strip()
        at = f", in the line `{line}`" if rest.startswith("  ") else ""
        if "Pair is not connected" in first:  # gloo's words
            first = "a rank sends to itself, or receives from itself"
        said = textwrap.shorten(first, 240, placeholder=" …").rstrip(".")
        raise NotYet(f"on {ranks(world_size)}{where}: {said}{at}.") from None
    except TypeError as error:  # it cannot be sent to the ranks
        raise NotYet(f"{error}.") from None


def require_right(
    trial: Callable[..., Any], *args: Any, world_size: int, of_rank: str = " ", **options: Any
) -> None:
    """Refuse the answer if `trial`, on so many ranks, returns on one of them what is wrong. The
    sentence has the rank as its subject; if it has one of its own, `of_rank` is ": "."""
    results = on_ranks(trial, *args, world_size=world_size, **options)
    for rank, wrong in enumerate(results):
        if wrong:
            raise NotYet(f"on {ranks(world_size)}, rank {rank}{of_rank}{wrong}.")


def _in_time(seconds: float, trial: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    def late(*_: object) -> None:
        raise TimeoutError(f"it did not end within {seconds:g} s")

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return trial(*args)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
