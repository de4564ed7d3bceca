"""Memory that all ranks of a machine can see, and tensors in it.

A rank makes one segment for each process group, and the others map it. It is memory without a name:
nothing of it lies in a file system, so when the last process that maps it is gone, by whatever
death, it is gone too.

A segment is small, and grows. It begins with what every group needs: the head, the staging areas,
the slots. Behind them it is cut into chunks for tensors: chunk k goes from byte 2^k of the file to
byte 2^(k+1). So a tensor's offset in the file also says in which chunk the tensor lies. A process
maps a chunk when it first needs it, and a chunk that nobody needs costs nothing. The machine gives
a page when somebody first writes to it.

The address of a segment travels through a store, which other machines and containers may share.
There the same path leads to another file, or nowhere. So each segment holds a number of its own,
which its address names too.
"""

import bisect
import contextlib
import ctypes
import mmap
import os
import sys
import tempfile
import threading
import weakref
from collections import deque

import torch

HEAD = 1 << 16  # bytes at its beginning that hold flags and descriptions, see `group`
TOKEN = 3  # the word of the head that no other segment has
PAGE = mmap.PAGESIZE
KEPT = 1 << 26  # most bytes of short-lived tensors that are kept for later


class Segment:
    """Shared memory of one rank. `bytes`: its beginning, up to the chunks. `words` and `text`: its
    head, as int64 and as bytes. `start`: where it begins in this process. `first`: the number of
    its first chunk."""

    def __init__(self, file: int, nbytes: int) -> None:
        self._file, self._lock = file, threading.Lock()
        self._chunks: dict[int, tuple[mmap.mmap, int]] = {}  # with the address of each
        self.first = (nbytes - 1).bit_length()
        begin, self.start = _map(file, 0, nbytes)
        head = memoryview(begin)[:HEAD]
        self.words, self.text = head.cast("q"), head
        self.bytes = torch.frombuffer(begin, dtype=torch.uint8)  # (nbytes,)

    @classmethod
    def create(cls, nbytes: int) -> tuple["Segment", str]:
        """A new segment, with so many bytes before its chunks; and the address by which others
        attach it."""
        file, name = new_file()
        os.ftruncate(file, nbytes)
        segment, token = cls(file, nbytes), int.from_bytes(os.urandom(8), "little") >> 1
        segment.words[TOKEN] = token
        return segment, f"{show(file, name)}\t{token}"

    @classmethod
    def attach(cls, address: str, nbytes: int) -> "Segment":
        """The segment that another rank has created. Raises OSError if it is not to be found."""
        shown, token = address.split("\t")
        file = reach(shown)
        if os.pread(file, 8, 8 * TOKEN) != int(token).to_bytes(8, sys.byteorder):
            os.close(file)
            raise FileNotFoundError(shown)
        return cls(file, nbytes)

    def close(self) -> None:
        """Close the file: what is mapped stays, but no further chunk can be mapped."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1

    def chunk(self, number: int, grow: bool = False) -> mmap.mmap:
        """A chunk, mapped when first asked for. The rank that made the segment lets it `grow`.
        Raises OSError if the machine refuses, RuntimeError if this rank has closed the segment."""
        with self._lock:
            if number not in self._chunks:
                if self._file < 0:
                    raise RuntimeError("the process group has been closed")
                start = 1 << number
                if grow:
                    os.ftruncate(self._file, max(2 * start, os.fstat(self._file).st_size))
                # A new dict: `find` may be looking through the old one.
                self._chunks = {**self._chunks, number: _map(self._file, start, start)}
            return self._chunks[number][0]

    def find(self, x: torch.Tensor) -> int:
        """The offset of a tensor that lies in a chunk, or 0 if it lies elsewhere."""
        address = x.data_ptr()
        for number, (_, where) in self._chunks.items():
            if 0 <= address - where < 1 << number:
                return (1 << number) + address - where
        return 0

    def at(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """(numel,), at an offset that the segment's rank has found."""
        number = offset.bit_length() - 1
        chunk, start = self.chunk(number), 1 << number
        return torch.frombuffer(chunk, dtype=dtype, count=numel, offset=offset - start)


def _map(file: int, start: int, nbytes: int) -> tuple[mmap.mmap, int]:
    """These bytes of a file in this process's memory, and their address."""
    memory = mmap.mmap(file, nbytes, offset=start)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


# ---- tensors in the chunks ----------------------------------------------------------------------


class Arena:
    """Makes tensors in the chunks of this rank's own segment, where the others read them, and
    reuses the memory of those that are gone. It takes one more chunk when a tensor finds no
    room."""

    def __init__(self, segment: Segment) -> None:
        self._segment, self._owner = segment, os.getpid()
        self._untouched = list(range(segment.first, 48))  # chunks
        self._free: list[tuple[int, int]] = []  # offsets (from, to), in order
        # A tensor may be freed at any moment, in any thread, even during `empty`: so its finalizer
        # only appends here.
        self._given_back: deque[tuple[int, int]] = deque()
        self._kept: deque[tuple[int, int]] = deque()  # of short-lived tensors
        self._lock = threading.Lock()

    def empty(self, numel: int, dtype: torch.dtype, short_lived: bool = False) -> torch.Tensor:
        """(numel,), uninitialized. If it is `short_lived`, its memory is kept for the next such
        tensor of its size, since the machine takes time to give pages."""
        size = _pages(numel * dtype.itemsize)
        with self._lock:
            start = (short_lived and self._find_kept(size)) or self._find_room(size)
        tensor = self._segment.at(start, max(numel, 1), dtype)
        chunk = self._segment.chunk(start.bit_length() - 1)
        gone = self._keep if short_lived else self._take_back
        weakref.finalize(tensor.untyped_storage(), gone, chunk, start, start + size)
        # A no-op, by which torch's modes see that there is a new tensor.
        return torch.ops.aten.lift_fresh.default(tensor)[:numel]

    def _find_kept(self, size: int) -> int:
        """The offset of so much memory of a short-lived tensor, or 0."""
        for _ in range(len(self._kept)):
            start, end = self._kept.popleft()
            if end - start == size:
                return start
            self._kept.append((start, end))
        return 0

    def _find_room(self, size: int) -> int:
        """The offset of so much free memory, which is taken."""
        while self._given_back:
            self._merge(*self._given_back.popleft())
        found = next((i for i, (a, b) in enumerate(self._free) if b - a >= size), None)
        if found is None:  # the smallest chunk that has so much room
            number = next(k for k in self._untouched if 1 << k >= size)
            self._segment.chunk(number, grow=True)
            self._untouched.remove(number)
            self._merge(1 << number, 2 << number)
            found = self._free.index((1 << number, 2 << number))
        start, end = self._free.pop(found)
        if start + size < end:
            self._free.insert(found, (start + size, end))
        return start

    def _take_back(self, chunk: mmap.mmap, start: int, end: int) -> None:
        if os.getpid() != self._owner:
            return  # a child that was forked: the memory is its parent's
        if hasattr(mmap, "MADV_REMOVE"):
            chunk.madvise(mmap.MADV_REMOVE, start - len(chunk), end - start)
        self._given_back.append((start, end))

    def _keep(self, chunk: mmap.mmap, start: int, end: int) -> None:
        kept = sum([b - a for a, b in tuple(self._kept)])  # a copy, for it may change meanwhile
        if os.getpid() != self._owner or kept + end - start > KEPT:
            self._take_back(chunk, start, end)
        else:
            self._kept.append((start, end))

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


# ---- what other processes find ------------------------------------------------------------------


def new_file() -> tuple[int, str]:
    """A file in memory, without a name. On macOS it is one in a folder, and needs its name until
    all have it open."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("minidist", os.MFD_CLOEXEC), ""
    return tempfile.mkstemp(prefix="minidist-")


def show(file: int, name: str) -> str:
    """Where another process finds a file that this one has open, by its name if it has one."""
    return name or f"/proc/{os.getpid()}/fd/{file}"


def reach(shown: str) -> int:
    """Open what another process shows."""
    return os.open(shown, os.O_RDWR | os.O_CLOEXEC)


def hide(shown: str) -> None:
    """Remove the file's name, if it has one: all have opened it. Takes a segment's address, too."""
    path = shown.partition("\t")[0]
    if not path.startswith("/proc/"):
        os.unlink(path)


def unreachable(rank: int, error: OSError) -> RuntimeError:
    """The rank's memory could not be opened."""
    return RuntimeError(
        f"Connection closed by peer: the memory of rank {rank} cannot be opened ({error}). It has "
        "died, or it runs on another machine or in another container: use backend gloo there"
    )


def life(number: int) -> str:
    """When the process of this number began, by the kernel's clock; "" if it has ended. So two
    processes that had the number one after the other are told apart."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        with open(f"/proc/{number}/stat") as file:
            state, *fields = file.read().rpartition(")")[2].split()  # behind its name
        return "" if state in "ZXx" else fields[18]
    if os.path.isdir("/proc/self"):
        return ""
    try:  # macOS
        os.kill(number, 0)
    except ProcessLookupError:
        return ""
    return "?"


def ended(number: int, born: str) -> bool:
    """Whether the process that had this life has ended."""
    try:
        return life(number) != born
    except OSError:  # no file is left to look with
        return False
