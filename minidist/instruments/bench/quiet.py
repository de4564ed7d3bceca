"""How much of the machine other processes take, while ours are timed.

Where the kernel says how long the processors were idle (Linux), the rest of the time went to our
processes, which have clocks of their own, or to others: other programs, the kernel's own threads,
and, on a virtual machine, other machines ("steal").
"""

import os
import time
from pathlib import Path

PROC = Path("/proc")
MOMENT = 0.3  # seconds, the shortest that can be judged: the kernel counts in hundredths
LIMIT = 0.05  # of the machine: a moment in which others take more is thrown away
UNKNOWN = -1.0


class Moment:
    """From now on, the share of others. `root`: ours are this process and its descendants."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._start, self._before = time.monotonic(), self._look()

    def lasted(self) -> float:
        """Seconds until now."""
        return time.monotonic() - self._start

    def share(self) -> float:
        """What others have taken of the machine: 0 to 1, or UNKNOWN. Lets MOMENT pass first."""
        if self._before is None:
            return UNKNOWN
        time.sleep(max(0.0, MOMENT - self.lasted()))
        seconds, after = self.lasted(), self._look()
        assert after is not None
        idle, ours = after[0] - self._before[0], after[1] - self._before[1]
        return max(0.0, 1 - (idle + ours) / (seconds * after[2]))

    def _look(self) -> tuple[float, float, int] | None:
        """Seconds for which processors were idle, and those that ours took; how many there are."""
        try:
            lines = (PROC / "stat").read_text().splitlines()
        except OSError:
            return None
        ticks = [int(each) for each in lines[0].split()[1:]]
        if not any(ticks):  # a sandbox that shows nothing
            return None
        idle = sum(ticks[3:5]) / os.sysconf("SC_CLK_TCK")  # and waiting for a disk
        return idle, family(self._root), sum(line[3:4].isdigit() for line in lines)


def family(root: int) -> float:
    """Seconds of processor time of a process and its descendants, also of those that have ended."""
    parents, ended = {}, {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:  # after the name, which may hold anything: state, parent, ...
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            pid = int(entry.name)
            parents[pid], ended[pid] = int(fields[1]), int(fields[13]) + int(fields[14])
    total = 0.0
    for pid in parents:
        above: int | None = pid
        while above and above != root:
            above = parents.get(above)
        if above == root:
            total += ended[pid] / os.sysconf("SC_CLK_TCK") + _clock(pid)
    return total


def _clock(pid: int) -> float:
    """Seconds of processor time of a process; its clock is exact, unlike what /proc says of it."""
    try:
        return time.clock_gettime(~pid << 3 | 2)  # MAKE_PROCESS_CPUCLOCK, CPUCLOCK_SCHED of Linux
    except OSError:
        return 0.0
