"""The ranks of a group, as one of them sees them: their memory, how far they are, what they call.

Each word of shared memory has one writer: a rank writes into its own segment only, and reads those
of the others. The head of a segment holds

- `TICK`, the number of barriers that the rank has come to; `LEFT`, 1 when it has left the group;
- `EXPECTED` (in `bell`), 1 while the rank sleeps until its bell rings;
- `PLACE`, where the tensors of its last two calls lie in its segment, or -1;
- `DUE`, when the messages of its last two calls will have arrived, in ns, on an emulated link;
- `POSTED + q`, the number of messages to rank q that have been put into slots; `TAKEN + q`, that of
  the messages from rank q that have been taken out; `HEADERS`, what is in the slots (`messages`);
- at `TEXT`, the descriptions of the rank's last two calls.

Behind the head come the staging areas, two slots for each rank, and the arena.
"""

import hashlib
import os
import select
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from minidist.backend.arena import Arena
from minidist.backend.bell import Bell
from minidist.backend.engine import Operation, Until, Wait
from minidist.backend.link import Egress, Link
from minidist.backend.segment import HEAD, Segment

LIMIT = 256  # ranks of a group
TICK, LEFT, PLACE, DUE, POSTED, TAKEN, HEADERS = 0, 1, 4, 6, 8, 8 + LIMIT, 8 + 2 * LIMIT
LENGTH = 2048  # bytes of a description
TEXT = HEAD - 2 * LENGTH

STAGE = 1 << 21  # bytes of a staging area
STAGES = 3  # areas: a piece is staged, added up and taken, with a barrier between
SLOT = 1 << 19  # bytes of a slot


class Members:
    """The ranks of a group, `rank` among them. Raises ValueError for too many, RuntimeError if a
    rank does not come, is gone, or lives on another machine."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        link: Link | None = None,
        nodes: Sequence[int] = (),
        egress: Egress | None = None,
    ) -> None:
        if size > LIMIT:
            raise ValueError(f'backend "shm" takes up to {LIMIT} ranks in a group, not {size}')
        self.rank, self.size, self.timeout = rank, size, timeout.total_seconds()
        self._link, self._nodes, self.egress = link, nodes, egress or Egress()
        self.mine, address, file = Segment.create()
        self.bell, pipe = Bell.create(self.mine.words)
        meeting = _Meeting(store, rank, size, timeout)
        try:
            found = meeting.exchange("segment", f"{os.getpid()}\n{address}\n{pipe}")
            others = {r: _attach(r, *found[r].split("\n")) for r in range(size) if r != rank}
            meeting.exchange("attached", "")
        finally:
            Segment.forget(address, file)
            Bell.forget(pipe)
        self._lives = {r: life for r, (_, _, life) in others.items() if life is not None}
        self._bells = {r: bell for r, (_, bell, _) in others.items()}
        self.segments = [others[r][0] if r != rank else self.mine for r in range(size)]
        self.heads = [segment.words for segment in self.segments]
        self.arena = Arena(self.mine.map, HEAD + STAGES * STAGE + 2 * size * SLOT)
        self._calls = self._pieces = 0

    def rooms(self, parts: int, length: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """A staging area of each rank, for the next piece: (parts, length) of this dtype."""
        self._pieces += 1
        place, nbytes = HEAD + self._pieces % STAGES * STAGE, parts * length * dtype.itemsize
        return [
            s.bytes[place : place + nbytes].view(dtype).view(parts, length) for s in self.segments
        ]

    def slot(self, sender: int, receiver: int, number: int) -> torch.Tensor:
        """Where the sender puts its message of this number for the receiver: (SLOT,) bytes."""
        place = HEAD + STAGES * STAGE + (2 * receiver + number % 2) * SLOT
        return self.segments[sender].bytes[place : place + SLOT]

    # ---- what ranks call -------------------------------------------------------------------

    def call(self, description: str, where: str, messages: int, nbytes: float) -> None:
        """Write down the call that begins. All ranks must give the same description. On an emulated
        link it takes as long as so many messages, one after the other, of so many bytes
        together."""
        self._calls += 1
        text = f"{_short(description)}\n{where}".encode()[: LENGTH - 8]
        place = TEXT + self._calls % 2 * LENGTH
        self.mine.text[place + 8 : place + 8 + len(text)] = text
        self.mine.words[place // 8] = len(text)
        if self._link is not None:
            between = self._link.inter if len(set(self._nodes)) > 1 else None
            seconds = (between or self._link).seconds(nbytes, messages)  # of the slowest link
            self.mine.words[DUE + self._calls % 2] = int(self.egress.leave(seconds) * 1e9)

    def barrier(self) -> Operation:
        """Wait until all have come here."""
        ticks = self.mine.words[TICK] + 1
        self.mine.words[TICK] = ticks
        barrier = _Barrier(self.heads, ticks)
        if barrier.over():  # this rank is the last
            self.ring(*self._bells)
        yield barrier

    def ring(self, *ranks: int) -> None:
        """Wake those of them that sleep: what they wait for may have come."""
        for rank in ranks:
            self._bells[rank].ring()

    def agree(self) -> Operation:
        """A barrier, and a check that all make the same call."""
        yield from self.barrier()
        self.compare()

    def compare(self) -> None:
        """Raises RuntimeError that shows each rank's call, on all of them, if one is another."""
        calls = [self._latest(r, self._calls) for r in range(self.size)]
        if any(what != calls[0][0] for what, _ in calls):
            lines = [f"\n  rank {r}: {what}{_at(where)}" for r, (what, where) in enumerate(calls)]
            raise RuntimeError("every rank of a group must make the same call" + "".join(lines))

    def _latest(self, rank: int, number: int) -> tuple[str, str]:
        place, segment = TEXT + number % 2 * LENGTH, self.segments[rank]
        text = bytes(segment.text[place + 8 : place + 8 + segment.words[place // 8]])
        what, _, where = text.decode(errors="replace").partition("\n")
        return what, where

    def place(self, x: torch.Tensor) -> bool:
        """Write down where the tensor lies, before a barrier. Whether it lies in our segment."""
        place = self.mine.place(x)
        self.mine.words[PLACE + self._calls % 2] = place
        return place >= 0

    def placed(self, x: torch.Tensor) -> list[torch.Tensor]:
        """After it: the tensors of all ranks, like x, that lie in their segments."""
        places = [head[PLACE + self._calls % 2] for head in self.heads]
        return [
            s.bytes[place : place + x.nbytes].view(x.dtype).view(x.shape)
            for s, place in zip(self.segments, places, strict=True)
            if place >= 0
        ]

    # ---- the emulated link -----------------------------------------------------------------

    def link_to(self, rank: int) -> Link | None:
        """The link to another rank of the group, if one is emulated."""
        link = self._link
        if link is not None and link.inter and self._nodes[rank] != self._nodes[self.rank]:
            return link.inter
        return link

    def travel(self) -> Operation:
        """Wait until the last rank's messages of this call have arrived."""
        if self._link is not None:
            due = max(head[DUE + self._calls % 2] for head in self.heads) / 1e9
            self.egress.busy(due)
            yield Until(due)

    # ---- when somebody does not come -------------------------------------------------------

    def explain(self, wait: Wait, what: str, seconds: float) -> BaseException | None:
        """Why it is in vain to wait, if it is: in the call `what`, for so many `seconds` already if
        that is too long, else 0."""
        missing = wait.missing()
        gone = {rank: how for rank in missing if (how := self._gone(rank))}
        if gone and (len(gone) == len(missing) or not wait.any_will_do()):
            rank, how = next(iter(gone.items()))
            return RuntimeError(
                f"Connection closed by peer: rank {rank} has {how}, and rank {self.rank} waits for "
                f"it in {what}"
            )
        if not missing or not seconds:
            return None
        return RuntimeError(f"Timed out waiting {seconds:g} s for {_ranks(missing)} in {what}")

    def _gone(self, rank: int) -> str:
        """How the rank has gone, if it has."""
        life = self._lives.get(rank)
        if life is not None and _readable(life):
            return "died"
        return "left" if self.heads[rank][LEFT] else ""

    def leave(self) -> None:
        """Tell the others that this rank will come no more."""
        self.mine.words[LEFT] = 1
        self.ring(*self._bells)
        for life in self._lives.values():
            os.close(life)
        for bell in [self.bell, *self._bells.values()]:
            bell.close()
        self._lives.clear()
        self._bells.clear()


class _Meeting:
    """Where the ranks of a group tell each other where they are."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        # A store may outlive its group, and serve the next one of the same name.
        self._turn = store.add(f"turn of rank {rank}", 1)

    def exchange(self, name: str, value: str) -> list[str]:
        """The values of all ranks."""
        keys = [f"{name} {rank}, {self._turn}" for rank in range(self._size)]
        self._store.set(keys[self._rank], value)
        try:
            self._store.wait(keys, self._timeout)
        except RuntimeError:  # of whatever kind: each store has its own
            absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise RuntimeError(
                f"Timed out waiting {self._timeout.total_seconds():g} s for {_ranks(absent)} to "
                "make the group"
            ) from None
        return [self._store.get(key).decode() for key in keys]


def _attach(rank: int, pid: str, address: str, pipe: str) -> tuple[Segment, Bell, int | None]:
    """Another rank's segment, its bell, and what is readable when its process has ended."""
    try:
        life = os.pidfd_open(int(pid)) if hasattr(os, "pidfd_open") else None
        segment = Segment.attach(address)
        return segment, Bell.attach(segment.words, pipe), life
    except OSError as error:
        raise RuntimeError(
            f"Connection closed by peer: rank {rank} has died, or runs on another machine"
        ) from error


def _readable(file: int) -> bool:
    poll = select.poll()  # `select` knows only small numbers of files
    poll.register(file, select.POLLIN)
    return bool(poll.poll(0))


class _Barrier(Wait):
    def __init__(self, heads: list[memoryview], ticks: int) -> None:
        self._heads, self._ticks = heads, ticks

    def over(self) -> bool:
        ticks = self._ticks
        return all([head[TICK] >= ticks for head in self._heads])

    def missing(self) -> list[int]:
        return [r for r, head in enumerate(self._heads) if head[TICK] < self._ticks]


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _short(description: str) -> str:
    """A text that fits, and differs where the long one does."""
    if len(description) < LENGTH // 2:
        return description
    digest = hashlib.sha256(description.encode()).hexdigest()
    return f"{description[: LENGTH // 2]}... (sha256 {digest[:16]})"


def _at(where: str) -> str:
    return f", {where}" if where else ""
