"""Room for tensors in a rank's own segment: the others read such a tensor where it lies."""

import bisect
import contextlib
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable

import torch

from minidist.machine.backend.segment import Segment

PAGE = mmap.PAGESIZE
SPARE = 1 << 26  # most bytes of scratch memory that are kept for later


class Arena:
    """Makes tensors in the chunks of a segment, and reuses the memory of those that are gone. It
    begins without a chunk, and takes one more when a tensor finds no room."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._owner = os.getpid()
        self._untouched = list(range(segment.first, 48))  # chunks
        self._free: list[tuple[int, int]] = []  # offsets (from, to), in order
        # A tensor may be freed at any moment, in any thread, even during `empty`: so its finalizer
        # only appends here.
        self._given_back: deque[tuple[int, int]] = deque()
        self._spare: deque[tuple[int, int]] = deque()  # scratch memory, kept for later
        self._lock = threading.Lock()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """(numel,), uninitialized. Raises MemoryError, which says how much is left."""
        if os.getpid() != self._owner:
            return torch.empty(numel, dtype=dtype)  # a child that was forked is no rank
        with self._lock:
            start, size = self._find_room(numel * dtype.itemsize)
            return self._tensor(numel, dtype, start, size, self._take_back)

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Like `empty`, for a short-lived tensor: its memory is kept for the next one of its size,
        since the machine takes time to give pages."""
        if os.getpid() != self._owner:
            return torch.empty(numel, dtype=dtype)
        with self._lock:
            size = _pages(numel * dtype.itemsize)
            for _ in range(len(self._spare)):
                start, end = self._spare.popleft()
                if end - start == size:
                    break
                self._spare.append((start, end))
            else:
                start, _ = self._find_room(size)
            return self._tensor(numel, dtype, start, size, self._keep)

    def _find_room(self, nbytes: int) -> tuple[int, int]:
        """The offset of free memory, and the size that is taken there."""
        while self._given_back:
            self._merge(*self._given_back.popleft())
        size = _pages(nbytes)
        there = min(available(), self._segment.room())
        if size > there:
            raise MemoryError(
                f"shared memory for {nbytes:,} bytes was asked for; this machine has {there:,} left"
            )
        found = next((i for i, (a, b) in enumerate(self._free) if b - a >= size), None)
        if found is None:
            found = self._grow(size)
        start, end = self._free[found]
        self._free[found : found + 1] = [(start + size, end)] if start + size < end else []
        return start, size

    def _tensor(
        self,
        numel: int,
        dtype: torch.dtype,
        start: int,
        size: int,
        at_its_end: Callable[[mmap.mmap, int, int], None],
    ) -> torch.Tensor:
        tensor = self._segment.at(start, max(numel, 1), dtype)
        chunk = self._segment.chunk(start.bit_length() - 1)
        weakref.finalize(tensor.untyped_storage(), at_its_end, chunk, start, start + size)
        # A no-op, by which torch's modes see that there is a new tensor.
        return torch.ops.aten.lift_fresh.default(tensor)[:numel]

    def _grow(self, size: int) -> int:
        """Take the smallest chunk that has so much room. Its index in `_free`."""
        number = next(k for k in self._untouched if 1 << k >= size)
        try:
            self._segment.chunk(number, grow=True)
        except OSError as error:
            raise MemoryError(f"{1 << number:,} bytes more of shared memory: {error}") from error
        self._untouched.remove(number)
        self._merge(1 << number, 2 << number)
        return self._free.index((1 << number, 2 << number))

    def _take_back(self, chunk: mmap.mmap, start: int, end: int) -> None:
        if os.getpid() != self._owner:
            return  # a child that was forked: the memory is its parent's
        if hasattr(mmap, "MADV_REMOVE"):
            with contextlib.suppress(OSError):  # a file on a disk that cannot
                chunk.madvise(mmap.MADV_REMOVE, start - len(chunk), end - start)
        self._given_back.append((start, end))

    def _keep(self, chunk: mmap.mmap, start: int, end: int) -> None:
        kept = sum([b - a for a, b in tuple(self._spare)])  # a copy, for it may change meanwhile
        if os.getpid() != self._owner or kept + end - start > SPARE:
            self._take_back(chunk, start, end)
        else:
            self._spare.append((start, end))

    def _merge(self, start: int, end: int) -> None:
        """Add this to the free memory, joined with what is free beside it in its chunk."""
        at = bisect.bisect(self._free, (start, end))
        if at < len(self._free) and self._free[at][0] == end and not _begins_chunk(end):
            end = self._free.pop(at)[1]
        if at and self._free[at - 1][1] == start and not _begins_chunk(start):
            at -= 1
            start = self._free.pop(at)[0]
        self._free.insert(at, (start, end))


def _pages(nbytes: int) -> int:
    """Bytes, rounded up to whole pages."""
    return -(-max(nbytes, 1) // PAGE) * PAGE


def _begins_chunk(offset: int) -> bool:
    return offset & (offset - 1) == 0


def available() -> int:
    """Bytes of memory that this machine, or the control group that we are in, can still give."""
    try:
        pages = os.sysconf("SC_AVPHYS_PAGES")
    except ValueError:  # macOS says only how much it has
        pages = os.sysconf("SC_PHYS_PAGES")
    limits = [pages * PAGE]
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        limits = [int(fields["MemAvailable"].split()[0]) * 1024]
        with (
            open("/sys/fs/cgroup/memory.max") as most,
            open("/sys/fs/cgroup/memory.current") as now,
            open("/sys/fs/cgroup/memory.stat") as parts,
        ):
            of = dict(line.split() for line in parts)
            cache = int(of["active_file"]) + int(of["inactive_file"])  # goes as others need room
            limits.append(int(most.read()) - int(now.read()) + cache)
    except (OSError, KeyError, ValueError):  # no Linux, no control group, or none with a limit
        pass
    return max(0, min(limits))
