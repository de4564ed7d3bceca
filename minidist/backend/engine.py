"""One thread a rank that communicates while the others compute.

An operation is a generator. Where it has to wait it yields a `Wait`. The engine asks that whether
it is over, goes on with what can go on, and naps when nothing can. So many operations are under
way at a time, on one thread, and none blocks another.

The caller's own thread begins a short operation, and often ends it: a message for which there is
room is gone, one that is there already is taken, and no thread is woken for that.
"""

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable

import torch

from minidist.backend.bell import Bell
from minidist.backend.handle import Handle


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

AT_ONCE = 4  # steps of a short operation that the caller's thread takes
SPINS = 30  # questions in a row, each giving way to other threads, before it sleeps
NAP = 0.01  # seconds, the longest sleep: a ring that got lost delays no more
WAKE = 1e-4  # seconds that a sleep may last longer than it was asked to
WATCH = 0.1  # seconds between two looks at whether the others are still there


class _Task:
    """An operation that has been submitted."""

    def __init__(self, operation: Operation, handle: Handle, timeout: float) -> None:
        self.operation, self.handle, self.timeout = operation, handle, timeout
        self.wait: Wait | None = None
        self.ended = False
        self.failure: BaseException | None = None
        self.since = time.monotonic()  # it waits; not while others of its lane do


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
        self._turn = threading.Lock()  # of the thread that goes on with operations
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
        self,
        lane: Hashable,
        operation: Operation,
        handle: Handle,
        timeout: float,
        short: bool = False,
    ) -> Handle:
        """Begin an operation as soon as those before it in its lane have ended."""
        task = _Task(operation, handle, timeout)
        with self._changed:
            if going := self._failure is None and not self._closing:
                self._lanes.setdefault(lane, deque()).append(task)
        if not going:
            handle.end(self._failure or RuntimeError("the process group has been closed"))
            return handle
        if short and self._begin(lane, task):
            handle.end(task.failure)
            if task.failure is None:
                return handle
        with self._changed:
            if threading.current_thread() is self._thread:
                self._start()  # a callback of another's future, which may wait for this one
            self._changed.notify()
            self._bell.ring()
        return handle

    def _begin(self, lane: Hashable, task: _Task) -> bool:
        """Take the first steps of a task in the caller's thread, unless another has the turn, or
        the task would overtake one that was submitted before. Whether it has ended."""
        if not _plain() or not self._turn.acquire(blocking=False):
            return False
        try:
            heads = [tasks[0] for tasks in list(self._lanes.values())]
            if any(head.wait is None for head in heads if head is not task):
                return False  # of two receives, the first begun gets the first message
            for _ in range(AT_ONCE):
                if self._first(lane) is not task or not self._step(lane, task):
                    return False
                if task.ended:
                    return True
            return False
        finally:
            self._turn.release()

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
            while self._busy():
                self._round()
                if self._thread is not me:  # another has taken over during a callback
                    return
        except BaseException as error:  # a mistake of ours: nobody shall wait for ever
            self._failure = self._failure or error
        with self._turn, self._changed:
            self._farewell()
            self._failure = self._failure or RuntimeError("the process group has been closed")
            left = [task for tasks in self._lanes.values() for task in tasks]
            self._lanes.clear()
        for task in left:
            task.handle.end(self._failure)

    def _busy(self) -> bool:
        """Wait until something is under way. False when all is over."""
        with self._changed:
            while not self._lanes and not self._closing and self._failure is None:
                self._changed.wait()
                self._awake()
            return bool(self._lanes) and self._failure is None

    def _round(self) -> None:
        """Go on with each lane. What it has held is let go, tensors too, before the next wait."""
        with self._changed:
            lanes = list(self._lanes)
        moved = False
        for lane in lanes:
            moved |= self._advance(lane)
            if self._thread is not threading.current_thread():
                return
        if moved:
            self._awake()
        else:
            self._rest(lanes)

    def _advance(self, lane: Hashable) -> bool:
        """Go on with a lane. False if it has to wait."""
        with self._turn:
            task = self._first(lane)
            moved = task is None or self._step(lane, task)
        if task is not None and task.ended:
            task.handle.end(task.failure)
        return moved

    def _first(self, lane: Hashable) -> _Task | None:
        """Of a lane, what is under way."""
        tasks = self._lanes.get(lane)
        return tasks[0] if tasks else None

    def _awake(self) -> None:
        self._idle, self._looked = 0, time.monotonic()

    def _step(self, lane: Hashable, task: _Task) -> bool:
        """Go on with the first task of a lane. False if it has to wait. Who calls this has the
        turn, and ends the handle once it has not: for that calls back, and may call us."""
        try:
            if task.wait is not None and not task.wait.over():
                return False
            task.wait, task.since = next(task.operation), time.monotonic()
            return True
        except StopIteration:
            pass
        except BaseException as error:
            task.failure = error
        task.ended = True
        with self._changed:
            self._lanes[lane].popleft()
            if not self._lanes[lane]:
                del self._lanes[lane]
            self._failure = self._failure or task.failure
        return True

    def _rest(self, lanes: list[Hashable]) -> None:
        """None of them can go on: give way; after a while, or if all know their time, or nobody
        waits for them, sleep; now and then, look if there is still hope."""
        now, tasks = time.monotonic(), [task for lane in lanes if (task := self._first(lane))]
        waits = [task.wait for task in tasks if task.wait is not None]
        dues = [wait.due() for wait in waits]
        known = all(due > now for due in dues)
        seconds = min([due - now - WAKE for due in dues if due > now], default=NAP)
        spin = not known and any(task.handle.awaited for task in tasks)
        self._idle += 1
        if seconds <= 0 or (spin and self._idle < SPINS):
            os.sched_yield()
        else:
            with self._bell.expected():
                with self._turn:
                    over = any([wait.over() for wait in waits])
                if len(lanes) == len(self._lanes) and not over:
                    self._bell.wait(min(seconds, WATCH if known else NAP))
        if now - self._looked > WATCH:
            self._looked = now
            self._look(tasks, now)

    def _look(self, tasks: list[_Task], now: float) -> None:
        for task in tasks:
            wait = task.wait
            late = task.timeout if now > task.since + task.timeout else 0.0
            if wait is not None and (error := self._explain(wait, task.handle.what, late)):
                with self._turn:
                    over = wait.over()  # what it waits for came before the other left
                if over:
                    continue
                with self._changed:
                    self._failure = self._failure or error
                return


def _plain() -> bool:
    """Whether what this thread asks of torch is done as it stands. Else the engine's thread does
    the whole operation: a tracker would count it, and a default device would lead it astray."""
    return not (
        torch.is_inference_mode_enabled()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
    )
