"""Memory that all ranks of a machine can see.

A rank makes one segment for each process group and the others map it. It is memory without a name:
nothing of it lies in a file system, so when the last process that maps it is gone, by whatever
death, it is gone too. Pages are taken from the machine only when they are first written to: a
segment is as large as the machine's memory, and costs what is used.
"""

import mmap
import os
import tempfile

import torch

HEAD = 1 << 16  # bytes at its beginning that hold flags and descriptions, see `board`


class Segment:
    """Shared memory of one rank: `map`; all of it as `bytes`; of its head, `words` of int64 and
    `text`."""

    def __init__(self, file: int, nbytes: int) -> None:
        self.map = mmap.mmap(file, nbytes)
        head = memoryview(self.map)[:HEAD]
        self.words, self.text = head.cast("q"), head
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)  # (nbytes,)

    @classmethod
    def create(cls) -> tuple["Segment", str, int]:
        """A new one; its address, by which others attach it; and the file to close when they
        have."""
        nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if hasattr(os, "memfd_create"):
            file = os.memfd_create("minidist", os.MFD_CLOEXEC)
            address = f"/proc/{os.getpid()}/fd/{file}"
        else:  # macOS: a file, whose name the caller removes
            file, address = tempfile.mkstemp(prefix="minidist-")
        os.ftruncate(file, nbytes)
        return cls(file, nbytes), address, file

    @classmethod
    def attach(cls, address: str) -> "Segment":
        """The segment that another rank has created. Raises OSError if that is gone."""
        file = os.open(address, os.O_RDWR)
        try:
            return cls(file, os.fstat(file).st_size)
        finally:
            os.close(file)

    @staticmethod
    def forget(address: str, file: int) -> None:
        """Nobody will attach it any more."""
        os.close(file)
        if not address.startswith("/proc/"):
            os.unlink(address)

    def place(self, tensor: torch.Tensor) -> int:
        """Where in the segment the tensor's memory begins, or -1 if it lies elsewhere."""
        place = tensor.data_ptr() - self.bytes.data_ptr()
        return place if 0 < place < len(self.map) else -1
