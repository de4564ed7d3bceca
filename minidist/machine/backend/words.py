"""Words of shared memory: how a rank sees what another one has done, and is woken for it.

A rank writes data, and then a word that announces it. Another rank reads the word, and then the
data. Nobody may see the word before the data. x86 ensures that by itself: its stores become visible
in the order of the program, and its loads are done in that order. ARM, POWER and RISC-V do not.
There `publish` puts a fence between the data and the word, and `reached` one between the word and
the data.

The fence is a lock that is taken and given back twice. Giving it back is a release: what comes
before it in the program is visible before it. Taking it is an acquire: what comes after it in the
program happens after it. An acquire never overtakes an earlier release, so the first release and
the second acquire keep apart what comes before and after the fence. One pair would not do: both
sides may move into it, and meet there.

A word has 8 bytes, is aligned, and Python moves it at once, so nobody sees half of it.

A rank that waits for others asks again and again, for a short while. Then it says in shared memory
that it expects its bell, asks once more, and sleeps. Whoever changes what it may wait for rings. So
waiting costs no processor time, and its end is seen at once, however many ranks share a processor.

The bell is a word, too, on which the kernel lets a thread wait until it is 1. Two threads of a rank
may sleep: its engine's own thread, and a thread that waits. Each has such a word, and the rank says
which of them shall wake. Linux calls this a futex (man 2 futex; Franke, Russell and Kirkwood,
"Fuss, Futexes and Furwocks", 2002). Where there is none, as on macOS, a thread that sleeps looks at
its word again after 0.1 ms, and then half as often each time, down to every 10 ms.

One thing is left open: a rank that has just published may still read an old `EXPECTED` of a rank
that falls asleep. Then its ring is lost, and the other wakes by itself: mostly within 10 ms, at
most a second later.
"""

import ctypes
import functools
import platform
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

MACHINE = platform.machine()
ORDERED = MACHINE.lower() in ("x86_64", "amd64", "i386", "i686", "s390x")

_lock = threading.Lock()


def fence() -> None:
    """Keep what comes before in the program before what comes after it, as other ranks see it."""
    if not ORDERED:
        for _ in range(2):
            with _lock:
                pass


def publish(words: memoryview, at: int, value: int) -> None:
    """Write a word that announces data."""
    fence()
    words[at] = value


def reached(words: Iterable[memoryview], at: int, value: int) -> bool:
    """Whether this word of all of them is `value` or more. Then what they announce is there."""
    for each in words:
        if each[at] < value:
            return False
    fence()
    return True


# ---- the bell -------------------------------------------------------------------------------

EXPECTED = 2  # a word in the head of a rank's segment: which thread the bell shall wake, or 0
RUNG = 10  # and RUNG + THREAD, RUNG + WAITER: 1 if the bell has rung for it
THREAD, WAITER = 1, 2

# The number of the system call, where the kernel has 64 bits.
NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
FUTEX = NUMBERS.get(MACHINE) if sys.platform == "linux" else None
FUTEX_WAIT, FUTEX_WAKE = 0, 1


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


@functools.cache
def _system_call() -> Any:
    call = ctypes.CDLL(None).syscall
    word, limit = ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(_Timespec)
    call.argtypes = [ctypes.c_long, word, ctypes.c_int, ctypes.c_uint32, limit]
    return call


class Bell:
    """The bell of one rank, whose `head` it is: that rank waits for it, the others ring it."""

    def __init__(self, head: memoryview) -> None:
        self._head = head
        self._rung = {
            who: ctypes.c_uint32.from_buffer(head, 8 * (RUNG + who)) for who in (THREAD, WAITER)
        }

    def expect(self, who: int) -> None:
        """From now on a rank that changes something wakes THREAD, or WAITER, or nobody (0). Look
        once more before you `wait`."""
        self._head[EXPECTED] = who

    def wait(self, who: int, seconds: float) -> None:
        """Sleep until it rings for `who`, or so long."""
        rung = self._rung[who]
        if FUTEX is not None:  # it sleeps only if the word is 0
            limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
            _system_call()(FUTEX, rung, FUTEX_WAIT, 0, limit)
        else:
            end, nap = time.monotonic() + seconds, 1e-4
            while not rung.value and (rest := end - time.monotonic()) > 0:
                time.sleep(min(nap, rest))
                nap = min(2 * nap, 1e-2)
        rung.value = 0

    def ring(self) -> None:
        """Wake the thread that expects to be woken."""
        if who := self._head[EXPECTED]:
            self.wake(who)

    def wake(self, who: int = THREAD) -> None:
        """Wake this thread, expected or not: mostly our own engine's."""
        self._rung[who].value = 1
        if FUTEX is not None:
            _system_call()(FUTEX, self._rung[who], FUTEX_WAKE, 1, None)
