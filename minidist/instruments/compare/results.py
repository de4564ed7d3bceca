"""What comes out of a comparison: rows, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minidist.instruments.compare.watched_steps import HOST
from minidist.instruments.plot import human_bytes, human_time

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = ["parameters", "gradients", "optimizer states", "activations", "rest", "peak"]


@dataclass(frozen=True)
class Row:
    """A system: plain data, so that `vars(row)` can be written as JSON, and `Row(**found)` read.
    Bytes are those of the rank that has most, seconds those of the slowest rank.
    Lesson: real_tools.

    problem: why there is nothing else in the row; empty if it has trained.
    difference: the largest from one process, relatively, of a parameter or a loss, in float64.
    memory: {category: bytes} at the peak of a step. planned, sent: bytes that a rank sends in a
        step, by the planner (None: it has no such plan) and measured.
    loss: the last one. note: what the system says of itself.
    """

    name: str
    problem: str = ""
    difference: float | None = None
    memory: dict[str, int] = field(default_factory=dict)
    sent: float | None = None
    planned: float | None = None
    seconds: float | None = None
    loss: float | None = None
    note: str = ""

    @property
    def peak(self) -> int:
        """Bytes on the device at the peak of a step."""
        return sum(nbytes for kind, nbytes in self.memory.items() if kind != HOST)


def table(rows: Sequence[Row]) -> str:
    """All rows as text; what went wrong, and notes, stand below. Lesson: real_tools."""
    lines = [["", *COLUMNS, "sent", "planned", "step", "loss", "difference"]]
    lines += [_cells(row) for row in rows if not row.problem]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []
    for name, *cells in lines:
        right = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        text.append("  ".join([name.ljust(widths[0]), *right]))
    for row in rows:
        said = [row.problem or row.note]
        said += [f"{human_bytes(row.memory[HOST])} more {HOST}"] if HOST in row.memory else []
        text += [f"{row.name}: {each}" for each in said if each]
    return "\n".join(text)


def _cells(row: Row) -> list[str]:
    known = [row.memory.get(name, 0) for name in COLUMNS[:4]]
    sizes = [human_bytes(n) if n else "–" for n in [*known, row.peak - sum(known), row.peak]]
    sent = ["–" if n is None else human_bytes(n) for n in (row.sent, row.planned)]
    seconds = human_time(row.seconds or 0)
    return [row.name, *sizes, *sent, seconds, f"{row.loss:.4f}", f"{row.difference:.1e}"]


def draw(rows: Sequence[Row]) -> Figure:
    """A picture: what a rank sends, how long a step takes, and what a rank's memory holds.
    Lesson: real_tools."""
    from minidist.instruments import plot

    trained = [row for row in rows if not row.problem]
    planned = {row.name: row.planned for row in trained if row.planned}
    panels: list[tuple[dict[str, dict[str, float]], dict[str, Any]]] = [
        (
            {row.name: {"communication": row.sent or 0} for row in trained},
            dict(title="sent by a rank", predicted=planned),
        ),
        (
            {row.name: {"compute": row.seconds or 0} for row in trained},
            dict(title="time of a step", show=human_time),
        ),
        (
            {row.name: dict(row.memory) for row in trained},
            dict(title="memory of a rank, at the peak of a step", aside=[HOST]),
        ),
    ]
    with plot.style() as plt:
        size, widths = (12, 1.4 + 0.34 * len(trained)), (3, 2.4, 5)
        options = dict(figsize=size, width_ratios=widths, sharey=True, layout="constrained")
        figure, axes = plt.subplots(1, 3, **options)
    for place, (measured, looks) in zip(axes, panels, strict=True):
        plot.breakdown(measured, **looks, ax=place)
    most = max(row.difference or 0 for row in trained)
    said = f"At most {most:.0e} apart from one process, in float64"
    figure.suptitle(said + " (black: the bytes that the planner expects)" * bool(planned), size=11)
    return figure
