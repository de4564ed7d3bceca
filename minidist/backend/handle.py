"""What a call of the backend gives back."""

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class Handle(dist.Work):
    """What a call gives back: `wait` for its end, or take its future. `what` tells the call."""

    def __init__(self, result: list[Any], what: str) -> None:
        super().__init__()
        self._result, self.what = result, what
        self._ended = threading.Event()
        self._error: BaseException | None = None
        # An error travels as a value: set_exception, called from Python, would end the process.
        self._told: torch.futures.Future[Any] = torch.futures.Future()
        self._future: torch.futures.Future[Any] = self._told.then(_value)
        self.source = -1  # of a message
        self.awaited = False  # by a thread, which computes nothing meanwhile

    def end(self, error: BaseException | None = None) -> None:
        """The operation has ended, well or not."""
        self._error = error
        self._told.set_result(self._result if error is None else error)
        self._ended.set()  # after the future: who has waited may take its value

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end. Raises what went wrong."""
        self.awaited = True
        if not self.is_completed() and not self._ended.wait(timeout.total_seconds() or None):
            self.awaited = False
            raise RuntimeError(f"Timed out waiting {timeout.total_seconds():g} s")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Any]:
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future

    def _source_rank(self) -> int:
        return self.source


def _value(future: torch.futures.Future[Any]) -> Any:
    value = future.value()
    if isinstance(value, BaseException):
        raise value
    return value
