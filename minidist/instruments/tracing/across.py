"""The traces of several ranks side by side: one clock, who is late, what holds up a step (lesson:
reading_a_step)."""

from collections.abc import Sequence
from statistics import median
from typing import Any, Literal, NamedTuple

from minidist.instruments.tracing.account import (
    blocked,
    both,
    computing,
    length,
    under_way,
    union,
    without,
)
from minidist.instruments.tracing.events import Event, Spans, Trace

Key = tuple[Any, ...]
# Nobody leaves one of these before all have come.
MEETINGS = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"}


class Met:
    """What the traces say about one another: each collective's events, by rank, and each message's
    two ends. Raises ValueError where they do not fit together."""

    def __init__(self, traces: Sequence[Trace], one_clock: bool = True) -> None:
        ranks = [t.rank for t in traces]
        if len(set(ranks)) < max(2, len(ranks)):
            raise ValueError(f"who waits for whom takes a trace of each rank; these are of {ranks}")
        steps = {t.rank: [step.name for step in t.steps()] for t in traces}
        if other := [rank for rank in ranks if steps[rank] != steps[ranks[0]]]:
            raise ValueError(
                f"rank {ranks[0]} has the steps {steps[ranks[0]]}, rank {other[0]} "
                f"{steps[other[0]]}: record the same ones on all ranks"
            )
        self.busy = {t.rank: computing(t, -float("inf"), float("inf")) for t in traces}
        self.calls: dict[Key, dict[int, Event]] = {}
        self.got: dict[int, list[Event]] = {rank: [] for rank in ranks}  # what it may wait for
        self.sent: dict[Key, Event] = {}  # by sender, receiver, group and index
        found = [(t.rank, e) for t in traces for e in t.of("communication")]
        for rank, e in found:
            if e.detail["kind"] == "collective":
                self.calls.setdefault(_key(e), {})[rank] = e
            if e.detail["kind"] != "sent":
                self.got[rank].append(e)
            else:
                self.sent[rank, e.detail["peer"], *_key(e)[1:]] = e
        if not found:
            raise ValueError("the traces have no communication")
        for (name, group, index), events in self.calls.items():
            if lacks := [r for r in ranks if (r in group or not group) and r not in events]:
                raise ValueError(
                    f"rank {min(events)} has {name} {index} of the ranks {group or ranks}, rank "
                    f"{lacks[0]} has not: its trace is cut short, or begins elsewhere"
                )
        for rank, e in found if one_clock else ():
            self.source(e, rank)

    def shared(self) -> list[dict[int, Event]]:
        """Collectives in which all wait for all, each by rank. Raises ValueError without one."""
        found = [events for key, events in self.calls.items() if key[0] in MEETINGS]
        if not (shared := [events for events in found if len(events) > 1]):
            raise ValueError("these ranks share no collective, in which all wait for all")
        return shared

    def source(self, e: Event, rank: int) -> tuple[int, float]:
        """For whom it waited on this rank, and since when it could go on."""
        last, came = rank, e
        if e.detail["kind"] == "received":
            sent = self.sent.get((e.detail["peer"], rank, *_key(e)[1:]))
            last, came = (e.detail["peer"], sent) if sent else (rank, e)
        elif e.name in MEETINGS:
            last, came = max(self.calls[_key(e)].items(), key=lambda call: call[1].start)
        if came.start > e.end + 1e-3:
            raise ValueError(
                f"rank {last} came to {e.name} {e.detail['index']} after rank {rank} had left: "
                "put the traces on one clock by md.tracing.align"
            )
        return last, min(came.start, e.end)


def _key(e: Event) -> Key:
    return e.name, tuple(e.detail.get("group", ())), e.detail["index"]


def whole(traces: Sequence[Trace], start: float | None, end: float | None) -> tuple[float, float]:
    """From the first rank's start to the last rank's end, where none is given."""
    windows = [t.window() for t in traces]
    first, last = min(w[0] for w in windows), max(w[1] for w in windows)
    return first if start is None else start, last if end is None else end


def offset(of: Trace, to: Trace) -> tuple[float, float]:
    """How far the clock of `of` is behind that of `to`, in seconds: at least, and at most. Nobody
    leaves a collective before all have come, so each gives two bounds. Lesson: reading_a_step.
    Raises ValueError where none fits."""
    pairs = [(e[of.rank], e[to.rank]) for e in Met([of, to], one_clock=False).shared()]
    low = max(theirs.start - own.end for own, theirs in pairs)
    high = min(theirs.end - own.start for own, theirs in pairs)
    if low > high:
        raise ValueError(f"no offset fits: at least {low} s, at most {high} s. A clock was set?")
    return low, high


def align(traces: Sequence[Trace]) -> list[Trace]:
    """All on the clock of the first one, right to half of what `offset` leaves open. Ranks of one
    machine have one clock already. Lesson: reading_a_step."""
    first, *others = traces
    return [first, *(t.shifted(sum(offset(t, first)) / 2) for t in others)]


def late(traces: Sequence[Trace]) -> dict[int, float]:
    """By rank: how many seconds after the median of the others it comes to a collective, in the
    median of all. Below 0: before them. Lesson: reading_a_step."""
    found: dict[int, list[float]] = {t.rank: [] for t in traces}
    for events in Met(traces).shared():
        for rank, e in events.items():
            found[rank].append(
                e.start - median(other.start for r, other in events.items() if r != rank)
            )
    return {rank: median(each or [0.0]) for rank, each in found.items()}


class Waits(NamedTuple):
    """Seconds in which a rank has nothing to do but wait: for `others` that have not come, or have
    not sent, and for the `transfer` from then on. A bar of NCCL is both in one."""

    others: float
    transfer: float


def waits(
    traces: Sequence[Trace], start: float | None = None, end: float | None = None
) -> dict[int, Waits]:
    """By rank, what its exposed communication is made of; between start and end, or the whole
    steps. Lesson: reading_a_step.

    Limits: of broadcast, reduce, gather and scatter it does not say for whom: all is transfer. So
    it is of fully sharded models on gloo.
    """
    return _waits(traces, Met(traces), *whole(traces, start, end))


def _waits(traces: Sequence[Trace], met: Met, start: float, end: float) -> dict[int, Waits]:
    found = {}
    for t in traces:
        exposed = without(under_way(t, start, end), met.busy[t.rank])
        lacking = [(e.start, met.source(e, t.rank)[1]) for e in met.got[t.rank]]
        others = length(both(exposed, union(lacking)))
        found[t.rank] = Waits(others, length(exposed) - others)
    return found


class Leg(NamedTuple):
    """A piece of the critical path: on a rank, or with a message that comes to it."""

    what: Literal["rank", "message"]
    rank: int
    start: float
    end: float
    name: str = ""


def critical_path(
    traces: Sequence[Trace], start: float | None = None, end: float | None = None
) -> list[Leg]:
    """What a step waited for, from start to end without a gap. Lesson: reading_a_step.

    Found backwards: from the rank that computes last to the message that it last waited for, from
    there to the rank that came last to it, or sent it, and so on. What is not on the path may
    become faster without a change of the step.
    """
    met, (start, end) = Met(traces), whole(traces, start, end)
    waited = {r: [e for e in got if _waited(e, met.busy[r])] for r, got in met.got.items()}
    rank = max(met.busy, key=lambda r: max((e for _, e in met.busy[r] if e <= end), default=0.0))
    path, now = list[Leg](), end
    while now > start:
        ended = [e for e in waited[rank] if start < e.end <= now]
        if not ended:
            path.append(Leg("rank", rank, start, now))
            break
        got = max(ended, key=lambda e: e.end)
        waited[rank].remove(got)
        source, left = met.source(got, rank)
        left = max(left, start)
        path.append(Leg("rank", rank, got.end, now))
        path.append(Leg("message", rank, left, got.end, got.name))
        rank, now = source, left
    return path[::-1]


def _waited(e: Event, busy: Spans) -> bool:
    """Whether the rank had nothing to do when the message came: it stood still in `wait`, or, where
    no `wait` was seen, computed nothing. (Both may be noted a moment late.)"""
    moment = 2e-4
    if e.detail["kind"] == "sent":
        return False
    if still := blocked(e)[1:]:
        return still[-1][1] - still[-1][0] > moment
    return not any(start < e.end - moment and e.end < end for start, end in busy)


def seconds_of(path: Sequence[Leg]) -> dict[str, float]:
    """Of a critical path, on each rank ("rank 2") and with "messages". Lesson: reading_a_step."""
    spent: dict[str, float] = {}
    for leg in path:
        name = f"rank {leg.rank}" if leg.what == "rank" else "messages"
        spent[name] = spent.get(name, 0.0) + leg.end - leg.start
    return spent


def drawn(path: Sequence[Leg]) -> Trace:
    """A critical path as a row of `md.plot.timeline`. Lesson: reading_a_step."""
    names = [f"rank {leg.rank}" if leg.what == "rank" else "communication" for leg in path]
    spans = [
        Event(leg.name, name, leg.start, leg.end) for leg, name in zip(path, names, strict=True)
    ]
    return Trace(-1, spans)


class Cause(NamedTuple):
    """The rank for which the others wait, how many seconds of a step, and why."""

    why: Literal["slow device", "slow loader", "nobody"]
    rank: int | None
    seconds: float


def cause(traces: Sequence[Trace]) -> Cause:
    """Who holds up the others: the rank that waits less than they do, by 15 % of a step at least,
    in the median of the steps; or "nobody". "slow device": it also computes longer than they do,
    by 15 % at least; it may have more to do. "slow loader": it does not, and so begins late: it
    waits for data, or for Python. Lesson: reading_a_step.

    Limits: where ranks share cores, one that got less of them is a slow one.
    """
    met, window = Met(traces), whole(traces, None, None)
    of_step = zip(*(t.steps() for t in traces), strict=False)
    spans = [(min(e.start for e in each), max(e.end for e in each)) for each in of_step]
    spans = spans or [window]
    waited = [{r: each.others for r, each in _waits(traces, met, *span).items()} for span in spans]
    busy = {rank: length(both(spent, [window])) for rank, spent in met.busy.items()}

    def others(of: dict[int, float], rank: int) -> float:
        return median(seconds for r, seconds in of.items() if r != rank)

    longer = {r: median(others(of, r) - of[r] for of in waited) for r in busy}
    rank = max(longer, key=longer.__getitem__)
    if longer[rank] < 0.15 * median(end - start for start, end in spans):
        return Cause("nobody", None, 0.0)
    slow = busy[rank] > 1.15 * others(busy, rank)
    return Cause("slow device" if slow else "slow loader", rank, longer[rank])
