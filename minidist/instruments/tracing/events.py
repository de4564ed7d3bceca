"""A trace: what one rank did, and when (lesson: reading_a_step)."""

from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from torch.profiler import record_function

from minidist.instruments.measure import Span

Spans = list[tuple[float, float]]  # from when to when
# Times are seconds since 2026 began: so they are small enough to be right to 4 ns.
EPOCH = 1_767_225_600 * 10**9  # nanoseconds of the wall clock


@dataclass(frozen=True)
class Event(Span):
    """A piece of a rank's time, in seconds of the wall clock since 2026 began. Lesson:
    reading_a_step.

    category: "compute", an operation, or a block of `record_function` whose name begins with
    "compute"; "communication"; or "phase", any other block, which holds operations.
    detail: of communication. "group": ranks. "index": how many of its name and group, or to or
    from its peer in the group, came before it. "kind", "peer", "nbytes", "blocked": as in
    `minidist.instruments.measure.record.Event`. Of a GPU's trace also what NCCL says.
    """

    detail: dict[str, Any] = field(default_factory=dict, hash=False, compare=False)


@dataclass
class Trace:
    """What a rank did: `spans`, which `md.plot.timeline` draws. Lesson: reading_a_step."""

    rank: int
    spans: list[Event] = field(default_factory=list)
    _steps: int = field(default=0, repr=False, compare=False)

    def step(self) -> AbstractContextManager[Any]:
        """The block is the next step, a phase named as torch names it: ProfilerStep#0, #1, …"""
        self._steps += 1
        return record_function(f"ProfilerStep#{self._steps - 1}")

    def of(self, category: str) -> list[Event]:
        """By start."""
        return [e for e in self.spans if e.category == category]

    def steps(self) -> list[Event]:
        return [e for e in self.of("phase") if e.name.startswith("ProfilerStep")]

    def window(self) -> tuple[float, float]:
        """From the start of the first step to the end of the last; without steps, of all. On a GPU
        kernels follow later than their step."""
        within = self.steps() or self.spans
        if not within:
            raise ValueError(f"rank {self.rank}'s trace is empty")
        return within[0].start, max(e.end for e in within)

    def shifted(self, seconds: float) -> "Trace":
        """On a clock that is so much ahead."""

        def moved(e: Event) -> Event:
            detail = dict(e.detail)
            if "blocked" in detail:
                detail["blocked"] = [(a + seconds, b + seconds) for a, b in detail["blocked"]]
            return replace(e, start=e.start + seconds, end=e.end + seconds, detail=detail)

        return Trace(self.rank, list(map(moved, self.spans)))


def in_order(spans: list[Event]) -> list[Event]:
    return sorted(spans, key=lambda e: (e.start, -e.end))


def numbered(spans: list[Event]) -> list[Event]:
    """In order, communication with its "index"."""
    counts, spans = Counter[Any](), in_order(spans)
    for e in spans:
        if e.category == "communication":
            kind, peer = e.detail["kind"], e.detail.get("peer")
            # A message may be sent by isend and received by recv.
            key = e.name if peer is None else kind, tuple(e.detail.get("group", ())), peer
            e.detail["index"] = counts[key]
            counts[key] += 1
    return spans
