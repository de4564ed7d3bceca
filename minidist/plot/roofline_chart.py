"""The chart of the lesson reading_a_step: how fast operations are, and what the machine allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from minidist.plot.frame import chart, legend, ticks, write
from minidist.plot.palette import FAINT, INK, colors

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Point(Protocol):
    """What `roofline` reads of a `minidist.tracing.Point`."""

    @property
    def name(self) -> str: ...
    @property
    def intensity(self) -> float: ...  # FLOP for each byte that it must read or write
    @property
    def speed(self) -> float: ...  # FLOP/s


def roofline(
    roofs: Mapping[str, tuple[float, float]],
    points: Sequence[Point] = (),
    ax: Axes | None = None,
    title: str = "Roofline",
) -> Axes:
    """A line for each roof, and a dot with its name for each operation, on logarithmic axes (S.
    Williams, A. Waterman and D. Patterson, 2009, "Roofline").

    roofs: {what the bytes come from, such as "memory": (peak in FLOP/s, bytes a second)}. The roof
    is the lower of the peak and of intensity times bandwidth. The dotted line stands where the two
    meet: what lies left of it waits for bytes. Lesson: reading_a_step.
    """
    if not roofs:
        raise ValueError("roofline: no roof to draw")
    shades = colors(roofs)
    ridges = {name: peak / bandwidth for name, (peak, bandwidth) in roofs.items()}
    places = {point.name: (point.intensity, point.speed) for point in points}
    reach = [x for x, _ in places.values()] + list(ridges.values())
    left, right = min(reach) / 3, 10 * max(reach)
    with chart(ax, title, 8, 3.8) as ax:
        handles: list[Any] = []
        ax.set(xscale="log", yscale="log", xlim=(left, right))
        for name, (peak, bandwidth) in roofs.items():
            xs, label = (left, ridges[name], right), f"{name}, {bandwidth / 1e9:.3g} GB/s"
            ys = [min(peak, x * bandwidth) for x in xs]
            handles += ax.plot(xs, ys, color=shades[name], lw=2, label=label)
            ax.axvline(ridges[name], color=shades[name], lw=0.8, ls=":", zorder=1)
        for place in places.values():
            ax.plot(*place, "o", color=INK, ms=6, alpha=0.85)
        ax.set_ylim(top=3 * max(peak for peak, _ in roofs.values()))
        ticks(ax.xaxis, "{:g}".format, FAINT)
        ticks(ax.yaxis, lambda value: f"{value / 1e9:g}")
        ax.set(xlabel="FLOP a byte", ylabel="GFLOP/s")
        legend(ax, handles)
        dots = list(places.values())
        if dots:
            write(ax, dict(sorted(places.items(), key=lambda each: -each[1][1])), dots)
        return ax
