"""The lines of an emulated network that all ranks of a machine book in, in all their groups.

They lie in a file without a name that each rank maps and, for as long as it books, locks. The
system takes the lock from a rank that dies.
"""

import fcntl
import mmap
import os
import secrets
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from minidist.instruments.link.lines import COUNT, Busy, Lines
from minidist.machine.backend.segment import hide, new_file, reach, show, unreachable

TIMES = 2 * 63  # numbers that are kept of a line
ROOM = 8 * (TIMES + 2)  # bytes of it: how many, and these, and what it has carried


class SharedLines(Lines):
    """Those that all ranks of a machine book, in all their groups."""

    def __init__(self) -> None:
        super().__init__()
        self._turn = threading.Lock()  # each group has a thread
        self._token, self._file = "", -1

    def join(self, rank: int, exchange: Callable[[str, str], list[str]]) -> Callable[[], None]:
        """Share them with the ranks of a group, of which this is one. `exchange(name, value)` gives
        all ranks' values. Call what it returns when all ranks have joined."""
        tokens = exchange("lines", self._token)
        if tokens[0] and len(set(tokens)) == 1:  # as in most groups but the first
            return lambda: None
        shown, file = "", -1
        with ExitStack() as failed:
            if rank == 0:
                file, name = new_file()  # of which only what is used takes memory
                failed.callback(os.close, file)
                os.ftruncate(file, COUNT * ROOM)
                shown = show(file, name)
                failed.callback(hide, shown)
            mine = f"{shown}\n{secrets.token_hex()}"
            shown, token = exchange("file of lines", mine)[0].split("\n")
            try:
                if rank != 0:
                    file = reach(shown)
                    failed.callback(os.close, file)
                words = memoryview(mmap.mmap(file, COUNT * ROOM)).cast("d")
            except OSError as error:
                raise unreachable(0, error) from None
            failed.pop_all()
        with self._turn:
            self._file, before = file, self._file
            self._token, self._words = token, words
        if before >= 0:
            os.close(before)
        return lambda: hide(shown) if rank == 0 else None

    def carry(self, line: int, nbytes: float) -> None:
        self._words[_last_word(line)] += nbytes

    def carried(self, line: int) -> float:
        return self._words[_last_word(line)] if self._token else 0.0

    @contextmanager
    def open(self) -> Iterator[Busy]:
        with self._turn:
            try:  # an interrupt may come at any moment
                fcntl.flock(self._file, fcntl.LOCK_EX)
                busy = _Loaded(self._words)
                yield busy
                busy.store()
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)


def _last_word(line: int) -> int:
    return (line + 1) * ROOM // 8 - 1


class _Loaded(dict[int, list[float]]):
    """The lines that somebody has asked for."""

    def __init__(self, words: "memoryview[float]") -> None:
        self._words = words

    def __missing__(self, line: int) -> list[float]:
        place = line * ROOM // 8
        self[line] = list(self._words[place + 1 : place + 1 + int(self._words[place])])
        return self[line]

    def store(self) -> None:
        for line, busy in self.items():
            place = line * ROOM // 8
            del busy[1 : 1 + max(0, len(busy) - TIMES)]  # the oldest gaps: hardly used any more
            self._words[place + 1 : place + 1 + len(busy)] = memoryview(array("d", busy))
            self._words[place] = len(busy)


LINES = SharedLines()  # of the emulated network, which all groups of a rank share
