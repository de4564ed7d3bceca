"""One number varied, another measured: a chart of several lessons."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil, floor, log2
from typing import TYPE_CHECKING, Any

from minidist.instruments.plot.frame import chart, legend, ticks
from minidist.instruments.plot.palette import PALE, colors

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curve = Mapping[float, float]
LEVEL: Any = {"ha": "center", "va": "center", "size": 8.5, "color": PALE}
LEVEL["bbox"] = {"fc": "white", "ec": "none", "pad": 1, "alpha": 0.85}


def sweep(
    measured: Mapping[str, Curve],
    predicted: Mapping[str, Curve] | None = None,
    ax: Axes | None = None,
    title: str = "Sweep",
    xlabel: str = "",
    ylabel: str = "",
    show: Callable[[float], str] = "{:g}".format,
    log: str = "x",
    levels: Mapping[str, float] | None = None,
) -> Axes:
    """What is measured as dots, what is predicted as a line of the same colour. Without a
    prediction, lines join the dots.

    Both mappings go from a name to {x: y}. show: how to write a y, such as `md.plot.human_bytes`.
    log: the axes that are logarithmic, "x", "y", "xy" or "". levels: values of y to compare with,
    as dotted lines with their names. Each x that is measured has a tick; where they are too many
    for that, powers of two have. Lesson: layer_splitting.
    """
    predicted = predicted or {}
    if not measured or not all(map(len, measured.values())):
        raise ValueError("sweep: nothing measured to draw")
    shades = colors([*measured, *predicted])
    places = sorted({x for curve in measured.values() for x in curve})
    with chart(ax, title, 8, 3.6) as ax:
        handles: list[Any] = []
        for name, curve in predicted.items():
            line = ax.plot(*zip(*sorted(curve.items()), strict=True), color=shades[name], lw=1.6)
            line[0].set_label(f"{name}, predicted")
            handles += [] if name in measured else line
        for i, (name, curve) in enumerate(measured.items()):
            size = 6 if len(places) < 40 else 3
            # Curves that are equal coincide: later lines are thinner, later dots smaller.
            larger = min(3 * (len(measured) - 1 - i), 6) if predicted else 0
            look: dict[str, Any] = {"marker": "oDs^vPX*"[i % 8], "ms": size + larger}
            look["lw"] = 0 if predicted else max(1.2, 4 - 1.2 * i)
            points = zip(*sorted(curve.items()), strict=True)
            handles += ax.plot(*points, color=shades[name], alpha=0.85, label=name, **look)
        if predicted:
            handles += ax.plot([], [], color=PALE, lw=1.6, label="line: predicted")
        for name, level in (levels or {}).items():
            ax.axhline(level, color=PALE, lw=1, ls=":", zorder=1)
            ax.annotate(name, (0.68, level), xycoords=("axes fraction", "data"), **LEVEL)
        for name in log:
            getattr(ax, f"set_{name}scale")("log", base=2 if name == "x" else 10)
        if "y" not in log:
            ax.set_ylim(bottom=0)
        ticks(ax.yaxis, show)
        labels = [f"{x:g}" for x in places]
        ax.set_xticks(places, labels)
        if "x" in log and len(" ".join(labels)) > 60:
            low, high = log2(min(places)), log2(max(places))
            every = 2 ** ceil(log2((high - low) / 8))
            powers = range(ceil(low / every) * every, floor(high) + 1, every)
            ax.set_xticks([2.0**power for power in powers], [f"$2^{{{p}}}$" for p in powers])
        ax.minorticks_off()
        ax.set_xlabel(xlabel)
        ax.set_ylabel(ylabel)
        legend(ax, handles)
        return ax
