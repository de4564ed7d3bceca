"""Collectives that callbacks call, in an order that is the same on all ranks.

A callback runs when a call has ended. That is another moment on each rank: what the callback calls
would come before the program's next call on one rank, and after it on another. So whoever takes the
future of a call, to attach a callback, keeps a place in the order of calls. What the callbacks of
that call call comes there: after all that was called before, and before all that is called later.
"""

import threading
from collections.abc import Hashable

from minidist.backend.engine import Engine
from minidist.backend.queues import Operation, Wait

_running = threading.local()  # `place`: the one whose callbacks this thread runs


class Place(Wait):
    """The place of one call's callbacks in a queue. It is entered while they run. It is the name of
    a queue too: of that for what they call."""

    def __init__(self, engine: Engine, queue: Hashable) -> None:
        self._engine = engine
        self._calls: set[object] = set()  # of the callbacks, that have not ended
        self._reached = self._left = False
        operation = self._keep()
        # A place among another one's calls is one of them: that is over when this is.
        engine.append(queue, queue.take(operation) if isinstance(queue, Place) else operation)

    @staticmethod
    def current(engine: Engine) -> "Place | None":
        """The place whose callbacks this thread runs, if it is one of this engine's group."""
        place: Place | None = getattr(_running, "place", None)
        return place if place is not None and place._engine is engine else None

    def _keep(self) -> Operation:
        """Stands in the queue: what is called later waits behind it."""
        self._reached = True
        if not self.over():
            yield self

    def over(self) -> bool:
        return self._left and not self._calls

    def take(self, operation: Operation) -> Operation:
        """An operation that a callback calls: it begins when all that was called before the place
        has ended."""
        self._calls.add(operation)

        def run() -> Operation:
            if not self._reached:
                yield _Reached(self)
            yield from operation
            self._calls.discard(operation)

        return run()

    def __enter__(self) -> None:
        self._outer: Place | None = getattr(_running, "place", None)
        _running.place = self

    def __exit__(self, *_: object) -> None:
        _running.place = self._outer
        self.leave()

    def leave(self) -> None:
        """No callback will run here any more."""
        self._left = True
        self._engine.wake()


class _Reached(Wait):
    def __init__(self, place: Place) -> None:
        self._place = place

    def over(self) -> bool:
        return self._place._reached
