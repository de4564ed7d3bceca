"""The charts of bytes, time and loss. Bytes and seconds go in; kB, MB, µs and ms are shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from minidist.instruments.plot.frame import chart, legend, ticks
from minidist.instruments.plot.palette import (
    ACTIVITIES,
    COLORS,
    FAINT,
    MARKERS,
    PALE,
    color,
    colors,
    human_bytes,
    human_time,
    ink,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Counter(Protocol):
    """What `traffic` reads of a `md.measure.TrafficCounter`."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def sent_to(self) -> Sequence[int]: ...  # bytes, by the receiver's global rank


class Span(Protocol):
    """A stretch of one rank's time, in seconds."""

    @property
    def name(self) -> str: ...
    @property
    def category(self) -> str: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...


class Spans(Protocol):
    """What `timeline` reads of a `md.measure.Timeline`, if its row has a name."""

    @property
    def spans(self) -> Iterable[Span]: ...


class RankSpans(Spans, Protocol):
    """What `timeline` reads of a `md.measure.Timeline`, if its row is its rank."""

    @property
    def rank(self) -> int: ...


def traffic(counters: Iterable[Counter], ax: Axes | None = None) -> Axes:
    """Lesson: collectives. A heat map of bytes sent, a row a sender and a column a receiver.

    `counters` are those of all ranks, in any order. Behind each row stands what that rank sent
    in all, under each column what that rank received.
    """
    counters = list(counters)
    sent = {counter.rank: list(counter.sent_to) for counter in counters}
    if not sent:
        raise ValueError("traffic: no counters to draw")
    world = max(counter.world_size for counter in counters)
    if absent := [str(rank) for rank in range(world) if rank not in sent]:
        raise ValueError(f"traffic: the counter of rank {', '.join(absent)} is missing")
    if len(counters) != world or any(len(row) != world for row in sent.values()):
        raise ValueError(f"traffic: draw {world} counters, each of {world} receivers, at a time")
    rows = [sent[rank] for rank in range(world)]
    side = min(0.8 * world, 6.5)  # inches
    font, gap = (9.5, " ") if world <= 8 else (6.5, "\n")

    def words(nbytes: int) -> str:
        return human_bytes(nbytes).replace(" ", gap)

    with chart(ax, "Bytes sent", max(side + 2.2, 4), max(side + 1.2, 2.6)) as ax:
        from matplotlib.colors import LinearSegmentedColormap, to_hex

        shades = LinearSegmentedColormap.from_list("bytes", ["white", color("communication")])
        most = max(1, *map(max, rows))
        ax.imshow(rows, cmap=shades, vmin=0, vmax=most)
        for i, row in enumerate(rows):
            for j, nbytes in enumerate(row):
                said = words(nbytes) if nbytes or i != j else "–"
                tone = ink(to_hex(shades(nbytes / most))) if nbytes else "#AAAAAA"
                ax.text(j, i, said, ha="center", va="center", size=font, color=tone, gid="cell")
            received = sum(other[i] for other in rows)
            ax.text(world - 0.35, i, words(sum(row)), va="center", size=font, gid="sent")
            ax.text(i, world - 0.35, words(received), ha="center", va="top", size=font)
        ax.text(world - 0.35, -0.65, "sent in all", va="bottom", size=9.5, color=PALE)
        ax.text(-0.65, world - 0.35, "received\nin all", ha="right", va="top", size=9.5, color=PALE)
        ax.set_xticks([edge - 0.5 for edge in range(world + 1)], minor=True)
        ax.set_yticks([edge - 0.5 for edge in range(world + 1)], minor=True)
        ax.grid(which="minor", color=FAINT)
        ax.set_xticks(range(world))
        ax.set_yticks(range(world))
        ax.set_xlabel("receiver (rank)")
        ax.set_ylabel("sender (rank)")
        ax.xaxis.tick_top()
        ax.xaxis.set_label_position("top")
        ax.tick_params(which="both", length=0)
        ax.spines[:].set_visible(False)
        return ax


def timeline(
    timelines: Iterable[RankSpans] | Mapping[str, Spans],
    ax: Axes | None = None,
    title: str = "Timeline",
    lanes: bool = False,
) -> Axes:
    """Lesson: rank. A Gantt chart, a rank a row, in ms since the first span of any row.

    A mapping names its rows itself, from top to bottom: {"replica 0": timeline, …}.
    All spans are in seconds on one clock. A span has the colour of its name if that is an
    activity of the palette (forward, backward, step), else of its category. A span that begins
    within another is drawn thinner, upon it. lanes: communication has a lane of its own below,
    where a message begins when the one before it has ended. Lesson: distributed_data_parallel.
    """
    if isinstance(timelines, Mapping):
        lines = [(name, line.spans) for name, line in timelines.items()]
    else:
        in_order = sorted(timelines, key=lambda line: line.rank)
        lines = [(f"rank {line.rank}", line.spans) for line in in_order]
    spans = [span for _, line in lines for span in line]
    if not spans:
        raise ValueError("timeline: no spans to draw")

    def kind(span: Span) -> str:
        return span.name if span.name in ACTIVITIES else span.category

    first = min(span.start for span in spans)
    order = [*COLORS, *sorted({kind(span) for span in spans} - set(COLORS))]
    shades = colors(name for name in order if name in map(kind, spans))
    with chart(ax, title, 8, 1.2 + 0.45 * max(len(lines), 2)) as ax:
        from matplotlib.patches import Patch

        for row, (_, line) in enumerate(lines):
            around: list[float] = []  # the ends of the spans that the next may begin within
            free, middle, whole = first, float(row), 0.78  # when the lane of messages is free
            if lanes:
                middle, whole = row - 0.2, 0.4
            for span in sorted(line, key=lambda span: (span.start, -span.end)):
                shade, edge = shades[kind(span)], shades[kind(span)]
                start, at, thick, depth = span.start, middle, whole, 0
                if lanes and span.category == "communication":
                    start, at, thick, edge = max(start, free), row + 0.2, 0.3, "white"
                    free = max(free, span.end)
                else:
                    around = [end for end in around if end > span.start]
                    depth = len(around)
                    thick *= 0.66**depth
                    around.append(span.end)
                left, width = (start - first) * 1e3, max(0, span.end - start) * 1e3
                # An edge in the same colour keeps spans shorter than a pixel in sight.
                ax.barh(at, width, thick, left, color=shade, ec=edge, lw=0.5, zorder=2 + depth)
        ax.set_yticks(range(len(lines)), [name for name, _ in lines])
        ax.set_ylim(len(lines) - 0.45, -0.55)
        ax.set_xlim(left=0, auto=None)  # panels that share this axis may still need more of it
        ax.set_xlabel("time (ms)")
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
        ticks(ax.xaxis, lambda ms: f"{ms:g}")
        legend(ax, [Patch(color=shade, label=name) for name, shade in shades.items()])
        return ax


def time_against_size(
    measured: Mapping[str, Sequence[tuple[float, float]]],
    predicted: Mapping[str, Sequence[tuple[float, float]]] | None = None,
    ax: Axes | None = None,
    title: str = "Time against message size",
) -> Axes:
    """Lesson: collectives. Time against message size, both logarithmic, a line an algorithm.

    Both mappings go from an algorithm to (bytes, seconds) pairs. A size measured several times
    shows its median in a band from the fastest to the slowest; a prediction is dashed.
    """
    predicted = predicted or {}
    points = [pair for line in (*measured.values(), *predicted.values()) for pair in line]
    if not points or not all(map(len, measured.values())):
        raise ValueError("time_against_size: nothing measured to draw")
    if any(nbytes <= 0 or seconds <= 0 for nbytes, seconds in points):
        raise ValueError("time_against_size: bytes and seconds must be above 0 on log axes")
    shades = colors([*measured, *predicted])
    with chart(ax, title, 8, 4) as ax:
        handles: list[Any] = []
        for name, pairs in measured.items():
            samples: dict[float, list[float]] = {}
            for nbytes, seconds in sorted(pairs):
                samples.setdefault(nbytes, []).append(seconds)
            x, y, shade = list(samples), list(map(median, samples.values())), shades[name]
            mark = MARKERS.get(name, "p")
            low, high = list(map(min, samples.values())), list(map(max, samples.values()))
            ax.fill_between(x, low, high, color=shade, alpha=0.18, lw=0)
            handles += ax.plot(x, y, color=shade, lw=1.8, marker=mark, ms=5.5, label=name)
        for name, pairs in predicted.items():
            ends = zip(*sorted(pairs), strict=True)
            label, shade = f"{name}, predicted", shades[name]
            line = ax.plot(*ends, color=shade, lw=1.5, ls=(0, (4, 2)), label=label)
            handles += [] if name in measured else line
        if predicted:
            handles += ax.plot([], [], color=PALE, lw=1.5, ls=(0, (4, 2)), label="predicted")
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlabel("message size")
        ax.set_ylabel("time")
        ticks(ax.xaxis, human_bytes)
        ticks(ax.yaxis, human_time)
        legend(ax, handles)
        return ax


def loss(curves: Mapping[str, Sequence[float]], ax: Axes | None = None) -> Axes:
    """Lesson: collectives. Loss against step, from step 1 on, a line a name.

    The first curve is wide and pale, those after it narrow and dashed: where two are equal
    both are seen.
    """
    if not curves or not all(map(len, curves.values())):
        raise ValueError("loss: no curve to draw, or one with no step")
    dashes = ((0, (3, 2)), (0, (1, 1.5)), (0, (6, 1.5, 1, 1.5)))
    with chart(ax, "Loss", 8, 3.4) as ax:
        handles: list[Any] = []
        for i, (name, shade) in enumerate(colors(curves).items()):
            look: dict[str, Any] = {"lw": 6, "alpha": 0.45, "solid_capstyle": "round"}
            if i:
                look = {"lw": 2, "ls": dashes[(i - 1) % len(dashes)]}
            steps = range(1, len(curves[name]) + 1)
            handles += ax.plot(steps, curves[name], color=shade, label=name, **look)
        ax.set_xlabel("step")
        ax.set_ylabel("loss")
        ticks(ax.xaxis, lambda step: f"{step:g}", grid=None, whole=True)
        ticks(ax.yaxis, lambda value: f"{value:g}")
        legend(ax, handles)
        return ax
