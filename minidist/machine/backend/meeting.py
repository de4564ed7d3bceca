"""How the ranks of a group find each other's memory, and see that another rank has died."""

import contextlib
import os
import socket
from datetime import timedelta

import torch.distributed as dist

from minidist.machine.backend.segment import Segment, process


class Meeting:
    """A store, in which the ranks of a group exchange values."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        # A store may outlive its group, and serve the next one of the same name.
        self._generation = store.add(f"generation of rank {rank}", 1)

    def exchange(self, name: str, value: str) -> list[str]:
        """The values of all ranks."""
        keys = [f"{name} {rank}, {self._generation}" for rank in range(self._size)]
        self._store.set(keys[self._rank], value)
        try:
            self._store.wait(keys, self._timeout)
        except RuntimeError:  # of whatever kind: each store has its own
            absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise RuntimeError(
                f"Timed out waiting {self._timeout.total_seconds():g} s for {spell(absent)} to "
                "make the group"
            ) from None
        return [self._store.get(key).decode() for key in keys]


def introduce(memory: str) -> str:
    """What a rank shows of itself: its machine, its process, and its segment's address."""
    me = process()
    return "\n".join([machine(), str(me), life(me), memory])


def attach(
    rank: int, shown: str, nbytes: int, opened: contextlib.ExitStack
) -> tuple[Segment, tuple[int, str]]:
    """The segment of a rank that has `shown` this, which `opened` will close; and its life."""
    where, number, born, memory = shown.split("\n")
    try:
        if where != machine():
            raise RuntimeError(
                f"rank {rank} runs on another machine or in another container: shared memory does "
                "not reach it; use backend gloo"
            )
        if life(int(number)) != born:
            raise ProcessLookupError
        segment = Segment.attach(memory, nbytes)
    except OSError as error:
        raise unreachable(rank, error, ended(int(number), born) and "died") from None
    opened.callback(segment.close)
    return segment, (int(number), born)


def unreachable(rank: int, error: OSError, gone: str | bool = "") -> RuntimeError:
    """The rank's memory could not be opened; `gone` is how it has gone, if that is known."""
    if not gone and isinstance(error, FileNotFoundError):
        gone = "died or given up"  # it closes its files before others can see that it has ended
    if gone or isinstance(error, ProcessLookupError):
        return RuntimeError(f"Connection closed by peer: rank {rank} has {gone or 'died'}")
    return RuntimeError(f"the memory of rank {rank} cannot be opened: {error}")


def machine() -> str:
    """Identifies this boot and PID namespace: only processes with equal values can open each
    other's /proc files."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except (FileNotFoundError, PermissionError):  # macOS
        return socket.gethostname()


def life(number: int) -> str:
    """When the process of this number began, by the kernel's clock; "" if it has ended. So two
    processes that had the number one after the other are told apart. Raises OSError if this cannot
    be seen now."""
    try:
        with open(f"/proc/{number}/stat") as file:
            state, *fields = file.read().rpartition(")")[2].split()  # behind its name
        return "" if state in "ZXx" else fields[18]
    except (FileNotFoundError, ProcessLookupError):
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


def spell(ranks: list[int]) -> str:
    """[1, 2] is "ranks 1, 2"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
