"""The notebook's side of the ranks: call them, and say what went wrong."""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from minidist.machine.runtime import pickling
from minidist.machine.runtime.processes import Processes
from minidist.machine.runtime.report import Outcome, interruption, rank_error


class Pool:
    """Processes that keep their state between calls.

    Call the pool to run a function on every rank; the results come in rank order. If a call
    fails, `RankError` says which rank failed first, and where the others were. Lesson: rank.

    environs: each rank's environment variables. stage(folder): a context manager that wraps a
    rank's life; it yields a function that counts the rank's operations so far, and finds in
    `folder` the files that ranks share. timeout: the seconds after which whatever a rank waits for
    raises an error by itself. imports: modules that the stage needs, imported once for all ranks.

    Limits: a module that is edited after ranks have imported it runs as it was, until there are
    new ranks. A rank that is stopped and does not read its call holds the caller, until that is
    interrupted. A process that the program forks does not call its ranks: there the pool starts
    others.
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
        self._calling = threading.Lock()
        self._closed = False
        self._start()
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
        call = _pickle(function, args, kwargs)
        if self.is_called:
            raise RuntimeError("these ranks are called already, and take one call at a time")
        with self._calling:
            if self._closed:
                raise RuntimeError("these ranks were closed")
            if self._processes.ended:
                self._start()
            outcomes = self._attempt(lambda: self._processes.call(call, sorted(set(ranks))))
        return [outcomes[rank].value for rank in ranks]

    def get(self, name: str, rank: int | None = None) -> Any:
        """Bring back what `name` is on `rank`, or on every rank: a list.

        It is looked up where `%%ranks` cells keep their names. A missing one is a RankError.
        """
        return self(_read, name) if rank is None else self.on([rank], _read, name)[0]

    @property
    def is_called(self) -> bool:
        """Whether a call is in progress, in whatever thread."""
        return self._calling.locked()

    @property
    def pids(self) -> list[int]:
        """The ranks' processes. Empty if the ranks have ended, or have not entered their stage."""
        return [] if self._processes.ended else self._processes.pids

    def close(self) -> None:
        """End the ranks: at once, or when the call in progress is over. Closing twice is no error,
        and a forked child's copy ends nothing."""
        Pool.opened.discard(self)
        self._closed = True
        if not self.is_called and not self._processes.ended:
            self._processes.close()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("a pool of ranks stays in the process that started it. Use it there only")

    def __repr__(self) -> str:
        return f"<{self.world_size} ranks{', closed' if self._closed else ''}>"

    def _start(self) -> None:
        self.era = object()  # another one whenever new processes are started
        self._processes = Processes(self._environs, self._stage, self._imports)
        self._attempt(self._processes.first_outcomes, may_last=False)

    def _attempt(
        self, action: Callable[[], dict[int, Outcome]], may_last: bool = True
    ) -> dict[int, Outcome]:
        """Let the processes do something. If it fails, they end, unless none owes a message."""
        processes = self._processes
        try:
            outcomes = action()
        except KeyboardInterrupt:
            try:
                told = interruption(processes.whereabouts())
            finally:  # who interrupts again does not want to wait
                processes.end()
            raise told from None
        except BaseException:
            processes.end()
            raise
        returned = all(outcome.returned for outcome in outcomes.values())
        lasts = returned or (may_last and all(map(_owes_nothing, outcomes.values())))
        if self._closed or not lasts:
            processes.end()
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
