"""The chart: of whose gradients the gradients of several runs are made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from minidist.instruments.plot.frame import chart

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def weights(
    found: Mapping[str, Mapping[str, tuple[float, float]]],
    title: str = "Whose gradients?",
    ax: Axes | None = None,
) -> Axes:
    """A row for each run, a column for each micro-batch, and in it the weight of its gradient.

    found: {run: {micro-batch: (its weight, the right weight)}}, of the same micro-batches in each
    run. What weighs too little is blue, too much red, and what is right is white. Lesson:
    wrong_in_silence.
    """
    if not found:
        raise ValueError("weights: no run to draw")
    with chart(ax, title, 4, 0.9 + 0.32 * len(found)) as ax:
        times = [[weight / right for weight, right in row.values()] for row in found.values()]
        ax.imshow(times, cmap="RdBu_r", vmin=-0.4, vmax=2.4, aspect="auto")
        for y, (row, ratios) in enumerate(zip(found.values(), times, strict=True)):
            for x, ((weight, _), ratio) in enumerate(zip(row.values(), ratios, strict=True)):
                ink = "black" if 0.2 < ratio < 1.9 else "white"
                shown = weight if abs(ratio) > 1e-9 else 0
                ax.text(x, y, f"{shown:.3g}", ha="center", va="center", size=9, color=ink)
        columns = list(next(iter(found.values())))
        ax.set_xticks(range(len(columns)), columns)
        ax.set_yticks(range(len(found)), list(found))
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
        return ax
