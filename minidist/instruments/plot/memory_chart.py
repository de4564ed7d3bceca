"""The chart: what a rank's memory holds, over a step. Bytes go in; kB and MB are shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minidist.instruments.plot.bar_charts import kinds_of
from minidist.instruments.plot.frame import chart, legend, swatches, ticks
from minidist.instruments.plot.palette import INK, PALE, area, colors, human_bytes, ink

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from minidist.instruments.measure import MemoryTracker, Phase


def memory(tracker: MemoryTracker, ax: Axes | None = None) -> Axes:
    """The live bytes of one rank, stacked by what they are, over its allocations.

    Each allocation and each free is one place to the right, however long it took: the picture is
    the same at every run. The strip on top shows the phases, the dot the peak.
    Lesson: fully_sharded.
    """
    history = tracker.history
    kinds = kinds_of([{name: max(live, default=0) for name, live in history.items()}])
    if not kinds:
        raise ValueError("memory: nothing measured to draw")
    total = [sum(live) for live in zip(*history.values(), strict=True)]
    peak = max(total)
    middle = total.index(peak) + 0.5
    with chart(ax, "Memory", 8, 3.8, pad=28) as ax:
        steps = [[*history[name], history[name][-1]] for name in kinds]
        places, shades = range(len(total) + 1), list(kinds.values())
        ax.stackplot(places, steps, step="post", colors=shades, lw=0)
        ax.step(places, [*total, total[-1]], where="post", color=INK, lw=0.8)
        ax.set_xlim(0, len(total))
        ax.set_ylim(0, 1.15 * peak)
        ax.plot([0, middle], [peak, peak], color="black", lw=1, ls=(0, (4, 2)))
        ax.plot([middle], [peak], color="black", marker="o", ms=4)
        side = "left" if middle < 0.1 * len(total) else "right"
        ax.text(middle, 1.025 * peak, f"peak {human_bytes(peak)}", ha=side, size=9.5)
        for phase in tracker.phases:
            _strip(ax, phase, len(total))
        ax.set_xlabel("allocations and frees, in order")
        ax.set_ylabel("live bytes")
        ticks(ax.xaxis, lambda change: f"{change:g}", grid=None, whole=True)
        ticks(ax.yaxis, human_bytes)
        legend(ax, swatches(kinds)[::-1])
        return ax


def _strip(ax: Axes, phase: Phase, length: int) -> None:
    """Name the phase above the axes, if there is room, and mark where it begins and ends."""
    from matplotlib.patches import Rectangle

    shade = colors([phase.name])[phase.name]
    place = ax.get_xaxis_transform()  # across in changes, up in heights of the axes
    width = phase.end - phase.start
    strip = Rectangle((phase.start + 1, 1.02), width, 0.065, clip_on=False, **area(shade))
    strip.set_transform(place)
    ax.add_patch(strip)
    for edge in phase.start + 1, phase.end + 1:
        ax.axvline(edge, color=PALE, lw=0.6, ls=(0, (1, 2)))
    if width > 0.012 * length * len(phase.name):
        x = phase.start + 1 + width / 2
        look: dict[str, Any] = {"ha": "center", "va": "center", "size": 8.5, "color": ink(shade)}
        ax.text(x, 1.05, phase.name, transform=place, gid="phase", **look)
