"""Charts of time, a rank a row: what each one does when. Seconds go in; ms are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minidist.instruments.plot.frame import chart, legend, swatches, ticks
from minidist.instruments.plot.palette import (
    ACTIVITIES,
    COLORS,
    GROUND,
    area,
    color,
    colors,
    darker,
    ink,
    paler,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from minidist.instruments.measure import Span, Timeline
    from minidist.instruments.tracing import Trace
    from minidist.pipeline import Span as Step


def timeline(
    timelines: Iterable[Timeline | Trace] | Mapping[str, Timeline | Trace],
    ax: Axes | None = None,
    title: str = "Timeline",
    lanes: bool = False,
    waits: bool = False,
    aligned: bool = False,
) -> Axes:
    """Lesson: rank. A Gantt chart, a rank a row, in ms since the first span of any row.

    A mapping names its rows itself, from top to bottom: {"replica 0": timeline, …}.
    All spans are in seconds on one clock. A span has the colour of its name if that is an
    activity of the palette (forward, backward, step), else of its category. A span that begins
    within another is drawn thinner, upon it. lanes: communication has a lane of its own below,
    where a message begins when the one before it has ended. Lesson: distributed_data_parallel.
    waits: a row is grey where it does not compute, from its first span to its last. aligned: the
    rows are of different times, and each begins at 0. Lesson: hiding_gathers.
    """
    if isinstance(timelines, Mapping):
        lines = [(name, line.spans) for name, line in timelines.items()]
    else:
        in_order = sorted(timelines, key=lambda line: line.rank)
        lines = [(f"rank {line.rank}", line.spans) for line in in_order]
    spans = [span for _, line in lines for span in line]
    if not spans:
        raise ValueError("timeline: no spans to draw")
    if aligned:
        lines = [(name, _from_zero(line)) for name, line in lines]
        spans = [span for _, line in lines for span in line]

    def kind(span: Span) -> str:
        return span.name if span.name in ACTIVITIES else span.category

    first, last = min(span.start for span in spans), max(span.end for span in spans)
    grey = color("waiting")
    order = [*COLORS, *sorted({kind(span) for span in spans} - set(COLORS))]
    shades = colors(name for name in order if name in map(kind, spans))
    with chart(ax, title, 8, 1.2 + 0.45 * max(len(lines), 2)) as ax:
        for row, (_, line) in enumerate(lines):
            around: list[float] = []  # the ends of the spans that the next may begin within
            free, middle, whole = first, float(row), 0.78  # when the lane of messages is free
            if lanes:
                middle, whole = row - 0.2, 0.4
            if waits and line:
                begin, end = min(s.start for s in line), max(s.end for s in line)
                ax.barh(middle, 1e3 * (end - begin), whole, 1e3 * (begin - first), **area(grey))
            for span in _joined(line, kind, (last - first) / 240):
                shade, rim = shades[kind(span)], darker(shades[kind(span)])
                start, at, thick, depth = span.start, middle, whole, 0
                if lanes and span.category == "communication":
                    start, at, thick = max(start, free), row + 0.2, 0.3
                    free = max(free, span.end)
                    if span.end - start > 0.01 * (last - first):  # a short one would vanish
                        rim = GROUND
                else:
                    around = [end for end in around if end > span.start]
                    depth = len(around)
                    thick *= 0.66**depth
                    around.append(span.end)
                left, width = (start - first) * 1e3, max(0, span.end - start) * 1e3
                # An edge in the same colour keeps spans shorter than a pixel in sight.
                ax.barh(at, width, thick, left, color=shade, ec=rim, lw=0.5, zorder=2 + depth)
        ax.set_yticks(range(len(lines)), [name for name, _ in lines])
        ax.set_ylim(len(lines) - 0.45, -0.55)
        ax.set_xlim(left=0, auto=None)  # panels that share this axis may still need more of it
        ax.set_xlabel("time (ms)")
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
        ticks(ax.xaxis, lambda ms: f"{ms:g}")
        named = shades | ({"waiting": grey} if waits else {})
        legend(ax, swatches(named))
        return ax


def _joined(line: Iterable[Span], kind: Callable[[Span], str], hair: float) -> list[Span]:
    """The spans in the order of their starts. Those next to each other that are alike, and shorter
    than an outline is wide, become one: else one would see outlines alone."""
    done: list[Span] = []
    short = False  # the last one is such a span, or made of them
    for span in sorted(line, key=lambda span: (span.start, -span.end)):
        thin = span.end - span.start < hair and span.category != "communication"
        if (
            thin
            and short
            and kind(span) == kind(done[-1])
            and 0 <= span.start - done[-1].end < hair
        ):
            done[-1] = replace(done[-1], end=span.end)
        else:
            done.append(span)
            short = thin
    return done


def _from_zero(line: Sequence[Span]) -> list[Span]:
    first = min((span.start for span in line), default=0.0)
    return [replace(span, start=span.start - first, end=span.end - first) for span in line]


KINDS = {  # of instruction, and the palette's names for them; the others are messages
    "Forward": "forward",
    "Backward": "backward",
    "BackwardInputs": "backward for inputs",
    "BackwardWeights": "backward for weights",
}


def schedule(
    ranks: Sequence[Sequence[Step]],
    ax: Axes | None = None,
    title: str = "Schedule",
    unit: str | None = None,
) -> Axes:
    """A Gantt chart of a pipeline, a rank a row; a bar has the number of its micro-batch.

    ranks: for each rank, its spans: predicted (`simulate(…).spans`) or measured (`pipeline.trace`).
    Messages among them are left out. Time counts from the first span of any rank; rows are grey
    where their rank is idle. A bar of a rank's second stage is paler, of its third one paler still.
    unit: of the spans' time, to be written below. None: they are in seconds, and shown in ms.
    Lesson: layer_splitting.
    """
    rows = [[s for s in rank if type(s.instruction).__name__ in KINDS] for rank in ranks]
    spans = [span for row in rows for span in row]
    if not spans:
        raise ValueError("schedule: no spans to draw")
    scale = 1e3 if unit is None else 1
    first = min(span.start for span in spans)
    length = scale * (max(span.end for span in spans) - first)
    turns = max(span.instruction.stage for span in spans) // len(rows)
    with chart(ax, title, 9, 1.2 + 0.42 * max(len(rows), 2)) as ax:
        for y, row in enumerate(rows):
            ax.barh(y, length, 0.8, 0, gid="idle", **area(color("idle")))
            for span in row:
                kind, turn = type(span.instruction).__name__, span.instruction.stage // len(rows)
                shade = paler(color(KINDS[kind]), turn)
                left, width = scale * (span.start - first), scale * (span.end - span.start)
                ax.barh(y, width, 0.8, left, **area(shade))
                said = str(span.instruction.microbatch)
                if width > 0.008 * (1 + len(said)) * length:
                    look: dict[str, Any] = {"ha": "center", "va": "center", "color": ink(shade)}
                    ax.text(left + width / 2, y, said, size=8, **look)
        ax.set_yticks(range(len(rows)), [f"rank {rank}" for rank in range(len(rows))])
        ax.set_ylim(len(rows) - 0.5, -0.5)
        ax.set_xlim(0, length)
        ax.set_xlabel(f"time ({unit or 'ms'})")
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
        ticks(ax.xaxis, lambda value: f"{value:g}", grid=None)
        found = {type(span.instruction).__name__ for span in spans}
        named = [KINDS[kind] for kind in KINDS if kind in found]
        shades = {name: color(name) for name in [*named, "idle"]}
        if turns:
            shades["paler: later stages"] = paler(color("forward"), 1)
        legend(ax, swatches(shades))
        return ax
