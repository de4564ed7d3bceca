"""Memory that all ranks of a machine can see.

A rank makes one segment for each process group, and the others map it. It is memory without a name:
nothing of it lies in a file system, so when the last process that maps it is gone, by whatever
death, it is gone too.

A segment is small, and grows. It begins with what every group needs: the head, the staging areas,
the slots. Behind them it is cut into chunks for tensors: chunk k goes from byte 2^k of the file to
byte 2^(k+1). So a tensor's offset in the file also says in which chunk the tensor lies.
A process maps a chunk when it first needs it, and a chunk that nobody needs costs nothing. The
machine gives a page when somebody first writes to it.
"""

import ctypes
import mmap
import os
import sys
import threading

import torch

from minidist.backend.address import closed_by_an_error, hide, new_file, reach, show

HEAD = 1 << 16  # bytes at its beginning that hold flags and descriptions, see `members`
TOKEN = 3  # the word of the head that no other segment has


class Segment:
    """Shared memory of one rank: of its beginning all `bytes`; of its head, `words` of int64 and
    `text`. `first` is the number of its first chunk."""

    def __init__(self, file: int, nbytes: int) -> None:
        self._file, self._lock = file, threading.Lock()
        self._chunks: dict[int, tuple[mmap.mmap, int]] = {}  # with the address of each
        self.first = (nbytes - 1).bit_length()
        begin = _map(file, 0, nbytes)
        head = memoryview(begin)[:HEAD]
        self.words, self.text = head.cast("q"), head
        with torch.inference_mode(False):  # who writes to it later may not be in that mode
            self.bytes = torch.frombuffer(begin, dtype=torch.uint8)  # (nbytes,)

    @classmethod
    def create(cls, nbytes: int) -> tuple["Segment", str]:
        """A new one that begins with so many bytes; and its address, by which others attach it.
        Raises OSError, which names the call, if the system refuses."""
        file, name = new_file(nbytes)
        with closed_by_an_error([file]):
            os.ftruncate(file, nbytes)
            segment, token = cls(file, nbytes), int.from_bytes(os.urandom(8), "little") >> 1
            segment.words[TOKEN] = token
            return segment, f"{show(file, name)}\t{token}"

    @classmethod
    def attach(cls, address: str, nbytes: int) -> "Segment":
        """The segment that another rank has created. Raises FileNotFoundError if that is gone,
        OSError if it cannot be opened."""
        shown, token = address.split("\t")
        file = reach(shown, os.O_RDWR)
        with closed_by_an_error([file]):
            if os.pread(file, 8, 8 * TOKEN) != int(token).to_bytes(8, sys.byteorder):
                raise FileNotFoundError(shown)
            return cls(file, nbytes)

    @staticmethod
    def forget(address: str) -> None:
        """Nobody will attach it any more."""
        hide(address.split("\t")[0])

    def close(self) -> None:
        """What is mapped stays, but the segment grows no more."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1

    def chunk(self, number: int, grow: bool = False) -> mmap.mmap:
        """A chunk, mapped when first asked for. The rank that made the segment lets it `grow`.
        Raises OSError if that cannot be, RuntimeError if the segment has been closed."""
        with self._lock:
            if number not in self._chunks:
                if self._file < 0:
                    raise RuntimeError("the process group has been closed")
                start = 1 << number
                if grow:
                    os.ftruncate(self._file, max(2 * start, os.fstat(self._file).st_size))
                chunk = _map(self._file, start, start)
                where = ctypes.addressof(ctypes.c_char.from_buffer(chunk))
                # A new dict: `find` may be looking through the old one.
                self._chunks = {**self._chunks, number: (chunk, where)}
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

    def room(self) -> int:
        """Bytes that the file system can still give to the file; where it has no limit, 1 << 62."""
        with self._lock:
            there = os.fstatvfs(self._file) if self._file >= 0 else None
        return there.f_bavail * there.f_frsize if there is not None and there.f_blocks else 1 << 62


def _map(file: int, start: int, nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(file, nbytes, offset=start)
    if hasattr(mmap, "MADV_DONTDUMP"):  # or a crash would write it all into its core
        memory.madvise(mmap.MADV_DONTDUMP)
    return memory
