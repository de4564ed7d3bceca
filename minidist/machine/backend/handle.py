"""What a call of the backend gives back; and the order of the calls that its callbacks make.

A callback runs when a call has ended. That is another moment on each rank: what the callback calls
would come before the program's next call on one rank, and after it on another. So whoever takes the
future of a call, to attach a callback, makes a reservation in the order of calls. The calls that
the callbacks make go there: after all calls made before it, and before all made later.
"""

import math
import threading
from collections.abc import Callable, Hashable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from minidist.common.uncompiled import uncompiled
from minidist.machine.backend.engine import Engine
from minidist.machine.backend.queues import SETTLING, Operation, Task, Wait


@uncompiled
class Handle(dist.Work):
    """What a call gives back: `wait` for its end, or take its future. It is made before its task is
    submitted, and keeps the result."""

    def __init__(self, task: Task, engine: Engine) -> None:
        super().__init__()
        self.task, self._engine, self._result = task, engine, task.result or []
        self._future: torch.futures.Future[Any] | None = None  # raises the error
        self.source = -1  # of a message
        self.reserve: Callable[[], Reservation] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end. Raises what went wrong."""
        task = self.task
        if not task.is_complete:
            self._engine.wait(task, timeout.total_seconds())
            if not task.is_complete:
                raise RuntimeError(f"Timed out waiting {timeout.total_seconds():g} s")
        if task.error is not None:
            raise task.error
        return True

    def is_completed(self) -> bool:
        return self.task.is_complete

    def is_success(self) -> bool:
        return self.task.is_complete and self.task.error is None

    def exception(self) -> BaseException | None:
        return self.task.error if self.task.settled else None

    def result(self) -> list[Any]:
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """Its value is the result. In a callback, wait for a handle (`Work.wait`), not for another
        future: that waits in C++, and the thread that it stops may be the one that works."""
        task, reservation, late = self.task, None, None
        if self.reserve is not None and task.reservation is None and not task.settled:
            reservation = self.reserve()
        with SETTLING:
            if task.reservation is None and not task.settled:
                task.reservation, reservation = reservation, None
            if self._future is None:
                # Not set_exception: called from Python, it would end the process.
                promise: torch.futures.Future[Any] = torch.futures.Future()
                self._future = promise.then(_raise)
                if task.settled:
                    late = promise
                else:
                    task.promise = promise
        if reservation is not None:
            reservation.release()  # too late: callbacks run as they are attached
        if late is not None:
            late.set_result(self._result if task.error is None else task.error)
        return self._future

    def _source_rank(self) -> int:
        return self.source


def _raise(future: torch.futures.Future[Any]) -> Any:
    value = future.value()
    if isinstance(value, BaseException):
        raise value
    return value


# ---- what its callbacks call ------------------------------------------------------------------

_running = threading.local()  # `reservation`: the one whose callbacks this thread runs


class Reservation(Wait):
    """The place in a queue for the calls that one call's callbacks make. It is entered while they
    run. It is also the name of a second queue, in which those calls stand."""

    def __init__(self, engine: Engine, queue: Hashable) -> None:
        self._engine = engine
        self._calls: set[object] = set()  # those of the callbacks that have not ended
        self._reached = self._released = False
        operation = self._hold()
        # A reservation that a callback makes is one of its calls: the outer one waits for it.
        if isinstance(queue, Reservation):
            operation = queue.take(operation)
        engine.append(queue, Task(operation, math.inf, lambda: "callbacks", []))

    @staticmethod
    def current(engine: Engine) -> "Reservation | None":
        """The one whose callbacks this thread runs, if it belongs to this engine's group."""
        current: Reservation | None = getattr(_running, "reservation", None)
        return current if current is not None and current._engine is engine else None

    def _hold(self) -> Operation:
        """The operation in the queue: calls made later wait behind it."""
        self._reached = True
        if not self.over():
            yield self

    def over(self) -> bool:
        return self._released and not self._calls

    def take(self, operation: Operation) -> Operation:
        """An operation that a callback calls. It begins when all calls made before the reservation
        have ended."""
        self._calls.add(operation)

        def run() -> Operation:
            if not self._reached:
                yield _Reached(self)
            yield from operation
            self._calls.discard(operation)

        return run()

    def __enter__(self) -> None:
        self._outer: Reservation | None = getattr(_running, "reservation", None)
        _running.reservation = self

    def __exit__(self, *_: object) -> None:
        _running.reservation = self._outer
        self.release()

    def release(self) -> None:
        """No callback will run here any more."""
        self._released = True
        self._engine.wake()


class _Reached(Wait):
    def __init__(self, reservation: Reservation) -> None:
        self._reservation = reservation

    def over(self) -> bool:
        return self._reservation._reached
