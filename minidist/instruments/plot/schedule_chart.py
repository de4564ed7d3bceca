"""The chart of the lesson layer_splitting: what each rank of a pipeline does when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from minidist.instruments.plot.frame import chart, legend, ticks
from minidist.instruments.plot.palette import color, ink, paler

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = {  # of instruction, and the palette's names for them; the others are messages
    "Forward": "forward",
    "Backward": "backward",
    "BackwardInputs": "backward for inputs",
    "BackwardWeights": "backward for weights",
}


class Instruction(Protocol):
    """What `schedule` reads of an instruction, besides the name of its class."""

    @property
    def stage(self) -> int: ...
    @property
    def microbatch(self) -> int: ...


class Span(Protocol):
    """A piece of a rank's time: a `minidist.pipeline.Span`."""

    @property
    def instruction(self) -> Instruction: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...


def schedule(
    ranks: Sequence[Sequence[Span]],
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
        from matplotlib.patches import Patch

        for y, row in enumerate(rows):
            ax.barh(y, length, 0.8, 0, color=color("idle"), lw=0, gid="idle")
            for span in row:
                shade = _shade(span.instruction, len(rows))
                left, width = scale * (span.start - first), scale * (span.end - span.start)
                ax.barh(y, width, 0.8, left, color=shade, ec="white", lw=0.6)
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
        handles = [Patch(color=color(name), label=name) for name in [*named, "idle"]]
        if turns:
            label = "paler: later stages"
            handles.append(Patch(fc=paler(color("forward"), 1), ec=color("forward"), label=label))
        legend(ax, handles)
        return ax


def _shade(instruction: Instruction, ranks: int) -> str:
    """The colour of what it does, paler for each stage that comes before it on its rank."""
    shade = color(KINDS[type(instruction).__name__])
    return paler(shade, instruction.stage // ranks)
