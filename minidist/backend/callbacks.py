"""Collectives that callbacks call, in an order that is the same on all ranks.

A callback runs when a call has ended. That is another moment on each rank: what the callback calls
would come before the program's next call on one rank, and after it on another. So whoever takes the
future of a call, to attach a callback, makes a reservation in the order of calls. The calls that
the callbacks make take place there: after all calls made before it, and before all made later.
"""

import threading
from collections.abc import Hashable

from minidist.backend.engine import Engine
from minidist.backend.queues import Operation, Wait

_running = threading.local()  # `reservation`: the one whose callbacks this thread runs


class Reservation(Wait):
    """The place in a queue for the calls that one call's callbacks make. It is entered while they
    run. It is also the name of a second queue, in which those calls stand."""

    def __init__(self, engine: Engine, queue: Hashable) -> None:
        self._engine = engine
        self._calls: set[object] = set()  # those of the callbacks that have not ended
        self._reached = self._released = False
        operation = self._hold()
        # A callback's reservation is one of its calls: the outer reservation waits for it.
        engine.append(queue, queue.take(operation) if isinstance(queue, Reservation) else operation)

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
