"""What a rank was doing, and when (lesson: collectives)."""

import contextlib
import copy
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from minidist.measure.meter import Meter
from minidist.measure.record import Event


@dataclass(frozen=True)
class Span:
    """A piece of a rank's time. `start` and `end` are seconds of `time.perf_counter`, which is
    one clock for all processes of a Linux machine. Lesson: collectives."""

    name: str
    category: str
    start: float
    end: float


class Timeline(Meter):
    """Records what one rank does within a `with` block, as spans of time. Lesson: collectives.

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
    """

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[Span] = []

    def _read(self, events: list[Event]) -> None:
        now = time.perf_counter()
        for event in events:
            if event.scope is None:  # else it is within a span of its own
                category = "agreement" if event.control else "communication"
                end = now if event.end is None else event.end
                self.spans.append(Span(event.operation, category, event.start, end))
        self.spans.sort(key=lambda span: (span.start, -span.end))

    @contextlib.contextmanager
    def span(self, name: str, category: str = "compute") -> Iterator[None]:
        """The time of the `with` block becomes a span, even if the block raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spans.append(Span(name, category, start, time.perf_counter()))

    def excerpt(self, name: str, first: int, last: int) -> "Timeline":
        """The part from the end of the first-th span of this name to the end of the last-th."""
        ends = [span.end for span in self.spans if span.name == name]
        part = copy.copy(self)
        part.spans = [s for s in self.spans if ends[first] <= s.start and s.end <= ends[last]]
        return part

    def seconds(self) -> dict[str, float]:
        """The seconds spent in each category."""
        spent: dict[str, float] = {}
        for span in self.spans:
            spent[span.category] = spent.get(span.category, 0.0) + span.end - span.start
        return spent

    def __repr__(self) -> str:
        return f"Timeline(rank {self.rank}: {len(self.spans)} spans)"


def save_chrome_trace(timelines: Sequence[Timeline], path: str | os.PathLike[str]) -> None:
    """Write the timelines of several ranks as one trace for chrome://tracing or ui.perfetto.dev.
    Lesson: collectives.

    Each rank is a process of the trace, with one row for each category; times are microseconds
    since the first span of all.
    """
    spans = [(timeline.rank, span) for timeline in timelines for span in timeline.spans]
    first = min((span.start for _, span in spans), default=0.0)
    rows = {name: row for row, name in enumerate(dict.fromkeys(s.category for _, s in spans))}
    events: list[dict[str, Any]] = []
    for rank in sorted({timeline.rank for timeline in timelines}):
        events.append(_label("process_name", rank, 0, f"rank {rank}"))
        events += [_label("thread_name", rank, row, name) for name, row in rows.items()]
    for rank, span in spans:
        events.append(
            {
                "name": span.name,
                "cat": span.category,
                "ph": "X",  # a complete event: start and duration
                "pid": rank,
                "tid": rows[span.category],
                "ts": (span.start - first) * 1e6,
                "dur": (span.end - span.start) * 1e6,
            }
        )
    with open(path, "w") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)


def _label(kind: str, rank: int, row: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": row, "args": {"name": name}}
