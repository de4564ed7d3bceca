"""Where the seconds of one rank's step go: computing, waiting for messages, neither (lesson:
reading_a_step)."""

from dataclasses import dataclass

from minidist.instruments.tracing.events import Event, Spans, Trace, in_order


def union(spans: Spans) -> Spans:
    """The same time, in order, as spans that do not overlap. Lesson: reading_a_step."""
    joined: Spans = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        elif end > start:
            joined.append((start, end))
    return joined


def both(a: Spans, b: Spans) -> Spans:
    """When a and b are at once; each is a union. Lesson: reading_a_step."""
    found: Spans = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        i, j = (i + 1, j) if a[i][1] < b[j][1] else (i, j + 1)
    return found


def without(a: Spans, b: Spans) -> Spans:
    """When a is, and b is not; each is a union."""
    edges = [-float("inf"), *(time for span in b for time in span), float("inf")]
    return both(a, list(zip(edges[::2], edges[1::2], strict=True)))


def length(spans: Spans) -> float:
    """Of a union, in seconds. Lesson: reading_a_step."""
    return sum(end - start for start, end in spans)


def cut(spans: Spans, start: float, end: float) -> Spans:
    """The union of these, of what lies between start and end."""
    return both(union(spans), [(start, end)])


def blocked(e: Event) -> Spans:
    """When the rank stood still for this call."""
    return [(start, end) for start, end in e.detail.get("blocked", [])]


def under_way(trace: Trace, start: float, end: float) -> Spans:
    """When messages are on their way: from the call to its end; but who sends one has to do with it
    only while it stands still for it."""
    spans: Spans = []
    for e in trace.of("communication"):
        spans += blocked(e) if e.detail.get("kind") == "sent" else [(e.start, e.end)]
    return cut(spans, start, end)


def computing(trace: Trace, start: float, end: float) -> Spans:
    """When operations run, but those by which a call of communication itself copies and adds."""
    still = [span for e in trace.of("communication") for span in blocked(e)]
    busy = cut([(e.start, e.end) for e in trace.of("compute")], start, end)
    return without(busy, union(still))


@dataclass(frozen=True)
class Breakdown:
    """Seconds of a rank's time, `step`. It is computing + exposed + idle. Lesson: reading_a_step.

    overlapped: the part of `computing` in which a message is under way.
    exposed: a message is under way and nothing computes.
    idle: neither. A GPU waits for Python then; on a CPU it is Python.
    """

    step: float
    computing: float
    overlapped: float
    exposed: float

    @property
    def idle(self) -> float:
        return self.step - self.computing - self.exposed

    @property
    def parts(self) -> dict[str, float]:
        """What it consists of, to be drawn by `md.plot.breakdown`."""
        return {"compute": self.computing, "communication": self.exposed, "idle": self.idle}

    @property
    def hidden(self) -> float:
        """The part of communication behind computing: 1 if there is none. Holistic Trace Analysis
        calls it the overlap."""
        sent = self.overlapped + self.exposed
        return self.overlapped / sent if sent else 1.0


def breakdown(trace: Trace, start: float | None = None, end: float | None = None) -> Breakdown:
    """Where the time between start and end went; None: of the trace's steps. Lesson:
    reading_a_step.

    Limits: a message counts from its call to its end, also while it waits for others (`waits` tells
    them apart). On a CPU the copies of asynchronous calls on "shm" are not seen.
    """
    first, last = trace.window()
    start, end = first if start is None else start, last if end is None else end
    busy = computing(trace, start, end)
    sent = under_way(trace, start, end)
    overlapped = length(both(busy, sent))
    return Breakdown(end - start, length(busy), overlapped, length(sent) - overlapped)


def strips(trace: Trace) -> Trace:
    """To be drawn: computing and communication of its steps, each as spans that do not overlap.
    Lesson: reading_a_step."""
    window = trace.window()
    parts = {"compute": computing(trace, *window), "communication": under_way(trace, *window)}
    spans = [Event(name, name, *span) for name, part in parts.items() for span in part]
    return Trace(trace.rank, in_order(spans))
