"""The chart of one number against another: what was measured, and what a formula says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from minidist.plot.frame import chart, legend, ticks
from minidist.plot.palette import COLORS, FAINT, PALE, RANKS, colors

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = Sequence[tuple[float, float]]
LOOKS = ("o", "s", "^", "D", "v", "P", "X")


def curves(
    measured: Mapping[str, Points],
    predicted: Mapping[str, Points] | None = None,
    *,
    x: str = "",
    y: str = "",
    title: str = "",
    powers_of_two: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Measured points, a line a name. If a prediction has its name, the points stand alone, and the
    prediction is dashed.

    Both mappings go from a name to (x, y) pairs. `powers_of_two` names the axes, "x", "y" or "xy",
    that are logarithmic, with ticks such as 2⁴. Lesson: activation_checkpointing.
    """
    predicted = predicted or {}
    if not any(map(len, measured.values())):
        raise ValueError("curves: nothing measured to draw")
    shades = {name: COLORS.get(name, shade) for name, shade in zip(measured, RANKS, strict=False)}
    shades |= colors(name for name in predicted if name not in shades)
    with chart(ax, title, 8, 3.6) as ax:
        handles: list[Any] = []
        for (name, points), mark in zip(measured.items(), cycle(LOOKS), strict=False):
            ends = zip(*points, strict=True)
            look: dict[str, Any] = {"color": shades[name], "marker": mark, "ms": 5, "label": name}
            # Equal curves lie upon each other: later ones are thinner.
            width = 0 if name in predicted else max(1.2, 4 - 1.2 * len(handles))
            handles += ax.plot(*ends, lw=width, **look)
        for name, points in predicted.items():
            shade = "black" if len(predicted) == 1 else shades[name]
            label = f"{name}, formula" if len(predicted) > 1 else "formula"
            ends = zip(*points, strict=True)
            handles += ax.plot(*ends, color=shade, lw=1.5, ls=(0, (4, 2)), label=label, zorder=3)
        ax.set_xlabel(x)
        ax.set_ylabel(y)
        for name, axis in ("x", ax.xaxis), ("y", ax.yaxis):
            if name in powers_of_two:
                _powers_of_two(ax, name)
            else:
                ticks(axis, lambda value: f"{value:g}")
        ax.spines[["left", "bottom"]].set_color(PALE)
        legend(ax, handles)
        return ax


def _powers_of_two(ax: Axes, name: str) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    (ax.set_xscale if name == "x" else ax.set_yscale)("log", base=2)
    axis = ax.xaxis if name == "x" else ax.yaxis
    axis.set_major_locator(LogLocator(2, numticks=12))
    axis.set_minor_locator(NullLocator())
    axis.grid(True, color=FAINT, linewidth=0.8)
