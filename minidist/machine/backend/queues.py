"""The calls that are under way on a rank, and one step of each.

An operation is a generator. Where it has to wait for other ranks it yields a `Wait`, which says
when that is over. So many operations are under way at a time, on any thread, and none blocks
another. Those of one queue go one after the other; those of other queues go on beside them.

A task is an operation that has been called, and how the call ends.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from minidist.common.uncompiled import uncompiled


class Wait:
    """What an operation waits for."""

    def over(self) -> bool:
        """Whether the operation may go on."""
        raise TypeError(f"{type(self).__name__} does not say when it is over")

    def missing(self) -> list[int]:
        """The ranks that it waits for."""
        return []

    def any_will_do(self) -> bool:
        """Whether one of them is enough."""
        return False

    def due(self) -> float:
        """The time (of time.monotonic) before which it cannot be over; 0 if that is unknown."""
        return 0.0


class Until(Wait):
    """Until a time of time.monotonic."""

    def __init__(self, due: float) -> None:
        self._due = due

    def over(self) -> bool:
        return time.monotonic() >= self._due

    def due(self) -> float:
        return self._due


Operation = Generator[Wait, None, None]

# explain(wait, call, overdue): the error if waiting is hopeless, else None. `call` describes the
# call; `overdue` is 0 before the timeout of the wait is over, and then that timeout in seconds.
Explain = Callable[[Wait, str, float], BaseException | None]

give_way = getattr(os, "sched_yield", partial(time.sleep, 0))  # macOS has none
NAP = 0.01  # seconds, the longest sleep of a driver: bounds the delay if a ring is lost
WAKE = 1e-4  # seconds that a sleep may last longer than it was asked to
AT_ONCE = 4  # steps of a short operation that the call itself takes

_settling = threading.Lock()  # guards how a task ends, and its future, made on first request


class Driver(Protocol):
    """Who goes on with tasks: the engine."""

    def wait(self, task: "Task", seconds: float) -> None: ...


@uncompiled
class Task(dist.Work):
    """An operation that has been called, with `timeout` seconds for each of its waits; and how that
    ends. It is what a call gives back: `wait` for its end, or take its future.

    `what()` describes the call. Neither that text nor a future is made before somebody asks.
    """

    def __init__(
        self,
        operation: Operation,
        timeout: float,
        what: Callable[[], str],
        result: list[Any],
        driver: Driver,
    ) -> None:
        super().__init__()
        self.operation, self.timeout, self.what = operation, timeout, what
        self.awaits: Wait | None = None
        self.since = 0.0  # when this wait began; time in the queue does not count
        self.error: BaseException | None = None
        self.source = -1  # of a message
        self.ended = False  # no step is left
        self.is_complete = False  # and its callbacks have run
        self._result, self._driver = result, driver
        self._settled = False  # the result, or the error, is known
        self._promise: torch.futures.Future[Any] | None = None  # its value may be an error
        self._future: torch.futures.Future[Any] | None = None

    def step(self) -> bool:
        """Go on with the operation. False if it has to wait."""
        try:
            if self.awaits is not None and not self.awaits.over():
                return False
            awaits = next(self.operation)
            self.since = time.monotonic()
            self.awaits = awaits  # last: another thread may ask how long it has lasted
        except StopIteration:
            self.ended = True
        except BaseException as error:
            self.error, self.ended = error, True
        return True

    def complete(self, error: BaseException | None = None) -> None:
        """Make it complete, with this error if any. A second call changes nothing: where a group
        fails, several threads may finish what is under way."""
        with _settling:
            if self._settled:
                return
            self.error, self._settled = error or self.error, True
        try:
            if self._promise is not None:
                self._promise.set_result(self.error or self._result)
        finally:
            self._promise = None
            del self.operation  # which holds the tensors
            self.is_complete = True  # after the future: who has waited may take its value

    # What torch asks.

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end. Raises what went wrong."""
        if not self.is_complete:
            self._driver.wait(self, timeout.total_seconds())
            if not self.is_complete:
                raise RuntimeError(f"Timed out waiting {timeout.total_seconds():g} s")
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self.is_complete

    def is_success(self) -> bool:
        return self.is_complete and self.error is None

    def result(self) -> list[Any]:
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """Its value is the result. It raises the error. In a callback, wait for no other future."""
        if self._future is None:
            promise: torch.futures.Future[Any] = torch.futures.Future()
            self._future = promise.then(_raise)  # set_exception from Python would end the process
            with _settling:
                settled = self._settled
                self._promise = None if settled else promise
            if settled:
                promise.set_result(self.error or self._result)
        return self._future

    def _source_rank(self) -> int:
        return self.source


def _raise(future: torch.futures.Future[Any]) -> Any:
    value = future.value()
    if isinstance(value, BaseException):
        raise value
    return value


class Queues:
    """Queues of tasks, by name. Any thread may take a step, one thread at a time.

    Who takes a task's last step gets the task back, and has to `complete` it, without a lock: that
    runs callbacks, which may communicate.
    """

    def __init__(self) -> None:
        self._queues: dict[Hashable, deque[Task]] = {}
        self._lock = threading.Lock()  # for the dictionary
        self._stepping = threading.Lock()  # for a step

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, name: Hashable, task: Task) -> None:
        """Put a task at the end of its queue."""
        with self._lock:
            self._queues.setdefault(name, deque()).append(task)

    def firsts(self) -> list[Task]:
        """The first task of each queue: those that are under way."""
        with self._lock:
            return [tasks[0] for tasks in self._queues.values()]

    def dues(self) -> list[float]:
        """The times that the tasks under way wait for, each 0 if unknown."""
        return [task.awaits.due() for task in self.firsts() if task.awaits is not None]

    def rest(self, now: float) -> tuple[float, bool]:
        """The seconds until the first of them may go on, NAP if none waits for a known time; and
        whether all of them wait for known times."""
        dues = self.dues()
        seconds = min([due - now - WAKE for due in dues if due > now], default=NAP)
        return seconds, bool(dues) and all(due > now for due in dues)

    def round(self) -> tuple[bool, list[Task]]:
        """Take a step of each queue, until a task has ended. Returns whether any step could be
        taken, and that task, if any."""
        moved = False
        for name in list(self._queues):
            with self._stepping:
                tasks = self._queues.get(name)
                if tasks and (task := tasks[0]).step():
                    moved = True
                    if task.ended:
                        self._remove(name)
                        return True, [task]
        return moved, []

    def begin(self, name: Hashable, task: Task) -> tuple[bool, list[Task]]:
        """Take the first steps of a task here and now. Returns whether that was possible, and the
        task if it has ended. It is not possible if another thread takes a step or has done the
        task, or if the task would overtake one that was submitted before: of two receives, the
        first that begins gets the first message."""
        if self._stepping.locked():
            return False, []
        with self._stepping:
            if task.ended or (
                len(self._queues) > 1
                and any([each.awaits is None for each in self.firsts() if each is not task])
            ):
                return False, []
            for _ in range(AT_ONCE):
                tasks = self._queues.get(name)  # none if the group has failed meanwhile
                if not tasks or tasks[0] is not task or not task.step():
                    break
                if task.ended:
                    self._remove(name)
                    return True, [task]
            return True, []

    def hopeless(self, now: float, explain: Explain) -> BaseException | None:
        """The error if one of them waits in vain, else None."""
        for task in self.firsts():
            if (wait := task.awaits) is None:
                continue
            overdue = task.timeout if now > task.since + task.timeout else 0.0
            error = explain(wait, task.what(), overdue)
            with self._stepping:  # what it waits for may have come before the other left
                if error is not None and not wait.over():
                    return error
        return None

    def clear(self) -> list[Task]:
        """Remove all tasks, and return them."""
        with self._stepping, self._lock:
            removed = [task for tasks in self._queues.values() for task in tasks]
            self._queues.clear()
        return removed

    def _remove(self, name: Hashable) -> None:
        with self._lock:
            tasks = self._queues.pop(name)
            tasks.popleft()
            if tasks:
                self._queues[name] = tasks  # behind the others: their turn comes first


def plain() -> bool:
    """Whether no mode of torch is active in this thread (inference, dispatch, function). One would
    alter our own tensor operations: then the engine's thread does the whole operation."""
    return not (
        torch.is_inference_mode_enabled()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
    )
