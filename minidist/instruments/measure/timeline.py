"""What a rank was doing, and when (lesson: rank)."""

import contextlib
import copy
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from minidist.instruments.measure.meter import Meter
from minidist.instruments.measure.record import Event

_running: list["Timeline"] = []


@dataclass(frozen=True)
class Span:
    """A piece of a rank's time. `start` and `end` are seconds of `time.perf_counter`, which is
    one clock for all processes of a Linux machine. `meets`: what it has in common with a span of
    another rank, the other end of a message or the same collective. Lesson: rank."""

    name: str
    category: str
    start: float
    end: float
    meets: tuple[Any, ...] = field(default=(), kw_only=True)


class Timeline(Meter):
    """Records what one rank does within a `with` block, as spans of time. Lesson: rank.

        with md.measure.Timeline() as timeline:
            with timeline.span("forward"):
                loss = model(x).sum()
            md.collectives.all_reduce(tensor)      # becomes a span by itself
        return timeline         # plain data: a rank can return it, pickled

    After the block, `spans` is a list of `Span`, by start; `rank` is ours. Categories:

    - "communication": a call of torch.distributed, or one of md.collectives as one span, named
      after it. An asynchronous collective lasts until it is done, a message until its `wait` has
      returned;
    - "agreement": before each collective of md.collectives, the ranks agree on the call. A rank
      that comes early waits here for the others;
    - "compute", or what `span` was given.

    `md.tracing.save` writes the timelines of all ranks into a file for a trace viewer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[Span] = []

    def _begin(self, block: contextlib.ExitStack) -> None:
        super()._begin(block)
        _running.append(self)
        block.callback(_running.remove, self)

    def _read(self, events: list[Event]) -> None:
        now = time.perf_counter()
        for event in events:
            if event.scope is None:  # else it is within a span of its own
                category = "agreement" if event.control else "communication"
                end = now if event.end is None else event.end
                meets: tuple[Any, ...] = (event.operation, event.control, *event.group)
                if event.peer is not None:  # a message is named by its sender and its receiver
                    ends = self.rank, event.peer
                    meets = ends if event.kind == "sent" else ends[::-1]
                self.spans.append(Span(event.operation, category, event.start, end, meets=meets))
        self.spans.sort(key=lambda span: (span.start, -span.end))

    @contextlib.contextmanager
    def span(self, name: str, category: str = "compute") -> Iterator[None]:
        """The time of the `with` block becomes a span, even if the block raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spans.append(Span(name, category, start, time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        """The seconds spent in each category."""
        spent: dict[str, float] = {}
        for span in self.spans:
            spent[span.category] = spent.get(span.category, 0.0) + span.end - span.start
        return spent

    @property
    def length(self) -> float:
        """Seconds from the start of the first span to the end of the last."""
        return max(span.end for span in self.spans) - min(span.start for span in self.spans)

    def __repr__(self) -> str:
        return f"Timeline(rank {self.rank}: {len(self.spans)} spans)"


def waiting(timelines: Iterable[Timeline]) -> list[Timeline]:
    """The same timelines, in which waiting is told from communicating. Lesson: rank.

    Of a message or a collective, the time until the last of its ranks has come becomes a span of
    its own, "waiting". (Who has left before that did not wait.) All timelines begin and end
    between the same calls.
    """
    lines, came = [copy.copy(line) for line in timelines], dict[tuple[Any, ...], float]()
    for line in lines:
        for span, call in _numbered(line.spans):
            came[call] = max(came.get(call, 0.0), span.start)
    for line in lines:
        spans, line.spans = line.spans, []
        for span, call in _numbered(spans):
            last = came[call] if span.meets else span.start
            if span.start < last <= span.end:
                line.spans.append(Span("waiting", "waiting", span.start, last))
                span = replace(span, start=last)
            line.spans.append(span)
    return lines


def _numbered(spans: list[Span]) -> Iterator[tuple[Span, tuple[Any, ...]]]:
    """Each span with what it meets, and the how manieth such meeting it is."""
    seen: Counter[tuple[Any, ...]] = Counter()
    for span in spans:
        yield span, (*span.meets, seen[span.meets])
        seen[span.meets] += 1


@contextlib.contextmanager
def noted(name: str) -> Iterator[None]:
    """The time of the block becomes a span of every timeline that is running."""
    with contextlib.ExitStack() as spans:
        for timeline in _running:
            spans.enter_context(timeline.span(name))
        yield
