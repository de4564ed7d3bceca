"""Who goes on with the operations of a rank.

Whoever waits does the work. A thread that waits for an operation goes on with all of them until its
own has ended: it is the *driver*. No other thread has to be woken for that. While nobody waits, the
engine's own thread goes on with them; it sleeps until another rank rings. There is one driver at a
time; other threads that wait follow it.

A task, which is an operation that has been called, goes through these states:

    state      where it is                          who moves it on
    queued     in its queue, behind another task    whoever takes the last step of that one
    ready      the first in its queue               whoever takes its first step
    waiting    the first; it has yielded a `Wait`   whoever takes a step once that is over
    ended      in no queue                          whoever took its last step, in `_complete`
    complete   its caller has it                    nobody

Steps are taken by the driver, or else by our own thread (both by `Queues.round`); the first steps
of a short task by the call itself (`Queues.begin`). The first task that fails ends the others:
`_fail` keeps its error and wakes our own thread, which makes all tasks complete with this error
(`_close`).

How a rank falls asleep without missing what it waits for: it says in shared memory who expects the
bell (`Bell.expect`), looks once more, and only then sleeps. Others change what they change first,
and then ring.
"""

import atexit
import math
import threading
import time
from collections.abc import Callable, Hashable

from minidist.machine.backend.queues import NAP, Explain, Queues, Task, give_way, plain
from minidist.machine.backend.words import THREAD, WAITER, Bell

SPIN = 2e-4  # seconds that a driver asks again and again, giving way to others, before it sleeps
WATCH = 0.1  # seconds between two looks at whether the other ranks are still there
IDLE = 1.0  # seconds that the thread sleeps while nothing is under way


class Here(threading.local):
    calls_back = False  # whether this thread runs the callbacks of a task


class Engine:
    """Runs operations.

    The first that fails is the last: the others end with its error, and so do all that follow.
    `explain(wait, call, overdue)` is asked while an operation waits, see `queues.Explain`.
    `on_close` is called when our own thread ends, for whatever reason.
    """

    def __init__(self, bell: Bell, explain: Explain, on_close: Callable[[], None]) -> None:
        self._bell, self._explain, self._on_close = bell, explain, on_close
        self._queues, self._here = Queues(), Here()
        self._lock = threading.Lock()  # for who drives
        self._changed = threading.Condition(self._lock)
        self._driver: int | None = None  # a thread
        self._followers = 0
        self._failure: BaseException | None = None
        self._closing = False
        self._looked = time.monotonic()
        # A daemon, for Python waits at its exit for all other threads before it calls atexit.
        self._thread = threading.Thread(target=self._run, name="minidist shm", daemon=True)
        self._thread.start()
        atexit.register(self.close, RuntimeError("the program has ended"))

    # ---- a call ----------------------------------------------------------------------------

    def submit(
        self, queue: Hashable, task: Task, short: bool = False, awaited: bool = False
    ) -> None:
        """Begin a task as soon as those before it in its queue have ended. `short`: take its first
        steps here, if possible. `awaited`: the caller waits at once, and will do the work. What a
        callback calls is done here and now: its thread may be the only one that works."""
        with self._lock:
            if going := self._failure is None and not self._closing:
                self._queues.add(queue, task)
        if not going:
            task.complete(self._failure or RuntimeError("the process group has been closed"))
        elif self._here.calls_back:
            self.wait(task)
        elif plain() and (awaited or (short and self._begin(queue, task))):
            return
        else:
            self._wake()

    def _begin(self, queue: Hashable, task: Task) -> bool:
        """Run a task's first steps in the caller. True if it has ended, or waits for a rank that
        will ring for our own thread."""
        for _ in range(2):  # the second time for what came before the bell was expected
            begun, ended = self._queues.begin(queue, task)
            if ended:
                self._complete(ended)
                return True
            if not begun or task.awaits is None or task.awaits.due():
                break
            self._listen()
        else:
            return True
        self._listen()
        return False

    def _listen(self) -> None:
        """While nobody drives, the bell wakes our own thread."""
        with self._lock:
            if self._driver is None:
                self._bell.expect(THREAD if self._queues else 0)

    def _wake(self) -> None:
        """Wake the thread that takes steps: there may be something new."""
        self._bell.ring() if self._driver is not None else self._bell.wake()

    def _complete(self, ended: list[Task]) -> None:
        """Tell how this task has ended, if there is one. That runs callbacks, which may call us:
        so this thread holds no lock, and does not drive. Then it holds the task no longer, before
        its caller goes on: with the task it would hold the tensors."""
        if not ended:
            return
        outer, self._here.calls_back = self._here.calls_back, True
        try:
            if ended[0].error is not None:
                self._fail(ended[0].error)
            ended.pop().complete()
        finally:
            self._here.calls_back = outer
        if self._driver is not None or self._followers:
            with self._lock:
                self._changed.notify_all()
            self._bell.ring()

    def _fail(self, error: BaseException) -> None:
        """Our own thread sees this, and makes all tasks complete with this error."""
        with self._lock:
            self._failure = self._failure or error
        self._bell.wake()

    # ---- a thread that waits ---------------------------------------------------------------

    def wait(self, task: Task, seconds: float = 0) -> None:
        """Go on with all tasks until this one is complete, or for so many seconds (0: without
        limit)."""
        end = time.monotonic() + seconds if seconds else math.inf
        may_drive = plain() or threading.current_thread() is self._thread
        try:
            while not task.is_complete and time.monotonic() < end:
                if self._failure is not None and threading.current_thread() is self._thread:
                    task.complete(self._failure)  # in a callback: nobody else would
                else:
                    self._complete(self._drive_or_follow(task, end, may_drive))
            if self._queues and self._failure is None:
                self._leave_rest()
        except BaseException as error:  # an interrupt: an operation may be half done
            self._fail(error)
            raise

    def _drive_or_follow(self, task: Task, end: float, may_drive: bool) -> list[Task]:
        """Drive, or follow who does. Returns the task that our steps have ended, if any."""
        with self._lock:
            if not may_drive or self._driver is not None or self._failure is not None:
                if not task.is_complete:
                    self._follow(min(end - time.monotonic(), WATCH))
                return []
            self._bell.expect(0)
            self._driver = threading.get_ident()
        try:
            return self._drive(task, end)
        finally:
            self._driver = None
            self._listen()  # our own thread may work now, or a follower may drive
            if self._followers:
                with self._lock:
                    self._changed.notify_all()

    def _follow(self, seconds: float) -> None:
        """Wait until something has ended, or nobody drives any more. Called with the lock."""
        self._bell.ring()  # a driver that sleeps does not know of ours
        self._followers += 1
        try:
            self._changed.wait(seconds)
        finally:
            self._followers -= 1

    def _leave_rest(self) -> None:
        """Wake our own thread if something arrived while nobody listened, or if a task waits for a
        time: no other rank rings for that."""
        if self._work() or any(self._queues.dues()):
            self._wake()

    def _drive(self, task: Task, end: float) -> list[Task]:
        """Go on with all tasks until one has ended. Returns it, or nothing if the time is up."""
        patience, expected = 0.0, False
        while not task.is_complete and self._failure is None:
            moved, ended = self._queues.round()
            if ended:
                return ended
            now = time.monotonic()
            if moved or not patience:
                patience = now + (0.0 if self._queues.rest(now)[1] else SPIN)
            elif now < patience:
                give_way()
            elif now > end:
                break
            elif not expected:
                self._bell.expect(WAITER)
                expected = True  # and look once more
                continue
            else:
                seconds, known = self._queues.rest(now)
                self._bell.wait(WAITER, max(0, min(seconds, end - now, WATCH if known else NAP)))
                self._look(now)
            if expected:
                self._bell.expect(0)
                expected = False
        return []

    # ---- our own thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._finished():
                if self._driver is not None or not self._work():
                    self._sleep()
        except BaseException as error:  # a mistake of ours: nobody may wait for ever
            self._failure = self._failure or error
        self._close()

    def _finished(self) -> bool:
        return self._failure is not None or (self._closing and not self._queues)

    def _work(self) -> bool:
        """Take a step of each queue. False if no task could go on."""
        moved, ended = self._queues.round()
        self._complete(ended)
        return moved

    def _sleep(self) -> None:
        """Sleep until the bell rings for this thread, a task's time has come, or it is time to see
        whether the other ranks are still there."""
        self._listen()
        now = time.monotonic()
        if (self._driver is None and self._work()) or self._finished():
            return
        seconds, _ = self._queues.rest(now)
        self._bell.wait(THREAD, max(0, min(seconds, WATCH)) if self._queues else IDLE)
        if self._driver is None:
            self._look(now)

    def _close(self) -> None:
        """Make all tasks complete with an error, and leave the other ranks."""
        with self._lock:
            self._failure = self._failure or RuntimeError("the process group has been closed")
            while self._driver is not None:
                self._follow(NAP)
            self._on_close()
        for task in self._queues.clear():
            task.complete(self._failure)
        with self._lock:
            self._changed.notify_all()

    def close(self, failure: BaseException | None = None) -> None:
        """End our own thread: now, with this error for all tasks; without one, when they have
        ended."""
        with self._lock:
            self._failure, self._closing = self._failure or failure, True
        self._bell.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            atexit.unregister(self.close)

    def _look(self, now: float) -> None:
        """Fail if a task waits in vain. Looks every WATCH seconds only."""
        if now >= self._looked + WATCH:
            self._looked = now
            if error := self._queues.hopeless(now, self._explain):
                self._fail(error)
