"""What a call of the backend gives back."""

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from minidist.backend.uncompiled import uncompiled

if TYPE_CHECKING:
    from minidist.backend.callbacks import Reservation
    from minidist.backend.engine import Engine

_FUTURES = threading.Lock()  # guards a handle's future, which is made on first request


@uncompiled
class Handle(dist.Work):
    """What a call gives back: `wait` for its end, or take its future. `what()` describes the
    call. Neither a future nor a description is made before somebody asks for it."""

    def __init__(self, result: list[Any], what: Callable[[], str]) -> None:
        super().__init__()
        self._result, self.what = result, what
        self._error: BaseException | None = None
        self.settled = False  # the result, or the error, is known
        self._outcome: torch.futures.Future[Any] | None = None  # its value may be an error
        self._future: torch.futures.Future[Any] | None = None  # raises that error
        self.ended = False  # settled, and its callbacks have run
        self.engine: Engine | None = None
        self.source = -1  # of a message
        self.reserve: Callable[[], Reservation] | None = None  # for what its callbacks call
        self._reservation: Reservation | None = None

    def end(self, error: BaseException | None = None) -> None:
        """The operation has ended, with this error if any. A second call changes nothing: where a
        group fails, several threads may end what is under way."""
        with _FUTURES:
            if self.settled:
                return
            self._error, self.settled = error, True
            outcome, reservation = self._outcome, self._reservation
        try:
            if outcome is not None:
                with reservation or contextlib.nullcontext():
                    outcome.set_result(self._value())
        finally:
            self.ended = True  # after the future: who has waited may take its value

    @property
    def has_future(self) -> bool:
        """Whether somebody may have attached callbacks."""
        return self._outcome is not None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end. Raises what went wrong."""
        if not self.ended and self.engine is not None:
            self.engine.wait(self, timeout.total_seconds())
            if not self.ended:
                raise RuntimeError(f"Timed out waiting {timeout.total_seconds():g} s")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self.ended

    def is_success(self) -> bool:
        return self.ended and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Any]:
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """Its value is the result. In a callback, wait for a handle (`Work.wait`), not for another
        future: that waits in C++, and the thread that it stops may be the one that works."""
        reserve = self.reserve if self._reservation is None and not self.settled else None
        reservation = reserve() if reserve is not None else None
        with _FUTURES:
            if self._reservation is None and not self.settled:
                self._reservation, reservation = reservation, None
            if self._future is None or self._outcome is None:
                # Not set_exception: called from Python, it would end the process.
                self._outcome = torch.futures.Future()
                self._future = self._outcome.then(_raise)
                late = self.settled
            else:
                late = False
        if reservation is not None:
            reservation.release()  # too late: callbacks run as they are attached
        if late:
            self._outcome.set_result(self._value())
        return self._future

    def _value(self) -> Any:
        return self._result if self._error is None else self._error

    def _source_rank(self) -> int:
        return self.source


def _raise(future: torch.futures.Future[Any]) -> Any:
    value = future.value()
    if isinstance(value, BaseException):
        raise value
    return value
