"""What the operating system does to a pool: too few files, interrupts, pipes that nobody reads."""

import errno
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)  # some programs die of SIGPIPE

FILES = 12  # that multiprocessing opens to start its forkserver and a process, and some more


@contextmanager
def as_socket(end: Connection) -> Iterator[socket.socket]:
    """The socket that a Connection is: itself, since a copy would need one more file."""
    same = socket.socket(fileno=end.fileno())
    try:
        same.settimeout(None)  # socket.setdefaulttimeout has made the Connection itself impatient
        yield same
    finally:
        with suppress(OSError):  # after an interrupt this may come when the end is closed
            same.settimeout(None)
        same.detach()


def set_timeout(end: Connection, seconds: float) -> None:
    """Let each receive fail with BlockingIOError when nothing has come for so long."""
    interval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6) or int(seconds < 1))
    with as_socket(end) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)


def send_bytes(end: Connection, message: bytes, seconds: float) -> None:
    """`end.send_bytes(message)`, with a TimeoutError when nothing has moved for so long.

    SO_SNDTIMEO counts twice: once as a part is sent, and again for the rest.
    """
    size = len(message)
    header = struct.pack("!i", size) if size < 1 << 31 else struct.pack("!iQ", -1, size)
    parts = [header, message] if size > 1 << 14 else [header + message]  # as multiprocessing does
    with as_socket(end) as same:
        same.settimeout(seconds)
        for part in parts:
            left = memoryview(part)
            while left:
                left = left[same.send(left, _NO_SIGNAL) :]


@contextmanager
def enough_files(ranks: int) -> Iterator[None]:
    """Say what to do where the system allows too few open files."""
    try:
        # Where multiprocessing lacks a file amid its start, it leaves others open, and its
        # forkserver ends: better not to begin.
        with ExitStack() as files:
            for _ in range(FILES):
                files.enter_context(open(os.devnull))
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ETOOMANYREFS):
            raise
        import resource  # Windows has none

        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise OSError(
            error.errno,
            f"{ranks} ranks need more open files than the {allowed} that this process may have. "
            "Raise the limit (`ulimit -n 4096`), then start Python again",
        ) from None


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put off what Python's handlers of signals do, such as a KeyboardInterrupt or the error of a
    time limit, until the block is done."""
    handlers: dict[int, Any] = {}
    # Only the main thread is interrupted; a handler in C, which is None here, raises nothing.
    if threading.current_thread() is threading.main_thread():
        found = {number: signal.getsignal(number) for number in signal.valid_signals()}
        handlers = {number: handler for number, handler in found.items() if callable(handler)}
    late: dict[int, Any] = {}  # each once, as the system keeps them, with its frame
    here, over = os.getpid(), False

    def put_off(number: int, frame: Any) -> None:
        # Another thread may fork meanwhile. And two errors at once may come before all is given
        # back.
        if over or os.getpid() != here:
            handlers[number](number, frame)
        else:
            late.setdefault(number, frame)

    try:
        for number in handlers:
            signal.signal(number, put_off)
        yield
    finally:
        try:
            _give_back(handlers)
        finally:
            over = True
            # Called, not raised: the signal itself has come, and who else heard of it knows.
            _all([partial(handlers[number], number, frame) for number, frame in late.items()])


def _give_back(handlers: dict[int, Any]) -> None:
    """Each signal gets back its handler. One that is back may come at once, and raise: the others
    are given back all the same."""
    try:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    except BaseException:
        _give_back(handlers)
        raise


def _all(calls: Sequence[Callable[[], Any]]) -> None:
    """Each of them, though some raise errors."""
    if calls:
        try:
            calls[0]()
        finally:
            _all(calls[1:])
