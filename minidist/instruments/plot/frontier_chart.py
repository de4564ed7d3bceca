"""The chart: several ways to do one thing, by what each saves and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from minidist.instruments.plot.frame import chart, legend, ticks, write
from minidist.instruments.plot.palette import PALE, colors

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = Mapping[str, tuple[float, float]]


def frontier(
    measured: Mapping[str, Points],
    title: str = "What is saved, and what it costs",
    xlabel: str = "",
    ylabel: str = "",
    show: Callable[[float], str] = "{:g}".format,
    ax: Axes | None = None,
) -> Axes:
    """A dot for each way; the nearer to the lower left corner, the better.

    measured: {what the colour stands for, such as "time": {way: (x, y)}}. The name of a way stands
    beside its highest dot, and a thin line joins its dots. show: writes an x, such as
    `human_bytes`. Lesson: activation_checkpointing.
    """
    if not measured or not all(measured.values()):
        raise ValueError("frontier: nothing measured to draw")
    shades = colors(measured)
    with chart(ax, title, 8, 3.8) as ax:
        handles: list[Any] = []
        for i, (name, points) in enumerate(measured.items()):
            look: dict[str, Any] = {"marker": "oDs^vPX*"[i % 8], "lw": 0, "ms": 7, "alpha": 0.85}
            handles += ax.plot(*zip(*points.values(), strict=True), color=shades[name], **look)
            handles[-1].set_label(name)
        highest: dict[str, tuple[float, float]] = {}
        for way in dict.fromkeys(way for points in measured.values() for way in points):
            own = [points[way] for points in measured.values() if way in points]
            ax.plot(*zip(*own, strict=True), color=PALE, lw=0.8, zorder=1)
            highest[way] = max(own, key=lambda dot: dot[1])
        ax.margins(0.14, 0.12)
        ticks(ax.xaxis, show)
        ticks(ax.yaxis, lambda value: f"{value:g}")
        ax.set_xlabel(xlabel)
        ax.set_ylabel(ylabel)
        legend(ax, handles)
        dots = [dot for points in measured.values() for dot in points.values()]
        write(ax, dict(sorted(highest.items(), key=lambda way: -way[1][1])), dots)
        return ax
