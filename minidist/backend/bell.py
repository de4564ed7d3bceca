"""How a rank that sleeps is woken: by a byte in a pipe.

A rank that waits for others asks again and again, for a short while. Then it says in shared memory
that it expects its bell, asks once more, and sleeps. Whoever changes what it may wait for rings. So
waiting costs no processor time, and its end is seen at once, however many ranks share a processor.
"""

import contextlib
import os
import select
import tempfile
import time
from collections.abc import Iterator

EXPECTED = 2  # the word in the head of a rank's segment: 1 while it expects its bell


class Bell:
    """The bell of one rank, whose `head` it is: that rank waits for it, the others ring it."""

    def __init__(self, head: memoryview, rings: int, hears: int | None = None) -> None:
        self._head, self._rings = head, rings
        self._hears = -1 if hears is None else hears  # the other end of the pipe
        self._poll = select.poll()
        if hears is not None:
            self._poll.register(hears, select.POLLIN)

    @classmethod
    def create(cls, head: memoryview) -> tuple["Bell", str]:
        """A new one, and its address, by which others attach it."""
        if os.path.isdir("/proc/self/fd"):
            hears, rings = os.pipe()
            os.set_blocking(rings, False)
            return cls(head, rings, hears), f"/proc/{os.getpid()}/fd/{rings}"
        # macOS: a pipe with a name, which the caller removes
        name = os.path.join(tempfile.mkdtemp(prefix="minidist-"), "bell")
        os.mkfifo(name)
        hears = os.open(name, os.O_RDONLY | os.O_NONBLOCK)
        return cls(head, os.open(name, os.O_WRONLY | os.O_NONBLOCK), hears), name

    @classmethod
    def attach(cls, head: memoryview, address: str) -> "Bell":
        """The bell of another rank. Raises OSError if that is gone."""
        return cls(head, os.open(address, os.O_WRONLY | os.O_NONBLOCK))

    @staticmethod
    def forget(address: str) -> None:
        """Nobody will attach it any more."""
        if not address.startswith("/proc/"):
            os.unlink(address)
            os.rmdir(os.path.dirname(address))

    @contextlib.contextmanager
    def expected(self) -> Iterator[None]:
        """Who changes something within the block rings. Look once more before you `wait`."""
        self._head[EXPECTED] = 1
        try:
            yield
        finally:
            self._head[EXPECTED] = 0

    def wait(self, seconds: float) -> None:
        """Until it rings, or so long."""
        if seconds < 1e-3:  # poll counts in milliseconds; and `select` knows only small files
            time.sleep(seconds)
        elif self._poll.poll(int(seconds * 1e3)):
            os.read(self._hears, 4096)

    def ring(self) -> None:
        """Wake the rank, if it expects that."""
        if self._head[EXPECTED]:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):  # it rings already; is gone
                os.write(self._rings, b"!")

    def close(self) -> None:
        """Let go of the pipe."""
        os.close(self._rings)
        if self._hears >= 0:
            os.close(self._hears)
