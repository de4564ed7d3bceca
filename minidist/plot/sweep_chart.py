"""One number varied, another measured: a chart of several lessons."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from minidist.plot.frame import chart, legend, ticks
from minidist.plot.palette import PALE, colors

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curve = Mapping[float, float]


def sweep(
    measured: Mapping[str, Curve],
    predicted: Mapping[str, Curve] | None = None,
    ax: Axes | None = None,
    title: str = "Sweep",
    xlabel: str = "",
    ylabel: str = "",
    show: Callable[[float], str] = "{:g}".format,
    log: str = "x",
) -> Axes:
    """What is measured as dots, what is predicted as a line of the same colour.

    Both mappings go from a name to {x: y}. show: how to write a y, such as `md.plot.human_bytes`.
    log: the axes that are logarithmic, "x", "y", "xy" or "". Each x that is measured has a tick.
    Lesson: layer_splitting.
    """
    predicted = predicted or {}
    if not measured or not all(map(len, measured.values())):
        raise ValueError("sweep: nothing measured to draw")
    shades = colors([*measured, *predicted])
    with chart(ax, title, 8, 3.6) as ax:
        handles: list[Any] = []
        for name, curve in predicted.items():
            line = ax.plot(*zip(*sorted(curve.items()), strict=True), color=shades[name], lw=1.6)
            line[0].set_label(f"{name}, predicted")
            handles += [] if name in measured else line
        for (name, curve), mark in zip(measured.items(), "oDs^vPX*" * len(measured), strict=False):
            points = zip(*sorted(curve.items()), strict=True)
            handles += ax.plot(*points, mark, color=shades[name], ms=6.5, alpha=0.85, label=name)
        if predicted:
            handles += ax.plot([], [], color=PALE, lw=1.6, label="line: predicted")
        for name in log:
            getattr(ax, f"set_{name}scale")("log")
        if "y" not in log:
            ax.set_ylim(bottom=0)
        ticks(ax.yaxis, show)
        places = sorted({x for curve in measured.values() for x in curve})
        ax.set_xticks(places, [f"{x:g}" for x in places])
        ax.minorticks_off()
        ax.set_xlabel(xlabel)
        ax.set_ylabel(ylabel)
        legend(ax, handles)
        return ax
