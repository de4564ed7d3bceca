"""Memory that all ranks of a machine can see.

A rank makes one segment for each process group, and the others map it. It is memory without a name:
nothing of it lies in a file system, so when the last process that maps it is gone, by whatever
death, it is gone too.

A segment is small, and grows. It begins with what every group needs: the head, the staging areas,
the slots. Behind them it is cut into chunks for tensors: chunk k goes from byte 2^k of the file to
byte 2^(k+1). So a tensor's offset in the file also says in which chunk the tensor lies. A process
maps a chunk when it first needs it, and a chunk that nobody needs costs nothing. The machine gives
a page when somebody first writes to it.

Memory stays mapped without an open file. So a group costs a rank one open file, that of its own
segment, however many ranks there are: it opens another rank's only while it maps a part of it.

The address of a file travels through a store, which other machines and containers may share. There
the same path leads to a stranger's file, or nowhere; and here too, once the process has ended and
its number is another's. So nothing is opened before it is known to be the file that was shown.
"""

import contextlib
import ctypes
import functools
import mmap
import os
import sys
import tempfile
import threading
from typing import Any

import torch

HEAD = 1 << 16  # bytes at its beginning that hold flags and descriptions, see `members`
TOKEN = 3  # the word of the head that no other segment has


class Segment:
    """Shared memory of one rank. `bytes`: its beginning, up to the chunks. `words` and `text`: its
    head, as int64 and as bytes. `start`: where it begins in this process. `first`: the number of
    its first chunk."""

    def __init__(self, file: int, nbytes: int) -> None:
        self._file, self._lock = file, threading.Lock()
        self._shown, self._closed = "", False  # where to open the file again, if it is not kept
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
        attach it. Raises OSError, which names the call, if the system refuses."""
        file, name = new_file(nbytes)
        with contextlib.ExitStack() as failed:
            failed.callback(os.close, file)
            os.ftruncate(file, nbytes)
            segment, token = cls(file, nbytes), int.from_bytes(os.urandom(8), "little") >> 1
            segment.words[TOKEN] = token
            shown = show(file, name)
            failed.pop_all()
        return segment, f"{shown}\t{token}"

    @classmethod
    def attach(cls, address: str, nbytes: int) -> "Segment":
        """The segment that another rank has created. Raises FileNotFoundError if that is gone,
        OSError if it cannot be opened."""
        shown, token = address.split("\t")
        file = reach(shown)
        with contextlib.ExitStack() as failed:
            failed.callback(os.close, file)
            if os.pread(file, 8, 8 * TOKEN) != int(token).to_bytes(8, sys.byteorder):
                raise FileNotFoundError(shown)
            segment = cls(file, nbytes)
            failed.pop_all()
        if not _has_name(shown):
            segment._shown, segment._file = shown, -1
            os.close(file)
        return segment

    def close(self) -> None:
        """Close the file: what is mapped stays, but no further chunk can be mapped."""
        with self._lock:
            self._closed = True
            if self._file >= 0:
                os.close(self._file)
            self._file = -1

    def chunk(self, number: int, grow: bool = False) -> mmap.mmap:
        """A chunk, mapped when first asked for. The rank that made the segment lets it `grow`.
        Raises OSError if that cannot be, FileNotFoundError if the rank that made it has closed it
        or died, RuntimeError if we have closed it."""
        with self._lock:
            if number not in self._chunks:
                if self._closed:
                    raise RuntimeError("the process group has been closed")
                start, file = 1 << number, self._file if self._file >= 0 else reach(self._shown)
                try:
                    if grow:
                        os.ftruncate(file, max(2 * start, os.fstat(file).st_size))
                    # A new dict: `find` may be looking through the old one.
                    self._chunks = {**self._chunks, number: _map(file, start, start)}
                finally:
                    if file != self._file:
                        os.close(file)
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


# ---- a part of a file in this process's memory -------------------------------------------------

FIXED, NORESERVE = 0x10, 0x4000 if sys.platform == "linux" else 0  # of sys/mman.h


@functools.cache
def _mmap() -> Any:
    call, whole = ctypes.CDLL(None, use_errno=True).mmap, ctypes.c_int
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, whole, whole, whole, ctypes.c_int64]
    return call


def _map(file: int, start: int, nbytes: int) -> tuple[mmap.mmap, int]:
    """These bytes of a file, and their address."""
    # mmap.mmap(file, ...) would keep a second file open. So it takes addresses only, and what lies
    # there is replaced by the file.
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    where = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    if _mmap()(where, nbytes, protection, mmap.MAP_SHARED | FIXED, file, start) != where:
        raise OSError(ctypes.get_errno(), f"mmap: {os.strerror(ctypes.get_errno())}")
    if hasattr(mmap, "MADV_DONTDUMP"):  # or a crash would write it all into its core
        memory.madvise(mmap.MADV_DONTDUMP)
    return memory, where


# ---- files that other processes find ------------------------------------------------------------


def new_file(nbytes: int) -> tuple[int, str]:
    """A file in memory, without a name. Where the system has none or refuses it, one in a folder;
    on macOS that needs its name, until all have it open."""
    try:
        return os.memfd_create("minidist", os.MFD_CLOEXEC), ""
    except (AttributeError, OSError) as error:
        refused = f"memfd_create: {error}"
    if not os.path.isdir("/proc/self/fd"):
        return tempfile.mkstemp(prefix="minidist-")
    for folder in ("/dev/shm", tempfile.gettempdir()):
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)  # or a full folder ends us by SIGBUS
                return os.dup(file.fileno()), ""
        except OSError as error:
            refused += f"; {folder}: {error}"
    raise OSError(f"no memory that ranks could share ({refused})")


def show(file: int, name: str = "") -> str:
    """Where another process finds a file that this one has open, by its name if it has one; and
    what tells the file from any other that may be found there."""
    there = os.fstat(file)
    return f"{name or f'/proc/{process()}/fd/{file}'}:{there.st_dev}:{there.st_ino}"


def reach(shown: str) -> int:
    """Open what another process shows. Raises FileNotFoundError if that is gone."""
    name, device, inode = shown.rsplit(":", 2)
    there = os.stat(name)  # not yet opened: a stranger's pipe would notice that
    if (there.st_dev, there.st_ino) != (int(device), int(inode)):
        raise FileNotFoundError(name)
    return os.open(name, os.O_RDWR | os.O_CLOEXEC)


def hide(shown: str) -> None:
    """Remove the file's name, if it has one: all have opened it. Takes a segment's address, too."""
    if _has_name(shown):
        os.unlink(shown.rsplit(":", 2)[0])


def _has_name(shown: str) -> bool:
    return not shown.startswith("/proc/")


def process() -> int:
    """The number by which others find this process."""
    try:
        return int(os.readlink("/proc/self"))
    except OSError:  # macOS
        return os.getpid()
