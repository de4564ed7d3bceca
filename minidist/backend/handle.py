"""What a call of the backend gives back."""

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from minidist.backend.uncompiled import uncompiled

_FUTURES = threading.Lock()  # a handle's future is made by who asks for it, or else never


class Place(Protocol):
    """Where callbacks run: see `callbacks`."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def leave(self) -> None: ...


class Finisher(Protocol):
    """What goes on with operations: the engine."""

    def finish(self, handle: "Handle", seconds: float) -> None: ...


@uncompiled
class Handle(dist.Work):
    """What a call gives back: `wait` for its end, or take its future. `what()` describes the
    call. Neither a future nor a description is made before somebody asks for it."""

    def __init__(self, result: list[Any], what: Callable[[], str]) -> None:
        super().__init__()
        self._result, self.what = result, what
        self._error: BaseException | None = None
        self.over = False  # it is clear how
        self._first: torch.futures.Future[Any] | None = None  # has an error for its value
        self._future: torch.futures.Future[Any] | None = None  # raises it
        self.ended = False  # and its future too
        self.engine: Finisher | None = None
        self.source = -1  # of a message
        self.keep_place: Callable[[], Place] | None = None  # for what its callbacks call
        self._place: Place | None = None

    def end(self, error: BaseException | None = None) -> None:
        """The operation has ended, well or not. A second end changes nothing: where a group fails,
        several threads may end what is under way."""
        with _FUTURES:
            if self.over:
                return
            self._error, self.over, first, place = error, True, self._first, self._place
        try:
            if first is not None:
                with place or contextlib.nullcontext():
                    first.set_result(self._value())
        finally:
            self.ended = True  # after the future: who has waited may take its value

    @property
    def has_future(self) -> bool:
        """Whether somebody may have attached callbacks."""
        return self._first is not None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end. Raises what went wrong."""
        if not self.ended and self.engine is not None:
            self.engine.finish(self, timeout.total_seconds())
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
        keep = self.keep_place if self._place is None and not self.over else None
        place = keep() if keep is not None else None
        with _FUTURES:
            if self._place is None and not self.over:
                self._place, place = place, None
            if self._future is None or self._first is None:
                # An error is the first one's value: set_exception, called from Python, would end
                # the process.
                self._first = torch.futures.Future()
                self._future = self._first.then(_raise)
                over = self.over
            else:
                over = False
        if place is not None:
            place.leave()  # too late: callbacks run as they are attached
        if over:
            self._first.set_result(self._value())
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
