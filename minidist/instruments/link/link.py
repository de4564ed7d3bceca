"""An emulated network: messages that take as long as they would on lines of that speed.

A message of n bytes occupies its line for nβ seconds, 1/β being the bandwidth, and each byte comes
out at the other end α later: the latency is a delay, and the line carries the next message
meanwhile. So five messages that are sent at once arrive after α + nβ, α + 2nβ, ... α + 5nβ.

Within a node each rank has a line of its own to each other. A node has one cable, out of it and
into it at once: all messages between its ranks and those of other nodes share it, of whatever
group. First come, first served; what comes to a node while the cable into it is busy waits outside,
and keeps nobody else from sending. (`lines` knows when which line is busy, `steps` which messages a
collective is made of.)

The bytes themselves are in shared memory at once, but no rank reads them before that time. A rank
that waits uses no processor meanwhile, so what it computes beside the message is as free as beside
a real cable.
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from minidist.instruments.link.lines import LIMIT, Busy, Lines, occupy
from minidist.instruments.link.steps import Step

VARIABLE = "MINIDIST_LINK"


@dataclass(frozen=True)
class Link:
    """A network of so many gigabits a second, and so many microseconds until a byte arrives.

        md.ranks(4, link=md.Link(gbps=10, latency_us=20))           # a node with 4 × 3 lines
        md.ranks(4, nodes=4, link=md.Link(gbps=10, latency_us=20))  # 4 nodes with a cable each
        md.ranks(4, nodes=2, link=md.Link(100, 5, inter=md.Link(10, 20)))

    inter: the cable of each node, if it is not like the lines within a node.
    Raises ValueError for numbers that make no sense. Limits: every message arrives, each as fast as
    all others. Lesson: communication.
    """

    gbps: float
    latency_us: float = 0.0
    inter: "Link | None" = None

    def __post_init__(self) -> None:
        if not self.gbps > 0 or not self.latency_us >= 0:
            raise ValueError(
                f"a link has more than 0 Gb/s, and 0 µs or more of latency, not {self.gbps} Gb/s "
                f"and {self.latency_us} µs"
            )
        if self.inter is not None and self.inter.inter is not None:
            raise ValueError("the link between nodes has no other link between nodes")

    def seconds(self, nbytes: float, messages: int = 1) -> float:
        """How long such messages take, of so many bytes together, if each waits for the one
        before."""
        return messages * self.latency_us * 1e-6 + nbytes * 8 / (self.gbps * 1e9)

    @staticmethod
    def environ(link: "Link | None") -> dict[str, str]:
        """The variable that says to a rank which link to emulate, if any."""
        return {VARIABLE: json.dumps(link and asdict(link))}

    @classmethod
    def here(cls) -> "Link | None":
        """The link that this rank emulates."""
        told = json.loads(os.environ.get(VARIABLE, "null"))
        if told is None:
            return None
        inter = told.pop("inter")
        return cls(**told, inter=cls(**inter) if inter else None)

    @staticmethod
    def sent_by_node(node: int) -> float:
        """The bytes that have left this node so far, of all its ranks and in whatever group: called
        on any rank that emulates a link, else 0. What a collective counts is the messages of
        `steps`, when rank 0 of its group books them. Lesson: experts."""
        from minidist.instruments.link.shared_lines import LINES  # here: a Link needs no torch

        return LINES.carried(_out_of(node))


class Trip(NamedTuple):
    """When a message's first byte arrives; when its last byte has left; and when that arrives."""

    first: float
    left: float
    due: float

    def part(self, fraction: float) -> float:
        """When so much of it has arrived."""
        return self.first + fraction * (self.due - self.first)


class Network:
    """The link as the ranks of a group use it: `ranks` of the world, on these `nodes`. Times are
    those of one clock, in seconds."""

    def __init__(self, link: Link, ranks: Sequence[int], nodes: Sequence[int], lines: Lines):
        self._within, self._between = link, link.inter or link
        self._ranks, self._nodes, self._lines = ranks, nodes, lines

    def send(self, sender: int, receiver: int, nbytes: float, at: float) -> Trip:
        """A message from one rank of the group to another, sent at this time."""
        with self._lines.open() as busy:
            return self._send(busy, sender, receiver, nbytes, at)

    def travel(self, steps: Iterable[Step], ready: Sequence[float]) -> list[float]:
        """The messages of a collective, which each rank begins as soon as it is `ready`: when each
        rank has sent and received all of its own."""
        has, free = list(ready), list(ready)  # all messages so far; nothing more on its way out
        with self._lines.open() as busy:
            for step in steps:
                now = list(has)
                for sender, receiver, nbytes in step:
                    _, left, due = self._send(busy, sender, receiver, nbytes, now[sender])
                    free[sender] = max(free[sender], left)
                    has[receiver] = max(has[receiver], due)
        return [max(times) for times in zip(has, free, strict=True)]

    def _send(self, busy: Busy, sender: int, receiver: int, nbytes: float, at: float) -> Trip:
        source, target = self._nodes[sender], self._nodes[receiver]
        link = self._within if source == target else self._between
        latency, seconds = 1e-6 * link.latency_us, link.seconds(nbytes, messages=0)
        if source == target:
            out = LIMIT * (self._ranks[sender] % LIMIT) + self._ranks[receiver] % LIMIT
        else:
            out = _out_of(source)
        self._lines.carry(out, nbytes)
        begin, left = occupy(busy[out], at, seconds)
        first, due = begin + latency, left + latency
        if source != target:
            first, end = occupy(busy[_out_of(target) + 1], first, seconds)
            due = max(due, end)
        return Trip(first, left, due)


def _out_of(node: int) -> int:
    """The number of the line that is a node's cable, in the way out; the next is the way in."""
    return LIMIT * LIMIT + 2 * (node % LIMIT)
