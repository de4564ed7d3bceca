"""The record of what a rank communicates: the one place that every meter reads.

Events come from `torch_calls`, for calls of `torch.distributed`; from the backend "shm", for calls
that torch makes in C++; from `scope`, for the collectives of minidist. Observers (TrafficCounter,
Timeline) read them. While nobody observes, nothing is recorded and no source is attached.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Kind = Literal["sent", "received", "collective", "scope"]


@dataclass
class Event:
    """One communication of this rank.

    kind: a message "sent" or "received"; a "collective" handed to torch's backend as a whole; or a
    "scope", the time that a collective of minidist took, with its messages as events of their own.
    peer: the other rank of a message, counted in the whole world (None: not known, or none).
    nbytes: bytes of the message; of a collective, those of the whole vector (see `torch_calls`).
    start, end: seconds of `time.perf_counter`, on Linux one clock for all processes of a machine.
    The end of an asynchronous call is when it was done; but that of a message on gloo or NCCL, when
    its `wait` returned. None until then. (On a GPU, work counts as done when it is queued.)
    control: not the user's data, but minidist's own agreement on the call.
    scope: the collective of minidist that the event is part of.
    group: the ranks, counted in the whole world, of the group that communicates.
    blocked: from when to when the caller stood still for it: in the call, and in each `wait`. Of a
    synchronous call that is all of its time.
    """

    operation: str
    kind: Kind
    peer: int | None
    nbytes: int
    start: float
    end: float | None = None
    control: bool = False
    scope: str | None = None
    group: tuple[int, ...] = ()
    blocked: list[tuple[float, float]] = field(default_factory=list)


class Source(Protocol):
    """What feeds the record. Attached while there is at least one observer."""

    def attach(self) -> None: ...
    def detach(self) -> None: ...


SOURCES: list[Source] = []

_lock = threading.Lock()
_observers: list[list[Event]] = []
_receivers: list[Callable[[object], None]] = []
_here = threading.local()  # of this thread; .scopes: what it is in the middle of, outermost first;
# .call: it is within a call that is recorded

# The same collectives, of one tensor instead of a list. Torch has old names and new ones.
ONE_TENSOR = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


def active() -> bool:
    """Whether anybody observes."""
    return bool(_observers)


@contextlib.contextmanager
def observed() -> Iterator[list[Event]]:
    """Within the block, events of all threads are appended to the list that it yields."""
    events: list[Event] = []
    with _lock:
        if not _observers:
            for source in SOURCES:
                source.attach()
        _observers.append(events)
    try:
        yield events
    finally:
        with _lock:
            # By identity: two lists of events may be equal.
            _observers[:] = [other for other in _observers if other is not events]
            if not _observers:
                for source in SOURCES:
                    source.detach()


def within_call() -> bool:
    """Whether this thread is within a call that is recorded: what that calls is part of it."""
    return getattr(_here, "call", False)


@contextlib.contextmanager
def call() -> Iterator[None]:
    """The block is a call that is recorded."""
    _here.call = True
    try:
        yield
    finally:
        _here.call = False


@contextlib.contextmanager
def handed_over(receive: Callable[[object], None]) -> Iterator[None]:
    """Within the block, `receive` gets the tensors that are handed to a backend which torch's
    dispatcher does not know, and so no mode of torch sees."""
    _receivers.append(receive)
    try:
        yield
    finally:
        _receivers.remove(receive)


def hand_over(tensors: object) -> None:
    """Tell who wants to know that a call takes these tensors."""
    for receive in _receivers:
        receive(tensors)


def begin(
    operation: str,
    kind: Kind,
    peer: int | None = None,
    nbytes: int = 0,
    group: Sequence[int] = (),
) -> Event:
    """Record that a communication starts now, within the scope of the calling thread."""
    name, control = _scopes()[-1] if _scopes() else (None, False)
    now = time.perf_counter()
    operation = ONE_TENSOR.get(operation, operation)
    event = Event(operation, kind, peer, nbytes, now, None, control, name, tuple(group))
    with _lock:
        for events in _observers:
            events.append(event)
    return event


def finish(events: Iterable[Event]) -> None:
    """Record that these end now, unless they have ended before."""
    now = time.perf_counter()
    for event in events:
        if event.end is None:
            event.end = now


def hold(events: Iterable[Event], since: float | None = None) -> None:
    """Record that the caller has stood still for these until now: `since` then, or their start."""
    now = time.perf_counter()
    for event in events:
        event.blocked.append((event.start if since is None else since, now))


@contextlib.contextmanager
def scope(operation: str, nbytes: int = 0, control: bool = False) -> Iterator[None]:
    """What is sent and received within the block belongs to `operation`.

    `control` marks messages that carry no data of the user's.
    """
    if not active():
        yield
        return
    event = begin(operation, "scope", None, nbytes)
    event.control = control
    _scopes().append((operation, control))
    try:
        yield
    finally:
        _scopes().pop()
        finish([event])
        hold([event])


def _scopes() -> list[tuple[str, bool]]:
    if not hasattr(_here, "scopes"):
        _here.scopes = []
    scopes: list[tuple[str, bool]] = _here.scopes
    return scopes
