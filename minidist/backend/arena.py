"""Room for tensors in a rank's own segment: an all_reduce of such a tensor needs no copies."""

import bisect
import mmap
import os
import threading
import weakref
from collections import deque

import torch

PAGE = mmap.PAGESIZE


class Arena:
    """Gives out the memory of a segment from `start` on, and takes it back when the last tensor in
    it is gone."""

    def __init__(self, memory: mmap.mmap, start: int) -> None:
        self._memory = memory
        self._free = [(start, len(memory))]  # (from, to), by place, none next to another
        # A tensor's end comes at any moment, in any thread, even amid `empty`: so it only leaves a
        # note here.
        self._given_back: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """(numel,), uninitialized. Raises MemoryError, which tells how much there is, if that is
        too much."""
        with self._lock:
            return self._empty(numel, dtype)

    def _empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        while self._given_back:
            self._merge(*self._given_back.popleft())
        nbytes = numel * dtype.itemsize
        size = -(-max(nbytes, 1) // PAGE) * PAGE
        there = available()
        found = next((i for i, (a, b) in enumerate(self._free) if b - a >= size), None)
        if found is None or size > there:
            raise MemoryError(
                f"shared memory for {nbytes:,} bytes was asked for; this machine has {there:,} left"
            )
        start, end = self._free[found]
        self._free[found : found + 1] = [(start + size, end)] if start + size < end else []
        tensor = torch.frombuffer(self._memory, dtype=dtype, count=max(numel, 1), offset=start)
        weakref.finalize(tensor.untyped_storage(), self._take_back, start, start + size)
        return tensor[:numel]

    def _take_back(self, start: int, end: int) -> None:
        if hasattr(mmap, "MADV_REMOVE"):
            self._memory.madvise(mmap.MADV_REMOVE, start, end - start)
        self._given_back.append((start, end))

    def _merge(self, start: int, end: int) -> None:
        at = bisect.bisect(self._free, (start, end))
        if at < len(self._free) and self._free[at][0] == end:
            end = self._free.pop(at)[1]
        if at and self._free[at - 1][1] == start:
            at -= 1
            start = self._free.pop(at)[0]
        self._free.insert(at, (start, end))


def available() -> int:
    """Bytes of memory that this machine, or the control group that we are in, can still give."""
    limits = [os.sysconf("SC_AVPHYS_PAGES") * PAGE]
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        limits = [int(fields["MemAvailable"].split()[0]) * 1024]
        with (
            open("/sys/fs/cgroup/memory.max") as most,
            open("/sys/fs/cgroup/memory.current") as now,
        ):
            limits.append(int(most.read()) - int(now.read()))
    except (OSError, KeyError, ValueError):  # no Linux, no control group, or none with a limit
        pass
    return max(0, min(limits))
