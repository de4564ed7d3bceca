"""What comes out of a comparison: rows, as a table, as a picture, and as JSON."""

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
    """A system. Bytes are those of the rank that has most, seconds those of the slowest rank.
    Lesson: real_tools.

    problem: why there is nothing else in the row: that it is "not installed", "cannot take the
        model" or "failed", with the reason behind a colon; empty if it has trained.
    difference: the largest from one process, relatively, of a parameter or a loss; in float64, or
        in float32 if `exact` says so.
    memory: {category: bytes} at the peak of a step. planned, sent: bytes that a rank sends in a
        step, by the planner (None: it has no such plan) and measured (None: not seen).
    loss: the last one. note: what the system says of itself.
    """

    name: str
    problem: str = ""
    peer: bool = False
    difference: float | None = None
    exact: str = "float64"
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
    head = ["", *COLUMNS, "sent", "planned", "step", "loss", "difference"]
    lines = [head] + [_cells(row) for row in rows if not row.problem]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(
            [line[0].ljust(widths[0])]
            + [c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True)]
        )
        for line in lines
    ]
    for row in rows:
        if row.problem:
            text.append(f"{row.name}: {row.problem}")
    notes = [f"  {row.name}: {row.note}" for row in rows if row.note and not row.problem]
    notes += [
        f"  {row.name}: {human_bytes(row.memory[HOST])} more {HOST}"
        for row in rows
        if HOST in row.memory
    ]
    return "\n".join(text + (["", *notes] if notes else []))


def _cells(row: Row) -> list[str]:
    known = [row.memory.get(name, 0) for name in COLUMNS[:4]]
    sizes = [human_bytes(n) if n else "–" for n in [*known, row.peak - sum(known), row.peak]]
    sent = ["–" if n is None else human_bytes(n) for n in (row.sent, row.planned)]
    seconds = "–" if row.seconds is None else human_time(row.seconds)
    loss = "–" if row.loss is None else f"{row.loss:.4f}"
    digits = "" if row.exact == "float64" else f" ({row.exact})"
    difference = "–" if row.difference is None else f"{row.difference:.1e}{digits}"
    return [row.name, *sizes, *sent, seconds, loss, difference]


def record(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Plain data, for JSON."""
    return [dict(vars(row)) for row in rows]


def rows_of(found: Sequence[dict[str, Any]]) -> list[Row]:
    """Rows from what `record` gave."""
    return [Row(**each) for each in found]


def draw(rows: Sequence[Row]) -> Figure:
    """A picture: what a rank sends, how long a step takes, and what a rank's memory holds.
    Lesson: real_tools."""
    from minidist.instruments import plot

    trained = [row for row in rows if not row.problem]
    if not trained:
        raise ValueError("draw: no system has trained, so there is nothing to draw")
    planned = {row.name: row.planned for row in trained if row.planned}
    panels: list[tuple[float, dict[str, dict[str, float]], dict[str, Any]]] = [
        (
            3,
            {row.name: {"communication": row.sent or 0} for row in trained},
            dict(title="sent by a rank", predicted=planned),
        ),
        (
            2.4,
            {row.name: {"compute": row.seconds or 0} for row in trained},
            dict(title="time of a step", show=human_time),
        ),
        (
            5,
            {row.name: dict(row.memory) for row in trained},
            dict(title="memory of a rank, at the peak of a step", aside=[HOST]),
        ),
    ]
    panels = [each for each in panels if any(any(parts.values()) for parts in each[1].values())]
    with plot.style() as plt:
        figure, axes = plt.subplots(
            1,
            len(panels),
            figsize=(12, 1.4 + 0.34 * len(trained)),
            width_ratios=[width for width, _, _ in panels],
            sharey=True,
            squeeze=False,
            layout="constrained",
        )
    for place, (_, measured, looks) in zip(axes[0], panels, strict=True):
        plot.breakdown(measured, **looks, ax=place)
    in_float64 = [row.difference for row in trained if row.difference and row.exact == "float64"]
    said = f"At most {max(in_float64, default=0.0):.0e} apart from one process, in float64"
    figure.suptitle(said + " (black: the bytes that the planner expects)" * bool(planned), size=11)
    return figure
