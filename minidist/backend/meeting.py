"""How the ranks of a group find each other: each shows its memory and its bell in a store."""

import contextlib
from datetime import timedelta

import torch.distributed as dist

from minidist.backend.address import life, machine
from minidist.backend.segment import Segment


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


def attach(
    rank: int, shown: str, nbytes: int, opened: contextlib.ExitStack
) -> tuple[Segment, tuple[int, str]]:
    """Another rank's segment, and its life. What is opened will be closed by `opened`."""
    where, number, born, memory = shown.split("\n")
    if where != machine():
        raise RuntimeError(
            f"rank {rank} runs on another machine or in another container: shared memory does not "
            "reach it; use backend gloo"
        )
    try:
        if life(int(number)) != born:
            raise ProcessLookupError
        segment = Segment.attach(memory, nbytes)
        opened.callback(segment.close)
        return segment, (int(number), born)
    except OSError as error:
        gone = isinstance(error, (FileNotFoundError, ProcessLookupError))
        if gone or ended(int(number), born):  # whatever the error is while it dies
            raise RuntimeError(f"Connection closed by peer: rank {rank} has died") from None
        raise RuntimeError(f"the memory of rank {rank} cannot be opened: {error}") from error


def ended(number: int, born: str) -> bool:
    try:
        return life(number) != born
    except OSError:  # no file is left to look with
        return False


def spell(ranks: list[int]) -> str:
    """[1, 2] is "ranks 1, 2"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
