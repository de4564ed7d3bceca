"""When the lines of an emulated network are busy.

Of each line that is a list of times, `start, end, start, end, ...` in order. A message takes the
first free time after it was sent, in pieces if need be: so a line is never idle while a message
waits for it, in whatever order ranks ask.

`shared_lines` has those that all ranks of a machine book in.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

Busy = MutableMapping[int, list[float]]  # by the number of a line

LIMIT = 256  # ranks and nodes that have lines of their own
COUNT = LIMIT * LIMIT + 2 * LIMIT  # from rank to rank within a node; out of a node, and into it


def occupy(busy: list[float], at: float, seconds: float) -> tuple[float, float]:
    """Take so many seconds of a line's free time, the first from `at` on: when they begin, and when
    they end."""
    i = bisect_right(busy, at)
    begin = busy[i] if i % 2 else at  # an odd place is within a busy time
    i = j = i + i % 2
    end = begin + seconds
    while j < len(busy) and busy[j] < end:
        end += busy[j + 1] - busy[j]
        j += 2
    if seconds > 0:
        # Busy from begin to end now: one time with those that it touches.
        start, i = (busy[i - 2], i - 2) if i and busy[i - 1] == begin else (begin, i)
        stop, j = (busy[j + 1], j + 2) if j < len(busy) and busy[j] == end else (end, j)
        busy[i:j] = [start, stop]
    return begin, end


class Lines:
    """The lines of a network that only one process uses: a simulated one."""

    def __init__(self) -> None:
        self._busy: Busy = defaultdict(list)
        self._carried: dict[int, float] = defaultdict(float)

    @contextmanager
    def open(self) -> Iterator[Busy]:
        """Each line's busy times, to read and to change."""
        yield self._busy

    def carry(self, line: int, nbytes: float) -> None:
        """Count bytes that a line carries. Only while the lines are open."""
        self._carried[line] += nbytes

    def carried(self, line: int) -> float:
        """The bytes that it has carried so far."""
        return self._carried[line]
