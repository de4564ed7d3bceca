"""The charts: what a rank's memory holds. Bytes go in; kB and MB are shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from minidist.instruments.plot.bar_charts import handles, kinds_of, stacked
from minidist.instruments.plot.frame import chart, legend, ticks
from minidist.instruments.plot.palette import PALE, colors, human_bytes, ink

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Phase(Protocol):
    """A part of a training step, from one place in the lists of a history to another."""

    @property
    def name(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


class Tracker(Protocol):
    """What `memory` reads of a `md.measure.MemoryTracker`."""

    @property
    def history(self) -> Mapping[str, Sequence[int]]: ...
    @property
    def phases(self) -> Iterable[Phase]: ...


def memory(tracker: Tracker, ax: Axes | None = None) -> Axes:
    """The live bytes of one rank, stacked by what they are, over its allocations.

    Each allocation and each free is one place to the right, however long it took: the picture is
    the same at every run. The strip on top shows the phases, the dot the peak.
    Lesson: distributed_data_parallel.
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
        ax.stackplot(range(len(total) + 1), steps, step="post", colors=list(kinds.values()), lw=0)
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
        legend(ax, handles(kinds))
        return ax


def memory_by_rank(
    measured: Mapping[str, Mapping[str, int]],
    predicted: Mapping[str, Mapping[str, float]] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """A stacked bar of bytes a rank, by what they are; black lines mark the formula.

    Both mappings go from a bar's name to {category: bytes}: {"rank 0": tracker.after("backward")}.
    The lines stand where the parts of the bar would end by the formula, and its sum beside them.
    Lesson: distributed_data_parallel.
    """
    predicted = predicted or {}
    kinds = kinds_of([*measured.values(), *predicted.values()])
    if not measured or not kinds:
        raise ValueError("memory_by_rank: nothing measured to draw")
    if strange := [name for name in predicted if name not in measured]:
        raise ValueError(f"memory_by_rank: {', '.join(strange)} is predicted and not measured")
    return stacked(measured, predicted, ax, "Memory by rank", "live bytes", human_bytes, kinds)


def _strip(ax: Axes, phase: Phase, length: int) -> None:
    """Name the phase above the axes, if there is room, and mark where it begins and ends."""
    from matplotlib.patches import Rectangle

    shade = colors([phase.name])[phase.name]
    place = ax.get_xaxis_transform()  # across in changes, up in heights of the axes
    width = phase.end - phase.start
    strip = Rectangle((phase.start + 1, 1.02), width, 0.065, color=shade, clip_on=False)
    strip.set_transform(place)
    ax.add_patch(strip)
    for edge in phase.start + 1, phase.end + 1:
        ax.axvline(edge, color=PALE, lw=0.6, ls=(0, (1, 2)))
    if width > 0.012 * length * len(phase.name):
        x = phase.start + 1 + width / 2
        look: dict[str, Any] = {"ha": "center", "va": "center", "size": 8.5, "color": ink(shade)}
        ax.text(x, 1.05, phase.name, transform=place, gid="phase", **look)
