"""What a call of the backend gives back."""

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from minidist.common.uncompiled import uncompiled

if TYPE_CHECKING:
    from minidist.backend.callbacks import Reservation
    from minidist.backend.engine import Engine

_FUTURES = threading.Lock()  # guards a handle's future, which is made on first request


class Outcome:
    """How a call ends. The threads that work hold this, and not the handle: once it is `ended` it
    holds no tensor, but for those in the traceback of an error.

    `what()` describes the call. Neither that text nor a future is made before somebody asks.
    """

    def __init__(self, result: list[Any], what: Callable[[], str]) -> None:
        self.result: list[Any] | None = result
        self.what = what
        self.error: BaseException | None = None
        self.settled = False  # the result, or the error, is known
        self.ended = False  # settled, and its callbacks have run
        self.promise: torch.futures.Future[Any] | None = None  # its value may be an error
        self.reservation: Reservation | None = None  # for what its callbacks call

    def end(self, error: BaseException | None = None) -> None:
        """The operation has ended, with this error if any. A second call changes nothing: where a
        group fails, several threads may end what is under way."""
        mine = False
        try:
            with _FUTURES:
                if self.settled:
                    return
                self.error, self.settled = error, True
                mine = True  # whatever interrupts us from here on, it ends
            if self.promise is not None:
                with self.reservation or contextlib.nullcontext():
                    self.promise.set_result(self.result if error is None else error)
        finally:
            if mine:
                try:
                    if self.promise is not None and not self.promise.done():  # we were interrupted
                        self.promise.set_result(self.result if error is None else error)
                    if self.reservation is not None:
                        self.reservation.release()
                finally:
                    self.result = self.promise = None
                    self.ended = True  # after the future: who has waited may take its value


@uncompiled
class Handle(dist.Work):
    """What a call gives back: `wait` for its end, or take its future."""

    def __init__(self, result: list[Any], what: Callable[[], str]) -> None:
        super().__init__()
        self.outcome, self._result = Outcome(result, what), result
        self._future: torch.futures.Future[Any] | None = None  # raises the error
        self.engine: Engine | None = None
        self.source = -1  # of a message
        self.reserve: Callable[[], Reservation] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end. Raises what went wrong."""
        outcome = self.outcome
        if not outcome.ended and self.engine is not None:
            self.engine.wait(outcome, timeout.total_seconds())
            if not outcome.ended:
                raise RuntimeError(f"Timed out waiting {timeout.total_seconds():g} s")
        if outcome.error is not None:
            raise outcome.error
        return True

    def is_completed(self) -> bool:
        return self.outcome.ended

    def is_success(self) -> bool:
        return self.outcome.ended and self.outcome.error is None

    def exception(self) -> BaseException | None:
        return self.outcome.error

    def result(self) -> list[Any]:
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """Its value is the result. In a callback, wait for a handle (`Work.wait`), not for another
        future: that waits in C++, and the thread that it stops may be the one that works."""
        outcome, reservation, late = self.outcome, None, None
        if self.reserve is not None and outcome.reservation is None and not outcome.settled:
            reservation = self.reserve()
        with _FUTURES:
            if outcome.reservation is None and not outcome.settled:
                outcome.reservation, reservation = reservation, None
            if self._future is None:
                # Not set_exception: called from Python, it would end the process.
                promise: torch.futures.Future[Any] = torch.futures.Future()
                self._future = promise.then(_raise)
                if outcome.settled:
                    late = promise
                else:
                    outcome.promise = promise
        if reservation is not None:
            reservation.release()  # too late: callbacks run as they are attached
        if late is not None:
            late.set_result(self._result if outcome.error is None else outcome.error)
        return self._future

    def _source_rank(self) -> int:
        return self.source


def _raise(future: torch.futures.Future[Any]) -> Any:
    value = future.value()
    if isinstance(value, BaseException):
        raise value
    return value
