"""Traces as files: those of torch's profiler, and one file of all ranks for a viewer (lesson:
reading_a_step). The format is Chrome's "Trace Event Format", which ui.perfetto.dev reads."""

import gzip
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from minidist.instruments.measure import Span, Timeline
from minidist.instruments.tracing.events import EPOCH, Event, Trace, in_order, numbered

Path = str | os.PathLike[str]
OURS = {"minidist": "traces"}
# Names that NCCL's and gloo's calls have in torch's traces.
NAMES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "all_to_allv": "all_to_all",
}
COMPUTES = ("aten::", "torch::distributed", "torch.distributed")  # the last two: copies by DDP


def load(*paths: Path) -> list[Trace]:
    """The traces of these files, by rank: one file of `save`, or those that torch's profiler has
    written on each rank (`export_chrome_trace`), of a CPU or of a GPU; .json or .json.gz. Lesson:
    reading_a_step.

    On a GPU computing is what kernels do. On a CPU it is what torch's operations do.

    Raises ValueError for a file that is no trace, or was cut short.

    Limits: on a GPU copies to and from it count as nothing. A file that names no rank is rank 0's.
    """
    found: list[Trace] = []
    for path in paths:
        data = _read(path)
        events = [e for e in data["traceEvents"] if e.get("ph") == "X"]
        base = (data.get("baseTimeNanoseconds", 0) - EPOCH) / 1e9
        if data.get("otherData") == OURS:
            of: dict[int, list[Event]] = {}
            for e in events:
                of.setdefault(e["pid"], []).append(_event(e, e["cat"], base, e.get("args", {})))
            found += [Trace(rank, in_order(spans)) for rank, spans in of.items()]
        else:
            rank = data.get("distributedInfo", {}).get("rank", 0)
            found.append(Trace(rank, numbered(list(_of_torch(events, base)))))
    return sorted(found, key=lambda trace: trace.rank)


def _read(path: Path) -> dict[str, Any]:
    try:
        with gzip.open(path, "rt") if str(path).endswith(".gz") else open(path) as file:
            data: dict[str, Any] = json.load(file)
        return data | {"traceEvents": list(data["traceEvents"])}
    except (ValueError, EOFError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no trace, or was cut short: {error}") from None


def _event(e: dict[str, Any], category: str, base: float, detail: dict[str, Any]) -> Event:
    start = base + e["ts"] / 1e6
    return Event(e["name"], category, start, start + e["dur"] / 1e6, detail)


def _of_torch(events: list[dict[str, Any]], base: float) -> Iterator[Event]:
    on_gpu = any(e.get("cat") == "kernel" for e in events)
    for e in events:
        name, kind, detail = e["name"], e.get("cat"), e.get("args", {})
        if kind == "kernel" and "nccl" in name.lower():
            called = detail.get("Collective name", name)
            ranks = json.loads(detail.get("Process Group Ranks") or "[]")
            detail = detail | {"group": ranks, "kind": _kind(called)}
            yield _event(e | {"name": NAMES.get(called, called)}, "communication", base, detail)
        elif name.startswith("gloo:") and not on_gpu:
            name = name[len("gloo:") :]
            yield _event(e | {"name": name}, "communication", base, {"kind": _kind(name)})
        elif kind == "kernel" or (kind == "cpu_op" and not on_gpu and name.startswith(COMPUTES)):
            yield _event(e, "compute", base, {})
        elif kind == "user_annotation":
            computes = not on_gpu and name.startswith("compute")
            yield _event(e, "compute" if computes else "phase", base, {})


def _kind(name: str) -> str:
    return "message" if "send" in name.lower() or "recv" in name.lower() else "collective"


def save(traces: Sequence[Trace | Timeline], path: Path) -> None:
    """One file for ui.perfetto.dev: each rank is a process, with rows for each category, and an
    arrow from each message sent to where it is received. Lesson: reading_a_step."""
    every = [span for trace in traces for span in trace.spans]
    first = int(min((span.start for span in every), default=0) * 1e9)
    out: list[dict[str, Any]] = []
    for trace in traces:
        out.append(_label("process_name", trace.rank, 0, f"rank {trace.rank}"))
        row = 0
        for category in dict.fromkeys(["phase", *(span.category for span in every)]):
            for lane in _lanes([span for span in trace.spans if span.category == category]):
                out.append(_label("thread_name", trace.rank, row, category))
                out += [_written(trace.rank, row, span, first) for span in lane]
                row += 1
    out += _arrows(out)
    base = {"baseTimeNanoseconds": first + EPOCH, "otherData": OURS}
    data = {"traceEvents": out, "displayTimeUnit": "ms"} | base
    with gzip.open(path, "wt") if str(path).endswith(".gz") else open(path, "w") as file:
        json.dump(data, file, separators=(",", ":"))


def _lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans in rows, in which each lies within another, or beside it: viewers draw nothing else."""
    rows: list[tuple[list[Span], list[float]]] = []  # and the ends that the next must not cross
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        for _, ends in rows:
            while ends and ends[-1] <= span.start:
                ends.pop()
        row = next((row for row in rows if not row[1] or span.end <= row[1][-1]), None)
        if row is None:
            rows.append(row := ([], []))
        row[0].append(span)
        row[1].append(span.end)
    return [row for row, _ in rows]


def _written(rank: int, row: int, span: Span, first: int) -> dict[str, Any]:
    start, end = (round(time * 1e9) - first for time in (span.start, span.end))
    times = {"ts": start / 1e3, "dur": (end - start) / 1e3}
    detail = span.detail if isinstance(span, Event) else {}
    spot: dict[str, Any] = {"ph": "X", "name": span.name, "cat": span.category}
    spot |= {"pid": rank, "tid": row}
    return spot | times | ({"args": detail} if detail else {})


def _arrows(written: list[dict[str, Any]]) -> list[dict[str, Any]]:
    sent, arrows = dict[Any, dict[str, Any]](), list[dict[str, Any]]()
    for kind in "sent", "received":
        for e in written:
            detail = e.get("args", {})
            if detail.get("kind") != kind or detail["peer"] is None:
                continue
            which = tuple(detail.get("group", ())), detail["index"]
            if kind == "sent":
                sent[e["pid"], detail["peer"], which] = e
            elif put := sent.get((detail["peer"], e["pid"], which)):
                ends = [("s", put, put["ts"]), ("f", e, e["ts"] + max(0, e["dur"] - 0.001))]
                for ph, at, ts in ends:
                    spot = {"ph": ph, "bp": "e", "pid": at["pid"], "tid": at["tid"], "ts": ts}
                    named = {"name": "message", "cat": "message", "id": len(arrows) // 2}
                    arrows.append(spot | named)
    return arrows


def _label(kind: str, rank: int, row: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": row, "args": {"name": name}}


def validate(path: Path) -> int:
    """How many events a file of `save` has. Lesson: reading_a_step. Raises ValueError if a viewer
    would not show them all: one lacks a field, lasts less than nothing or overlaps another of its
    row, or an arrow has one end."""
    events: list[dict[str, Any]] = _read(path)["traceEvents"]
    needed = {"X": {"ts", "dur", "name", "pid", "tid"}, "M": {"name", "pid", "args"}}
    rows: dict[Any, list[Span]] = {}
    ends: dict[str, set[int]] = {"s": set(), "f": set()}
    for e in events:
        missing = needed.get(e["ph"], {"ts", "id", "pid", "tid"}) - e.keys()
        if missing or e.get("dur", 0) < 0:
            raise ValueError(f"an event lacks {', '.join(missing) or 'a time'}: {e}")
        if e["ph"] == "X":
            start, lasts = round(e["ts"] * 1e3), round(e["dur"] * 1e3)
            span = Span(e["name"], "", start, start + lasts)
            rows.setdefault((e["pid"], e["tid"]), []).append(span)
        elif e["ph"] in ends:
            ends[e["ph"]].add(e["id"])
    if overlap := [row for row, spans in rows.items() if len(_lanes(spans)) > 1]:
        raise ValueError(f"spans overlap in the row {overlap[0]}")
    if ends["s"] != ends["f"]:
        raise ValueError("an arrow has one end")
    return len(events)
