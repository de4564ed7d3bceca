"""Charts of dots with names: ways to do one thing, and operations below what a machine allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minidist.instruments.plot.frame import chart, legend, ticks
from minidist.instruments.plot.palette import INK, PALE, colors

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from minidist.instruments.tracing.roofline import Point


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


def roofline(
    points: Sequence[Point],
    peak: float,
    bandwidth: Mapping[str, float],
    ax: Axes | None = None,
    title: str = "Roofline",
) -> Axes:
    """A dot with its name for each operation, below a roof, on logarithmic axes (Williams, Waterman
    and Patterson, "Roofline", Communications of the ACM 52(4), 2009).

    peak: FLOP/s. bandwidth: {where the bytes come from, such as "memory": bytes a second}; each has
    a roof, the lower of the peak and of intensity times bandwidth. A dotted line stands where the
    two meet: what lies left of it waits for bytes. Lesson: reading_a_step.
    """
    if not points or not bandwidth:
        raise ValueError("roofline: no operation, or no roof, to draw")
    shades = colors(bandwidth)
    ridges = {name: peak / fast for name, fast in bandwidth.items()}
    places = {point.name: (point.intensity, point.speed) for point in points}
    reach = [*ridges.values(), *(x for x, _ in places.values())]
    left, right = min(reach) / 3, 10 * max(reach)
    with chart(ax, title, 8, 3.8) as ax:
        handles: list[Any] = []
        ax.set(xscale="log", yscale="log", xlim=(left, right))
        for name, fast in bandwidth.items():
            xs, label = (left, ridges[name], right), f"{name}, {fast / 1e9:.3g} GB/s"
            ys = [min(peak, x * fast) for x in xs]
            handles += ax.plot(xs, ys, color=shades[name], lw=2, label=label)
            ax.axvline(ridges[name], color=shades[name], lw=0.8, ls=":", zorder=1)
        for place in places.values():
            ax.plot(*place, "o", color=INK, ms=6, alpha=0.85)
        ax.set_ylim(top=3 * peak)
        ticks(ax.xaxis, "{:g}".format)
        ticks(ax.yaxis, lambda value: f"{value / 1e9:g}")
        ax.set(xlabel="FLOP a byte", ylabel="GFLOP/s")
        legend(ax, handles)
        highest = dict(sorted(places.items(), key=lambda each: -each[1][1]))
        write(ax, highest, list(places.values()))
        return ax


def write(
    ax: Axes, names: Mapping[str, tuple[float, float]], dots: Sequence[tuple[float, float]]
) -> None:
    """Each name to the right of its dot, or below whatever is there: one of `dots`, or a name that
    is written already."""
    from matplotlib.transforms import Bbox

    figure: Any = ax.figure
    figure.draw_without_rendering()  # now the axes have their size
    taken = [Bbox([dot - 4, dot + 4]) for dot in ax.transData.transform(dots)]
    place: dict[str, Any] = {"xytext": (8, 0), "textcoords": "offset points"}
    for name, dot in names.items():
        label = ax.annotate(name, dot, va="center", size=9, **place)
        for there in sorted(taken, key=lambda box: -box.y1):
            if (box := label.get_window_extent()).overlaps(there):
                label.xyann = (8, label.xyann[1] - (box.y1 - there.y0) * 72 / figure.dpi - 1)
        taken.append(label.get_window_extent())
