"""How a rank that sleeps is woken: by a byte in a pipe.

A rank that waits for others asks again and again, for a short while. Then it says in shared memory
that it expects its bell, asks once more, and sleeps. Whoever changes what it may wait for rings. So
waiting costs no processor time, and its end is seen at once, however many ranks share a processor.

A rank has two pipes: at one sleeps its engine's thread, at the other a thread that waits. What it
says is which of them shall wake.
"""

import contextlib
import os
import select
import tempfile
import time

from minidist.backend.address import closed_by_an_error, hide, reach, show

EXPECTED = 2  # the word in the head of a rank's segment: who expects its bell, 0 if nobody does
THREAD, WAITER = 1, 2


class Bell:
    """The bell of one rank, whose `head` it is: that rank waits for it, the others ring it."""

    def __init__(self, head: memoryview, rings: list[int], hears: list[int] | None = None) -> None:
        self._head, self._rings = head, rings
        self._hears = hears or []  # the other ends of the pipes
        self._polls = []
        for file in self._hears:
            self._polls.append(select.poll())
            self._polls[-1].register(file, select.POLLIN)

    @classmethod
    def create(cls, head: memoryview) -> tuple["Bell", str]:
        """A new one, and its address, by which others attach it."""
        hears: list[int] = []
        rings: list[int] = []
        names = ["", ""]
        with closed_by_an_error(hears), closed_by_an_error(rings):
            if os.path.isdir("/proc/self/fd"):
                for _ in names:
                    ends = os.pipe()
                    for files, end in zip((hears, rings), ends, strict=True):
                        files.append(end)
                        os.set_blocking(end, False)
            else:  # macOS: a pipe with a name, which the caller removes
                folder = tempfile.mkdtemp(prefix="minidist-")
                names = [os.path.join(folder, name) for name in ("thread", "waiter")]
                for name in names:
                    os.mkfifo(name)
                    hears.append(os.open(name, os.O_RDONLY | os.O_NONBLOCK))
                    rings.append(os.open(name, os.O_WRONLY | os.O_NONBLOCK))
            return cls(head, rings, hears), "\t".join(map(show, rings, names))

    @classmethod
    def attach(cls, head: memoryview, address: str) -> "Bell":
        """The bell of another rank. Raises FileNotFoundError if that is gone, OSError if it cannot
        be opened."""
        rings: list[int] = []
        with closed_by_an_error(rings):
            for shown in address.split("\t"):
                rings.append(reach(shown, os.O_WRONLY | os.O_NONBLOCK))
            return cls(head, rings)

    @staticmethod
    def forget(address: str) -> None:
        """Nobody will attach it any more."""
        for shown in address.split("\t"):
            hide(shown)
        if not shown.startswith("/proc/"):
            os.rmdir(os.path.dirname(shown))

    def expect(self, who: int) -> None:
        """Who changes something from now on wakes THREAD, or WAITER, or nobody (0). Look once more
        before you `wait`."""
        self._head[EXPECTED] = who

    def wait(self, who: int, seconds: float) -> None:
        """Until it rings for us, or so long."""
        if seconds < 1e-3:  # poll counts in milliseconds; and `select` knows only small files
            time.sleep(seconds)
        elif self._polls[who - 1].poll(int(seconds * 1e3)):
            with contextlib.suppress(BlockingIOError):
                os.read(self._hears[who - 1], 4096)

    def ring(self) -> None:
        """Wake whom the rank expects to be woken."""
        if who := self._head[EXPECTED]:
            self._write(who)

    def wake(self) -> None:
        """Wake our own thread."""
        self._write(THREAD)

    def _write(self, who: int) -> None:
        if self._rings:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):  # it rings already; is gone
                os.write(self._rings[who - 1], b"!")

    def close(self) -> None:
        """Let go of the pipes."""
        rings, self._rings = self._rings, []
        for file in (*rings, *self._hears):
            os.close(file)
