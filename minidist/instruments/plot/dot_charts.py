"""A chart of dots with names: operations below what a machine allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minidist.instruments.plot.frame import chart, legend, ticks
from minidist.instruments.plot.palette import GROUND, INK, colors, darker

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from minidist.instruments.tracing.roofline import Point


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
    shades = {name: darker(shade) for name, shade in colors(bandwidth).items()}
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
        write(ax, highest, list(places.values()), peak)
        return ax


def write(
    ax: Axes,
    names: Mapping[str, tuple[float, float]],
    dots: Sequence[tuple[float, float]],
    peak: float,
) -> None:
    """Each name to the right of its dot, or below whatever is there: the roof at its peak, one of
    `dots`, or a name that is written already."""
    from matplotlib.transforms import Bbox

    figure: Any = ax.figure
    figure.draw_without_rendering()  # now the axes have their size
    taken = [Bbox([dot - 4, dot + 4]) for dot in ax.transData.transform(dots)]
    roof = ax.transData.transform((1, peak))[1]
    taken.append(Bbox([(float("-inf"), roof - 2), (float("inf"), roof + 2)]))
    place: dict[str, Any] = {"xytext": (8, 0), "textcoords": "offset points"}
    place["bbox"] = {"fc": GROUND, "ec": "none", "pad": 1, "alpha": 0.85}  # over the dotted line
    for name, dot in names.items():
        label = ax.annotate(name, dot, va="center", size=9, **place)
        for there in sorted(taken, key=lambda box: -box.y1):
            if (box := label.get_window_extent()).overlaps(there):
                label.xyann = (8, label.xyann[1] - (box.y1 - there.y0) * 72 / figure.dpi - 1)
        taken.append(label.get_window_extent())
