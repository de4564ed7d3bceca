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
LARGEST = 48  # no tensor, and no chunk, has 2^48 bytes
KEPT = 1 << 26  # most bytes of short-lived tensors that are kept for later


class Segment:
    """Shared memory of one rank. `bytes`: its beginning, up to the chunks. `words` and `text`: its
    head, as int64 and as bytes. `start`: where it begins in this process. `first`: the number of
    its first chunk."""

    def __init__(self, file: int, nbytes: int) -> None:
        self._file, self._lock = file, threading.RLock()  # a finalizer may come within
        self._chunks: dict[int, tuple[mmap.mmap, int]] = {}  # with the address of each
        self.first = (nbytes - 1).bit_length()
        begin, self.start = _map(file, 0, nbytes)
        head = memoryview(begin)[:HEAD]
        self.words, self.text = head.cast("q"), head
        with torch.inference_mode(False):  # only that mode could write to a tensor made in it
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
    """Makes tensors in the chunks of this rank's own segment, where the others read them. Each has
    a place of 2^k bytes, whole pages; a place whose tensor is gone serves the next of its size."""

    def __init__(self, segment: Segment) -> None:
        self._segment, self._owner, self._lock = segment, os.getpid(), threading.Lock()
        self._chunk = segment.first - 1  # the last one that was begun
        self._next = self._end = 0  # what is left of it
        # Offsets of places, by k. A tensor may be gone at any moment, in any thread, even during
        # `empty`: its finalizer gives memory back, and appends here.
        self._free: list[deque[int]] = [deque() for _ in range(LARGEST)]
        self._kept: list[deque[int]] = [deque() for _ in range(LARGEST)]  # with their memory

    def empty(self, numel: int, dtype: torch.dtype, short_lived: bool = False) -> torch.Tensor:
        """(numel,), uninitialized. If it is `short_lived`, its memory is kept for the next such
        tensor of its size, since the machine takes time to give pages."""
        k = (max(numel * dtype.itemsize, mmap.PAGESIZE) - 1).bit_length()
        with self._lock:
            free = self._kept[k] if short_lived and self._kept[k] else self._free[k]
            start = free.pop() if free else self._new_place(1 << k)
        tensor = self._segment.at(start, max(numel, 1), dtype)
        gone = self._keep if short_lived else self._give_back
        weakref.finalize(tensor.untyped_storage(), gone, start, k)
        # A no-op, by which torch's modes see that there is a new tensor.
        return torch.ops.aten.lift_fresh.default(tensor)[:numel]

    def _new_place(self, size: int) -> int:
        if self._next + size > self._end:
            self._chunk = max(self._chunk + 1, size.bit_length() - 1)
            self._segment.chunk(self._chunk, grow=True)
            self._next, self._end = 1 << self._chunk, 2 << self._chunk
        self._next += size
        return self._next - size

    def _give_back(self, start: int, k: int) -> None:
        if os.getpid() != self._owner:
            return  # a child that was forked: the memory is its parent's
        if hasattr(mmap, "MADV_REMOVE"):
            chunk = self._segment.chunk(start.bit_length() - 1)
            chunk.madvise(mmap.MADV_REMOVE, start - len(chunk), 1 << k)
        self._free[k].append(start)

    def _keep(self, start: int, k: int) -> None:
        if sum([len(places) << i for i, places in enumerate(self._kept)]) + (1 << k) > KEPT:
            self._give_back(start, k)
        else:
            self._kept[k].append(start)


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


def has_ended(number: int) -> bool:
    """Whether the process of this number has ended, even if its parent has not asked yet."""
    try:
        os.kill(number, 0)
        with open(f"/proc/{number}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"  # behind its name
    except ProcessLookupError:
        return True
    except OSError:  # macOS has no such file; or no file is left to look with
        return False
