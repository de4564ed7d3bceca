"""The notebook's side of the ranks: call them, and say what went wrong."""

import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, ClassVar

from minidist.machine.runtime import pickling
from minidist.machine.runtime.processes import Processes
from minidist.machine.runtime.report import Outcome, edits, interruption, rank_error


class Pool:
    """Processes that keep their state between calls.

    Call the pool to run a function on every rank; the results come in rank order. If a call
    fails, `RankError` says which rank failed first, and where the others were. Lesson: rank.

    environs: each rank's environment variables. stage(folder): a context manager that wraps a
    rank's life; it yields a function that counts the rank's operations so far, and finds in
    `folder` the files that ranks share. timeout: the seconds after which whatever a rank waits for
    raises an error by itself. imports: modules that the stage needs, imported once for all ranks.
    """

    opened: "ClassVar[weakref.WeakSet[Pool]]" = weakref.WeakSet()  # all that are not closed

    def __init__(
        self,
        environs: Sequence[dict[str, str]],
        stage: Callable[[str], Any],
        timeout: float,
        imports: Sequence[str] = (),
    ) -> None:
        self.world_size = len(environs)
        self._environs, self._timeout, self._imports = list(environs), timeout, list(imports)
        self._stage = pickling.dumps(stage)
        self._lock = threading.RLock()  # a signal handler may call or close us amid a call
        self._owner = os.getpid()
        self._closed = False
        self._processes: Processes | None = None
        self.era = object()  # another one whenever new processes are started
        # Those that were started last. They end when nobody refers to them any more.
        self._latest: Callable[[], Processes | None] = lambda: None
        self._started()
        Pool.opened.add(self)

    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Run `function(*args, **kwargs)` on every rank: the results, in rank order.

        Raises TypeError, before any rank has begun, if the function or an argument cannot be
        pickled; RankError if a rank fails.
        """
        return self.on(range(self.world_size), function, *args, **kwargs)

    def on(
        self, ranks: Sequence[int], function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> list[Any]:
        """The same on some ranks only: the results, in the order of `ranks`."""
        for rank in ranks:
            if rank not in range(self.world_size):
                raise ValueError(f"there is no rank {rank} among {self.world_size} ranks")
        if os.getpid() != self._owner:
            raise RuntimeError(
                "these ranks belong to the process that this one was forked from. "
                "Start ranks of its own here: md.ranks"
            )
        call, nested = _pickle(function, args, kwargs), self._is_calling()
        with self._lock:
            if self._closed or (self._processes is not None and self._processes.ended):
                raise RuntimeError("these ranks were closed")
            if nested:
                raise RuntimeError("these ranks are called already, by this thread")
            processes = self._started()
            if self._closed:  # by a signal handler
                raise RuntimeError("these ranks were closed")
            outcomes = self._attempt(processes, lambda: processes.call(call, sorted(set(ranks))))
        return [outcomes[rank].value for rank in ranks]

    def get(self, name: str, rank: int | None = None) -> Any:
        """Bring back what `name` is on `rank`, or on every rank: a list.

        It is looked up where `%%ranks` cells keep their names. A missing one is a RankError.
        """
        if rank is None:
            return self(_read, name)
        return self.on([rank], _read, name)[0]

    @property
    def pids(self) -> list[int]:
        """The ranks' processes. Empty if the ranks have ended, or have not entered their stage."""
        latest = self._latest()
        return [] if latest is None or latest.ended else latest.pids

    def now(self) -> list[str]:
        """What each rank does. Any thread may ask, also amid a call. Empty where `pids` is, and in
        a forked process."""
        latest = self._latest()
        return latest.now() if latest and self.pids and os.getpid() == self._owner else []

    def close(self) -> None:
        """End the ranks. Closing twice is no error, and a forked child's copy ends nothing."""
        if os.getpid() != self._owner:
            return
        Pool.opened.discard(self)
        nested = self._is_calling()
        with self._lock:
            self._closed = True
            processes, self._processes = self._processes, None  # first: if it is interrupted
            if processes is not None and not processes.ended:
                processes.close()
            elif not nested:
                self._end_lost()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("a pool of ranks stays in the process that started it. Use it there only")

    def __repr__(self) -> str:
        return f"<{self.world_size} ranks{', closed' if self._closed else ''}>"

    def _started(self) -> Processes:
        if self._processes is None:
            self._end_lost()
            self.era = object()
            processes = Processes(self._environs, self._stage, self._imports, self._timeout)
            self._latest = weakref.ref(processes)
            self._attempt(processes, processes.first_outcomes, may_last=False)
            return processes
        return self._processes

    def _is_calling(self) -> bool:
        """Whether this thread calls or closes us already. No flag, which an interrupt could leave
        as it is."""
        return self._lock._is_owned()  # type: ignore[attr-defined]

    def _end_lost(self) -> None:
        """End those of which an interrupt has made us forget."""
        lost = self._latest()
        if lost is not None and not lost.ended:
            lost.end()

    def _attempt(
        self,
        processes: Processes,
        action: Callable[[], dict[int, Outcome]],
        may_last: bool = True,
    ) -> dict[int, Outcome]:
        """Let the processes do something. If it fails, they end, unless none owes a message."""
        self._processes = None  # until all is well: whatever happens, no call finds them half ended
        try:
            outcomes = action()
        except KeyboardInterrupt:
            try:
                message = interruption(processes.whereabouts())
            finally:  # who interrupts again does not want to wait
                processes.end()
            raise KeyboardInterrupt(message) from None
        except BaseException:
            processes.end()
            raise
        returned = all(outcome.returned for outcome in outcomes.values())
        lasts = returned or (may_last and all(map(_owes_nothing, outcomes.values())))
        lasts = lasts and not self._closed
        if lasts:
            self._processes = processes
        else:
            processes.end()
        if (said := edits(list(outcomes.values()))) and sys.stderr is not None:
            sys.stderr.write(said)
        if returned:
            return outcomes
        error = rank_error(list(outcomes.values()), self._timeout, lasts)
        raise error from outcomes[error.rank].exception


def _owes_nothing(outcome: Outcome) -> bool:
    """Whether a rank can go on after a failed call, as after a typo in a cell.

    It can if it ended the call by itself and sent and received nothing in it. Otherwise a message
    may be on its way that nobody waits for, and the next `recv` would take it for its own.
    """
    failure = outcome.failure
    by_itself = outcome.returned or (
        failure is not None and not failure.is_communication and not failure.is_exit
    )
    return by_itself and outcome.progress == 0


def _pickle(function: Callable[..., Any], args: Any, kwargs: Any) -> bytes:
    try:
        return pickling.dumps((function, args, kwargs))
    except Exception as error:
        parts = {"the function": function}
        parts |= {f"argument {i}": arg for i, arg in enumerate(args)}
        parts |= {f"argument {name!r}": arg for name, arg in kwargs.items()}
        for what, part in parts.items():
            try:
                pickling.dumps(part)
            except Exception as why:
                kind = type(part).__name__
                raise TypeError(f"{what} (a {kind}) cannot be sent to the ranks: {why}") from error
        raise


def _read(name: str) -> Any:
    import __main__

    try:
        return vars(__main__)[name]
    except KeyError:
        raise NameError(f"name {name!r} is not defined on this rank") from None
