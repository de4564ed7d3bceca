"""Who failed first, and where the others were.

When one rank fails, the others fail too, or wait for ever: their errors are the noise that hides
the cause. Each rank's end of a call is an `Outcome`; `first_failure` picks the one to blame, and
`RankError` says it, in words that are the same at every run (no pids, ports or times).
"""

import re
import signal
import traceback
from dataclasses import dataclass
from typing import Any

import cloudpickle

from minidist.machine.runtime.stack import Stack, relabel

# What a rank's backend says when the fault is another rank's.
_DISCONNECTED = re.compile(r"Connection (closed|reset)|Broken pipe|caused pair closure")
_COMMUNICATION = re.compile(
    rf"gloo|NCCL|Timed out waiting|must make the same call|{_DISCONNECTED.pattern}"
)
_TIMEOUT = re.compile(r"[Tt]imed ?out|[Tt]imeout")

TOGETHER = 0.05  # seconds: within them, which rank was first is chance


@dataclass(frozen=True)
class Failure:
    """An exception, taken apart so that it can leave its process."""

    type: str
    message: str
    stack: Stack
    text: str  # the whole traceback, as Python prints it
    when: float  # time.monotonic(), in the rank, where it was raised
    is_communication: bool
    is_exit: bool
    pickled: bytes | None

    @property
    def is_timeout(self) -> bool:
        return self.is_communication and bool(_TIMEOUT.search(self.message))

    @classmethod
    def of(cls, error: BaseException, when: float, pickled: bytes | None) -> "Failure":
        chain, link = {}, error  # type: dict[int, BaseException], BaseException | None
        while link is not None and id(link) not in chain:
            chain[id(link)] = link
            link = link.__context__ if link.__cause__ is None else link.__cause__
        return cls(
            type=type(error).__name__,
            message=_said(error),
            stack=Stack.of(error.__traceback__),
            text="".join(traceback.format_exception(error)),
            when=when,
            is_communication=any(
                isinstance(e, RuntimeError | OSError) and bool(_COMMUNICATION.search(_said(e)))
                for e in chain.values()
            ),
            is_exit=isinstance(error, SystemExit),
            pickled=pickled,
        )


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except (Exception, SystemExit):
        return "<exception str() failed>"  # Python's own words for it


@dataclass
class Outcome:
    """How a call ended on one rank."""

    rank: int
    returned: bool = False
    value: Any = None
    failure: Failure | None = None
    exitcode: int | None = None  # its process ended
    when: float = 0.0  # time.monotonic()
    stack: Stack | None = None  # it was still running: here (None: no answer)
    progress: int = 0  # how often it communicated in this call

    @property
    def exception(self) -> BaseException | None:
        """The rank's own exception, where it could be brought back."""
        try:
            error = cloudpickle.loads(self.failure.pickled or b"") if self.failure else None
        except Exception:  # what could be rebuilt in the rank, perhaps not here
            return None
        return error if isinstance(error, BaseException) else None

    @property
    def summary(self) -> str:
        """How it failed, and where, in one line: the same text means the same failure."""
        return f"{self.failure.type}: {self.failure.message}, {self.where}" if self.failure else ""

    @property
    def where(self) -> str:
        """Where this rank was when another one failed."""
        if self.returned:
            return "had finished"
        if self.exitcode is not None:
            return _ending(self.exitcode)
        if self.failure is not None and not self.failure.is_communication:
            return ", ".join(
                [f"raised {self.failure.type} too", *map(str, self.failure.stack.own[-1:])]
            )
        stack = self.failure.stack if self.failure is not None else self.stack
        if stack is None:
            return "gave no answer (in native code, or stopped)"
        if not stack.own:
            return "had not begun"
        operation = stack.operation
        return (f"in {operation}, " if operation else "at ") + str(stack.own[-1])


def _ending(exitcode: int) -> str:
    if exitcode >= 0:
        return f"exited early, with code {exitcode}"
    names = {each.value: each.name for each in signal.Signals}  # not all of the real-time ones
    name = names.get(-exitcode, f"signal {-exitcode}")
    return f"was killed by {name}" + (
        " (kill -9, or the system had no memory left)" if name == "SIGKILL" else ""
    )


class RankError(RuntimeError):
    """A call failed on the ranks.

    Attributes: `rank`, the first rank that failed; `tracebacks`, the whole text of each exception
    by rank. `__cause__` is that rank's own exception, where it could be brought back.
    """

    def __init__(self, message: str, rank: int, tracebacks: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.tracebacks = tracebacks or {}

    def __reduce__(self) -> tuple[type, tuple[str, int, dict[int, str]]]:
        return type(self), (str(self), self.rank, self.tracebacks)

    def _render_traceback_(self) -> list[str]:
        # What IPython shows: the reader's own lines are in the message; ours would only hide them.
        return [f"RankError: {self}"]


def first_failure(outcomes: list[Outcome]) -> Outcome:
    """The rank to blame.

    A rank that died, left, or raised an error of its own comes before one whose backend complains
    about a peer. Where there are only timeouts, the rank that others waited for in vain.
    """
    causes = [
        o
        for o in outcomes
        if o.exitcode is not None or (o.failure and not o.failure.is_communication)
    ]
    complaints = [o for o in outcomes if o.failure and o.failure.is_communication]
    if not causes and any(o.failure and o.failure.is_timeout for o in complaints):
        causes = [o for o in outcomes if o.failure is None]
    candidates = causes or complaints or [o for o in outcomes if not o.returned]
    if len({o.summary for o in candidates}) == 1:  # a typo, say: it has no first
        return candidates[0]
    first = min(candidates, key=lambda o: o.when)
    # Nor has an error on the same line at almost the same time, whatever its text.
    same = [o for o in candidates if o.where == first.where and o.when - first.when < TOGETHER]
    return same[0]


def rank_error(outcomes: list[Outcome], timeout: float, lasts: bool) -> RankError:
    """The one error that says how a call failed, and whether the ranks are still there."""
    first = first_failure(outcomes)
    others = [o for o in outcomes if o is not first]
    who = f"rank {first.rank}"
    if others and first.failure and all(o.summary == first.summary for o in others):
        who, others = "every rank", []
    parts = [f"{who} {_blame(first, others, timeout)}"]
    if others:
        parts.append("Where the other ranks were:\n" + _listed(others))
    parts.append(
        "The ranks are still there, with all that they hold."
        if lasts
        else "The ranks were ended, and what they held is lost; the next call starts new ones."
    )
    tracebacks = {o.rank: o.failure.text for o in outcomes if o.failure}
    return RankError("\n\n".join(parts), first.rank, tracebacks)


def interruption(outcomes: list[Outcome]) -> KeyboardInterrupt:
    """What a reader who interrupts a call sees. Python ends a program by SIGINT only for a
    KeyboardInterrupt itself, so this is no class of its own, as RankError is."""
    message = "The ranks were ended. Where they were:\n" + _listed(outcomes)
    told = KeyboardInterrupt(message)
    told._render_traceback_ = lambda: [f"KeyboardInterrupt: {message}"]  # type: ignore[attr-defined]
    return told


def _listed(outcomes: list[Outcome]) -> str:
    there: dict[str, list[int]] = {}
    for outcome in outcomes:
        there.setdefault(outcome.where.replace("\n", "\n  "), []).append(outcome.rank)
    return "\n".join(f"  {_ranks(ranks)}: {where}" for where, ranks in there.items())


def _blame(first: Outcome, others: list[Outcome], timeout: float) -> str:
    if first.exitcode is not None:
        return _ending(first.exitcode)
    if first.failure is None:  # absent, while others waited in vain
        waited = [o.failure.stack.operation for o in others if o.failure]
        where = f"{first.where}." if first.returned else first.where
        where = f"was {where}" if where.startswith(("in ", "at ")) else where
        return f"did not join {waited[0] or 'the others'} within {timeout:g} s. It {where}"
    if first.failure.is_exit:
        code = f"sys.exit({first.failure.message})"
        return f"exited early: {code}" + _lines(first.failure.stack)
    message = relabel(first.failure.message)
    said = f"raised {first.failure.type}" + (f": {message}" if message else "")
    operation = first.failure.stack.operation  # None: it did not come as far
    if operation and first.failure.is_timeout:
        said = f"waited {timeout:g} s in {operation}, in vain"
    elif operation and first.failure.is_communication and _DISCONNECTED.search(message):
        said = f"lost the connection to another rank in {operation}"
    return said + _lines(first.failure.stack)


def _lines(stack: Stack) -> str:
    lines = ["\n  " + str(frame).replace("\n", "\n  ") for frame in stack.own]
    if len(lines) > 20:  # a recursion without end
        lines[10:-10] = [f"\n  ... {len(lines) - 20} more ..."]
    return "".join(["\n", *lines]) if lines else ""


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
