"""The ranks of a group, as one of them sees them: their memory, how far they are, what they call.

Each word of shared memory but `RUNG` has one writer: a rank writes into its own segment only, and
reads those of the others. The head of a segment holds

- `TICK`, the number of barriers that the rank has come to; `LEFT`, 1 when it has left the group;
- `EXPECTED`, which of the rank's threads its bell shall wake; `RUNG`, which it has, written by who
  rang (see `words`);
- `TOKEN` (in `segment`), by which others know that it is this segment;
- `OFFSET`, where in its segment the last two tensors lie that it has shared, or 0;
- `MARK`, a checksum of its last two calls;
- on an emulated link, in ns: `READY`, when its last call began; in rank 0's head `DUES + q`, when
  rank q's messages of the last call have come and gone; and `PLANNED`, which call that was;
- `POSTED + q`, the number of messages to rank q that have been put into slots; `TAKEN + q`, that of
  the messages from rank q that have been taken out; `HEADERS`, what is in the slots (see
  `point_to_point`);
- at `TEXT`, its call, once the ranks know that their calls differ.

Behind the head come the staging areas, two slots for each rank, and the arena.
"""

import contextlib
import hashlib
import os
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from minidist.instruments.link import Link
from minidist.instruments.link.link import Network
from minidist.instruments.link.shared_lines import LINES
from minidist.instruments.link.steps import Step
from minidist.machine.backend.queues import Operation, Until, Wait
from minidist.machine.backend.segment import HEAD, Arena, Segment, has_ended, hide, unreachable
from minidist.machine.backend.words import Bell, publish, reached

Caller = tuple[str, int] | None  # a file, and a line of it

LIMIT = 256  # ranks of a group
TICK, LEFT, OFFSET, READY, PLANNED, MARK = 0, 1, 4, 6, 7, 8
POSTED, TAKEN, HEADERS = 13, 13 + LIMIT, 13 + 2 * LIMIT
DUES = HEADERS + 10 * LIMIT
LENGTH = 2048  # bytes of a description
TEXT = HEAD - LENGTH

STAGE = 1 << 22  # bytes of a staging area
STAGES = 3  # areas: a piece is staged, added up and taken, with a barrier between
SLOTS = HEAD + STAGES * STAGE  # where the slots begin
SLOT = 1 << 19  # bytes of a slot


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
        ranks: Sequence[int] = (),
        nodes: Sequence[int] = (),
    ) -> None:
        if size > LIMIT:
            raise ValueError(f'backend "shm" takes up to {LIMIT} ranks in a group, not {size}')
        self.rank, self.size, self.timeout = rank, size, timeout.total_seconds()
        self.network = Network(link, ranks, nodes, LINES) if link is not None else None
        self._processes: dict[int, int] = {}  # of the other ranks
        self.segments: list[Segment] = []
        nbytes = SLOTS + 2 * size * SLOT
        with contextlib.ExitStack() as opened, contextlib.ExitStack() as shown:
            self.mine, address = Segment.create(nbytes)
            opened.callback(self.mine.close)
            shown.callback(hide, address)
            meeting = Meeting(store, rank, size, timeout)
            for r, each in enumerate(meeting.exchange("segment", f"{os.getpid()}\n{address}")):
                process, address = each.split("\n")
                self.segments.append(self.mine if r == rank else _attach(r, address, nbytes))
                opened.callback(self.segments[r].close)
                self._processes[r] = int(process)
            del self._processes[rank]
            if link is not None:
                shown.callback(LINES.join(rank, meeting.exchange))
            meeting.exchange("attached", "")
            self._opened = opened.pop_all()  # until we leave; an error before closes it now
        self.heads = {r: segment.words for r, segment in enumerate(self.segments)}
        self.bell = Bell(self.heads[rank])
        self._bells = {r: Bell(self.heads[r]) for r in self._processes}
        self.arena = Arena(self.mine)
        self._calls = self._pieces = self._shared = 0
        self._due = 0.0  # when the last call was over, on an emulated link
        self._call: tuple[str, Caller] = "", None
        self._areas: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def rooms(self, length: int, dtype: torch.dtype, parts: int = 0) -> list[torch.Tensor]:
        """A staging area of each rank, for the next piece: (length,), or (parts, length)."""
        self._pieces += 1
        key = self._pieces % STAGES, dtype
        if key not in self._areas:
            start = HEAD + key[0] * STAGE
            self._areas[key] = [s.bytes[start : start + STAGE].view(dtype) for s in self.segments]
        if not parts:
            return [area[:length] for area in self._areas[key]]
        return [area[: parts * length].view(parts, length) for area in self._areas[key]]

    def slot(self, sender: int, receiver: int, number: int) -> int:
        """The address at which the sender puts piece `number` for the receiver: SLOT bytes, which
        are moved without torch, since torch takes ten times as long for few."""
        return self.segments[sender].start + SLOTS + (2 * receiver + number % 2) * SLOT

    # ---- what ranks call -------------------------------------------------------------------

    def call(self, what: str, where: Caller, at: float = 0.0) -> None:
        """Begin a call that was made at this time. All ranks must make the same one."""
        self._calls += 1
        self._call = what, where
        self.mine.words[MARK + self._calls % 2] = zlib.crc32(what.encode())
        # Not the present time, which is later by what a processor needs to wake up.
        self.mine.words[READY] = int(max(at, self._due) * 1e9)

    def barrier(self) -> Operation:
        """Wait until all have come here."""
        ticks = self.mine.words[TICK] + 1
        publish(self.mine.words, TICK, ticks)
        barrier = Reached(self.heads, TICK, ticks)
        if barrier.over():  # this rank is the last
            self.ring(*self._bells)
        else:
            yield barrier

    def ring(self, *ranks: int) -> None:
        """Wake those of them that sleep: what they wait for may have come."""
        for rank in ranks:
            self._bells[rank].ring()

    def agree(self) -> Operation:
        """A barrier. Raises RuntimeError that shows each rank's call, on all of them, if they do
        not all make the same one."""
        yield from self.barrier()
        if not self.same():
            yield from self._show_calls()

    def same(self) -> bool:
        """Whether all ranks make the same call, as far as a checksum of it says."""
        at = MARK + self._calls % 2
        mine = self.mine.words[at]
        return all([head[at] == mine for head in self.heads.values()])

    def _show_calls(self) -> Operation:
        what, where = self._call
        text = f"{_short(what)}\n{at_line(where)}".encode()[: LENGTH - 8]
        self.mine.text[TEXT + 8 : TEXT + 8 + len(text)] = text
        self.mine.words[TEXT // 8] = len(text)
        yield from self.barrier()
        lines = []
        for rank, segment in enumerate(self.segments):
            text = bytes(segment.text[TEXT + 8 : TEXT + 8 + segment.words[TEXT // 8]])
            what, _, line = text.decode(errors="replace").partition("\n")
            lines.append(f"\n  rank {rank}: {what}{line}")
        raise RuntimeError("every rank of a group must make the same call" + "".join(lines))

    def share(self, x: torch.Tensor | None) -> bool:
        """Before a barrier: publish where in our arena the tensor lies. False if it does not."""
        offset = 0 if x is None else self.mine.find(x)
        self._shared += 1  # of the several tensors of a call, each has its own word
        self.mine.words[OFFSET + self._shared % 2] = offset
        return offset > 0

    def has_shared(self, rank: int) -> bool:
        """After the barrier: whether that rank's tensor lies in its arena."""
        return self.heads[rank][OFFSET + self._shared % 2] > 0

    def shared(self, rank: int, like: torch.Tensor) -> torch.Tensor:
        """After the barrier: that rank's tensor, (n,), of the length and the dtype of `like`."""
        offset = self.heads[rank][OFFSET + self._shared % 2]
        return self.segments[rank].at(offset, len(like), like.dtype)

    # ---- the emulated link -----------------------------------------------------------------

    def travel(self, steps: Callable[[], Sequence[Step]]) -> Operation:
        """Wait until this rank's messages of a collective have come and gone. All ranks have made
        the call; rank 0 books its messages on the lines, for all of them."""
        if self.network is None:
            return
        plan = self.heads[0]
        if self.rank == 0:
            ready = [head[READY] / 1e9 for head in self.heads.values()]
            for rank, due in enumerate(self.network.travel(steps(), ready)):
                plan[DUES + rank] = int(due * 1e9)
            publish(plan, PLANNED, self._calls)
            self.ring(*self._bells)
        elif not (planned := Reached({0: plan}, PLANNED, self._calls)).over():
            yield planned
        self._due = plan[DUES + self.rank] / 1e9
        yield Until(self._due)

    # ---- when somebody does not come -------------------------------------------------------

    def explain(self, wait: Wait, call: str, overdue: float) -> BaseException | None:
        """The error if the awaited ranks are gone, or if `overdue` seconds have passed; else None.
        See `queues.Explain`."""
        missing = wait.missing()
        gone = {rank: how for rank in missing if (how := self._gone(rank))}
        if gone and (len(gone) == len(missing) or not wait.any_will_do()):
            rank, how = next(iter(gone.items()))
            return RuntimeError(
                f"Connection closed by peer: rank {rank} has {how}, and rank {self.rank} waits for "
                f"it in {call}"
            )
        if not missing or not overdue:
            return None
        return RuntimeError(f"Timed out waiting {overdue:g} s for {spell(missing)} in {call}")

    def _gone(self, rank: int) -> str:
        """ "died" or "left" if the rank is gone, else ""."""
        if rank in self._processes and has_ended(self._processes[rank]):
            return "died"
        return "left" if self.heads[rank][LEFT] else ""

    def leave(self) -> None:
        """Tell the others that this rank leaves the group, and close what it has opened."""
        self.mine.words[LEFT] = 1
        self.ring(*self._bells)
        self._processes.clear()
        self._opened.close()


class Reached(Wait):
    """Until this word is `value` or more in the heads of these ranks."""

    def __init__(self, heads: dict[int, memoryview], at: int, value: int) -> None:
        self._heads, self._at, self._value = heads, at, value

    def over(self) -> bool:
        return reached(self._heads.values(), self._at, self._value)

    def missing(self) -> list[int]:
        return [rank for rank, head in self._heads.items() if head[self._at] < self._value]


def _attach(rank: int, address: str, nbytes: int) -> Segment:
    try:
        return Segment.attach(address, nbytes)
    except OSError as error:
        raise unreachable(rank, error) from None


def spell(ranks: list[int]) -> str:
    """[1, 2] is "ranks 1, 2"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _short(description: str) -> str:
    """A text that fits, and that differs if the descriptions do."""
    if len(description) < LENGTH // 2:
        return description
    digest = hashlib.sha256(description.encode()).hexdigest()
    return f"{description[: LENGTH // 2]}... (sha256 {digest[:16]})"


def at_line(where: Caller) -> str:
    """A line of the user's, as Python writes it. Editors find it, and `runtime` names its cell."""
    return f', File "{where[0]}", line {where[1]}' if where else ""
