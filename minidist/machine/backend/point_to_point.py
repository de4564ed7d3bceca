"""Messages from one rank to another.

For each rank that it may send to, a rank has two slots in its segment. A message goes through them
in pieces: the sender fills one slot while the receiver empties the other, and waits when both are
full. A message that fits into the slots is gone at once, received or not.

Messages of one tag arrive in the order in which they were sent. A receiver that waits for another
tag sets those that come before aside.
"""

import ctypes
import math
import time
from collections import deque
from collections.abc import Generator, Sequence

import torch

from minidist.machine.backend.group import HEADERS, POSTED, SLOT, TAKEN, Members, Reached
from minidist.machine.backend.queues import Operation, Until, Wait
from minidist.machine.backend.words import publish, reached

_DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)


class Receive(Wait):
    """A message that is waited for: (n,) of `x`, from one of `sources`."""

    def __init__(self, post: "Post", sources: Sequence[int], tag: int, x: torch.Tensor) -> None:
        self._post, self.sources, self.tag, self.x = post, sources, tag, x
        self.source: int | None = None  # once it is whole
        self._due = 0.0

    def over(self) -> bool:
        self._due = self._post.look(self.sources)
        return self.source is not None

    def due(self) -> float:
        return self._due

    def missing(self) -> list[int]:
        return [] if self._due else list(self.sources)  # a message is on its way

    def any_will_do(self) -> bool:
        return True


class _Message:
    """A message that is arriving: `arrived` bytes of it lie in `x`, (n,). `receive` waits for it,
    or nothing does."""

    def __init__(self, x: torch.Tensor, receive: Receive | None) -> None:
        self.x, self.receive, self.arrived = x, receive, 0


class Post:
    """The messages of one rank, both ways."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._waiting: list[Receive] = []  # in the order in which they were called
        self._arriving: dict[int, _Message] = {}  # by source
        # By source and tag; never empty, since a program may use a new tag for each message.
        self._aside: dict[tuple[int, int], deque[torch.Tensor]] = {}

    def send(self, x: torch.Tensor, to: int, tag: int, at: float) -> Operation:
        """Send x, (n,), to another rank; its trip on an emulated link begins at the time `at`."""
        members, due = self._members, 0.0
        words, network, total = members.mine.words, members.network, x.nbytes
        # The line is taken for the whole message, whenever the receiver makes room for it.
        trip = network.send(members.rank, to, total, at) if network is not None else None
        for start in range(0, max(total, 1), SLOT):
            number, length = words[POSTED + to], min(SLOT, total - start)
            free = Reached({to: members.heads[to]}, TAKEN + members.rank, number - 1)
            if not free.over():
                yield free
            ctypes.memmove(members.slot(members.rank, to, number), x.data_ptr() + start, length)
            if trip is not None:
                due = trip.part((start + length) / max(total, 1))
            header = HEADERS + 5 * (2 * to + number % 2)
            words[header], words[header + 1], words[header + 2] = tag, total, length
            words[header + 3], words[header + 4] = _DTYPES.index(x.dtype), int(due * 1e9)
            publish(words, POSTED + to, number + 1)
            members.ring(to)
        if trip is not None:
            yield Until(trip.left)

    def receive(
        self, x: torch.Tensor, sources: Sequence[int], tag: int
    ) -> Generator[Wait, None, int]:
        """Fill x, (n,), with a message from one of the sources. Returns from which."""
        wanted = Receive(self, sources, tag, x)
        aside = next((source for source in sources if (source, tag) in self._aside), None)
        if aside is not None:
            message = self._aside[aside, tag].popleft()
            if not self._aside[aside, tag]:
                del self._aside[aside, tag]
            self._give(message, wanted, aside)
        else:
            self._waiting.append(wanted)
            if not wanted.over():
                yield wanted
        assert wanted.source is not None
        del wanted.x  # a thread that still has this in hand keeps no tensor
        return wanted.source

    def look(self, sources: Sequence[int]) -> float:
        """Take what has come from these ranks. Returns when the next will come, or 0."""
        members, soonest = self._members, math.inf
        for source in sources:
            head = members.heads[source]
            while reached(
                [head], POSTED + members.rank, (number := members.mine.words[TAKEN + source]) + 1
            ):
                header = HEADERS + 5 * (2 * members.rank + number % 2)
                tag, total, length, dtype, due = head[header : header + 5]
                if due > time.monotonic_ns():
                    soonest = min(soonest, due / 1e9)
                    break
                message = self._arriving.get(source) or self._open(source, tag, total, dtype)
                end = message.arrived + length
                place = message.x.data_ptr() + message.arrived
                ctypes.memmove(place, members.slot(source, members.rank, number), length)
                publish(members.mine.words, TAKEN + source, number + 1)
                members.ring(source)
                message.arrived = end
                if end == total:
                    del self._arriving[source]
                    self._close(message, source, tag)
        return 0.0 if soonest == math.inf else soonest

    def _first(self, source: int, tag: int) -> Receive | None:
        """The first receive that waits for such a message. It is taken out of the list."""
        for receive in self._waiting:
            if source in receive.sources and receive.tag == tag:
                self._waiting.remove(receive)
                return receive
        return None

    def _open(self, source: int, tag: int, total: int, code: int) -> _Message:
        dtype = _DTYPES[code]
        if receive := self._first(source, tag):
            x = receive.x
            self._fits(x, source, total, dtype)
        else:
            x = torch.empty(total // dtype.itemsize, dtype=dtype)
        message = self._arriving[source] = _Message(x, receive)
        return message

    def _close(self, message: _Message, source: int, tag: int) -> None:
        if message.receive is not None:
            message.receive.source = source
        elif receive := self._first(source, tag):
            self._give(message.x, receive, source)
        else:
            self._aside.setdefault((source, tag), deque()).append(message.x)

    def _give(self, x: torch.Tensor, receive: Receive, source: int) -> None:
        self._fits(receive.x, source, x.nbytes, x.dtype)
        receive.x.copy_(x)
        receive.source = source

    def _fits(self, x: torch.Tensor, source: int, nbytes: int, dtype: torch.dtype) -> None:
        if x.nbytes != nbytes or x.dtype != dtype:
            sent, wanted = nbytes // dtype.itemsize, x.numel()
            raise RuntimeError(
                f"rank {source} sends {sent} elements of {dtype}, rank {self._members.rank} "
                f"waits for {wanted} of {x.dtype}"
            )
