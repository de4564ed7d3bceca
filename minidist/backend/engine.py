"""One thread a rank that communicates while the others compute.

An operation is a generator. Where it has to wait it yields a `Wait`. The engine asks that whether
it is over, goes on with what can go on, and naps when nothing can. So many operations are under
way at a time, on one thread, and none blocks another.
"""

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from minidist.backend.bell import Bell


class Wait:
    """What an operation waits for."""

    def over(self) -> bool:
        """Whether it may go on."""
        raise TypeError(f"{type(self).__name__} does not say when it is over")

    def missing(self) -> list[int]:
        """The ranks that it waits for."""
        return []

    def any_will_do(self) -> bool:
        """Whether one of them is enough."""
        return False

    def due(self) -> float:
        """Not before this time (of time.monotonic) it is over; 0 if that is not known."""
        return 0.0


class Until(Wait):
    """A time that has to come."""

    def __init__(self, due: float) -> None:
        self._due = due

    def over(self) -> bool:
        return time.monotonic() >= self._due

    def due(self) -> float:
        return self._due


Operation = Generator[Wait, None, None]

SPINS = 100  # questions in a row, each giving way to other threads, before it sleeps
NAP = 0.01  # seconds, the longest sleep: a ring that got lost delays no more
WAKE = 1e-4  # seconds that a sleep may last longer than it was asked to
WATCH = 0.1  # seconds between two looks at whether the others are still there


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

    def end(self, error: BaseException | None = None) -> None:
        """The operation has ended, well or not."""
        self._error = error
        self._told.set_result(self._result if error is None else error)
        self._ended.set()  # after the future: who has waited may take its value

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end. Raises what went wrong."""
        if not self.is_completed() and not self._ended.wait(timeout.total_seconds() or None):
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


class _Task:
    """An operation that has been submitted."""

    def __init__(self, operation: Operation, handle: Handle, timeout: float) -> None:
        self.operation, self.handle, self.timeout = operation, handle, timeout
        self.wait: Wait | None = None
        self.since = time.monotonic()  # it waits; not while others of its lane do


Lanes = list[tuple[Hashable, deque[_Task]]]


class Engine:
    """Runs operations. Those of one lane go one after the other, those of others side by side.

    The first that fails is the last: the others end with its error, and so do all that follow.
    `explain(wait, what, seconds)` is asked, while an operation waits, whether there is a reason to
    give up; `seconds` are those that it was given, if they are over, else 0. `farewell` is called
    when the thread ends, for whatever reason.
    """

    def __init__(
        self,
        bell: Bell,
        explain: Callable[[Wait, str, float], BaseException | None],
        farewell: Callable[[], None],
    ) -> None:
        self._bell, self._explain, self._farewell = bell, explain, farewell
        self._lanes: dict[Hashable, deque[_Task]] = {}
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._closing = False
        self._awake()
        self._start()
        atexit.register(self.close, RuntimeError("the program has ended"))

    def _start(self) -> None:
        # A daemon, for Python waits at its exit for all other threads before it calls atexit.
        self._thread = threading.Thread(target=self._run, name="minidist shm", daemon=True)
        self._thread.start()

    def submit(
        self, lane: Hashable, operation: Operation, handle: Handle, timeout: float
    ) -> Handle:
        """Begin an operation as soon as those before it in its lane have ended."""
        with self._changed:
            if self._failure is None and not self._closing:
                task = _Task(operation, handle, timeout)
                self._lanes.setdefault(lane, deque()).append(task)
                if threading.current_thread() is self._thread:
                    self._start()  # a callback of another's future, which may wait for this one
                self._changed.notify()
                self._bell.ring()
                return handle
        handle.end(self._failure or RuntimeError("the process group has been closed"))
        return handle

    def close(self, failure: BaseException | None = None) -> None:
        """End the thread: now, with this error, or when all operations have ended."""
        with self._changed:
            self._failure, self._closing = self._failure or failure, True
            self._changed.notify()
            self._bell.ring()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            atexit.unregister(self.close)

    def _run(self) -> None:
        me = threading.current_thread()
        try:
            while lanes := self._next():
                moved = False
                for lane, tasks in lanes:
                    moved |= self._step(lane, tasks)
                    if self._thread is not me:  # another has taken over during a callback
                        return
                if moved:
                    self._awake()
                else:
                    self._rest(lanes)
        except BaseException as error:  # a mistake of ours: nobody shall wait for ever
            self._failure = self._failure or error
        self._farewell()
        with self._changed:
            self._failure = self._failure or RuntimeError("the process group has been closed")
            left = [task for tasks in self._lanes.values() for task in tasks]
            self._lanes.clear()
        for task in left:
            task.handle.end(self._failure)

    def _next(self) -> Lanes:
        """What is under way; nothing when all is over."""
        with self._changed:
            while not self._lanes and not self._closing and self._failure is None:
                self._changed.wait()
                self._awake()
            return list(self._lanes.items()) if self._failure is None else []

    def _awake(self) -> None:
        self._idle, self._looked = 0, time.monotonic()

    def _step(self, lane: Hashable, tasks: deque[_Task]) -> bool:
        """Go on with the first task of a lane. False if it has to wait."""
        task, failure = tasks[0], None
        try:
            if task.wait is not None and not task.wait.over():
                return False
            task.wait, task.since = next(task.operation), time.monotonic()
            return True
        except StopIteration:
            pass
        except BaseException as error:
            failure = error
        with self._changed:
            tasks.popleft()
            if not tasks:
                del self._lanes[lane]
            self._failure = self._failure or failure
        task.handle.end(failure)
        return True

    def _rest(self, lanes: Lanes) -> None:
        """None of them can go on: give way; after a while, or if all know their time, sleep; now
        and then, look if there is still hope."""
        now, waits = time.monotonic(), [wait for _, tasks in lanes if (wait := tasks[0].wait)]
        dues = [wait.due() for wait in waits]
        known = all(due > now for due in dues)
        seconds = min([due - now - WAKE for due in dues if due > now], default=NAP)
        self._idle += 1
        if seconds <= 0 or (self._idle < SPINS and not known):
            os.sched_yield()
        else:
            with self._bell.expected():
                if len(lanes) == len(self._lanes) and not any([wait.over() for wait in waits]):
                    self._bell.wait(min(seconds, WATCH if known else NAP))
        if now - self._looked > WATCH:
            self._looked = now
            self._look(lanes, now)

    def _look(self, lanes: Lanes, now: float) -> None:
        for _, tasks in lanes:
            task, wait = tasks[0], tasks[0].wait
            late = task.timeout if now > task.since + task.timeout else 0.0
            if wait is not None and (error := self._explain(wait, task.handle.what, late)):
                if wait.over():  # what it waits for came before the other left
                    continue
                with self._changed:
                    self._failure = self._failure or error
                return
