"""Charts of lines: what grows or falls with what. Bytes and seconds go in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil, floor, log2
from statistics import median
from typing import TYPE_CHECKING, Any

from minidist.instruments.plot.frame import chart, legend, ticks
from minidist.instruments.plot.palette import (
    GROUND,
    MARKERS,
    PALE,
    colors,
    darker,
    human_bytes,
    human_time,
    paler,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Curve = Mapping[float, float]
LEVEL: Any = {"ha": "center", "va": "center", "size": 8.5, "color": PALE}
LEVEL["bbox"] = {"fc": GROUND, "ec": "none", "pad": 1, "alpha": 0.85}


def lines(names: Iterable[str]) -> dict[str, str]:
    """The colour of each name, for a line."""
    return {name: darker(shade) for name, shade in colors(names).items()}


def loss(curves: Mapping[str, Sequence[float]], ax: Axes | None = None) -> Axes:
    """Lesson: collectives. Loss against step, from step 1 on, a line a name.

    The first curve is wide and pale, those after it narrow and dashed: where two are equal
    both are seen.
    """
    if not curves or not all(map(len, curves.values())):
        raise ValueError("loss: no curve to draw, or one with no step")
    dashes = ((0, (3, 2)), (0, (1, 1.5)), (0, (6, 1.5, 1, 1.5)))
    with chart(ax, "Loss", 8, 3.4) as ax:
        handles: list[Any] = []
        for i, (name, shade) in enumerate(lines(curves).items()):
            look: dict[str, Any] = {"lw": 2, "ls": dashes[(i - 1) % len(dashes)], "color": shade}
            if not i:
                look = {"lw": 6, "color": darker(paler(shade, 1)), "solid_capstyle": "round"}
            steps = range(1, len(curves[name]) + 1)
            handles += ax.plot(steps, curves[name], label=name, **look)
        ax.set_xlabel("step")
        ax.set_ylabel("loss")
        ticks(ax.xaxis, lambda step: f"{step:g}", grid=None, whole=True)
        ticks(ax.yaxis, lambda value: f"{value:g}")
        legend(ax, handles)
        return ax


def time_against_size(
    measured: Mapping[str, Sequence[tuple[float, float]]],
    predicted: Mapping[str, Sequence[tuple[float, float]]] | None = None,
    ax: Axes | None = None,
    title: str = "Time against message size",
    marks: Mapping[str, float] | None = None,
) -> Axes:
    """Time against message size, both logarithmic, a line an algorithm.

    Both mappings go from an algorithm to (bytes, seconds) pairs. A size measured several times
    shows its median in a band from the fastest to the slowest; a prediction is dashed. marks: sizes
    to point out, as dotted lines with their names. Lesson: communication.
    """
    predicted = predicted or {}
    if not (measured or predicted) or not all(map(len, measured.values())):
        raise ValueError("time_against_size: nothing measured to draw")
    shades = lines([*measured, *predicted])
    with chart(ax, title, 8, 4) as ax:
        handles: list[Any] = []
        for name, pairs in measured.items():
            samples: dict[float, list[float]] = {}
            for nbytes, seconds in sorted(pairs):
                samples.setdefault(nbytes, []).append(seconds)
            x, y, shade = list(samples), list(map(median, samples.values())), shades[name]
            mark = MARKERS.get(name, "p")
            low, high = list(map(min, samples.values())), list(map(max, samples.values()))
            ax.fill_between(x, low, high, color=shade, alpha=0.18, lw=0)
            handles += ax.plot(x, y, color=shade, lw=1.8, marker=mark, ms=5.5, label=name)
        for name, pairs in predicted.items():
            ends = zip(*sorted(pairs), strict=True)
            label, shade = f"{name}, predicted", shades[name]
            dashed = ax.plot(*ends, color=shade, lw=1.5, ls=(0, (4, 2)), label=label)
            handles += [] if name in measured else dashed
        if predicted:
            handles += ax.plot([], [], color=PALE, lw=1.5, ls=(0, (4, 2)), label="predicted")
        for name, nbytes in (marks or {}).items():
            ax.axvline(nbytes, color="black", lw=1.2, ls=":", zorder=1)
            ax.annotate(name, (nbytes, 0.93), xycoords=("data", "axes fraction"), **LEVEL)
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlabel("message size")
        ax.set_ylabel("time")
        ticks(ax.xaxis, human_bytes)
        ticks(ax.yaxis, human_time)
        legend(ax, handles)
        return ax


def free(ax: Axes, level: float) -> float:
    """Where a name may stand on a level, as a part of the width: where no curve comes near it."""
    from matplotlib.transforms import Bbox

    ax.get_xlim(), ax.get_ylim()  # now the axes know their limits
    inside = ax.transData - ax.transAxes
    curves = [line for line in ax.lines if line.get_transform() == ax.transData]  # not the levels
    paths = [inside.transform_path(c.get_path()) for c in curves]
    y = inside.transform((ax.get_xlim()[1], level))[1]
    for x in (0.68, 0.84, 0.5, 0.32, 0.16):
        near = Bbox.from_extents(x - 0.05, y - 0.05, x + 0.05, y + 0.05)
        if not any(path.intersects_bbox(near, filled=False) for path in paths):
            return x
    return 0.68


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
    shades = lines([*measured, *predicted])
    places = sorted({x for curve in measured.values() for x in curve})
    with chart(ax, title, 8, 3.6) as ax:
        handles: list[Any] = []
        for name, curve in predicted.items():
            label, pairs = f"{name}, predicted", zip(*sorted(curve.items()), strict=True)
            drawn = ax.plot(*pairs, color=shades[name], lw=1.6, label=label)
            handles += [] if name in measured else drawn
        for i, (name, curve) in enumerate(measured.items()):
            size = 6 if len(places) < 40 else 3
            # Curves that are equal coincide: later lines are thinner, later dots smaller.
            larger = min(3 * (len(measured) - 1 - i), 6) if predicted else 0
            look: dict[str, Any] = {"marker": "oDs^vPX*"[i % 8], "ms": size + larger}
            look["lw"] = 0 if predicted else max(1.2, 4 - 1.2 * i)
            points = zip(*sorted(curve.items()), strict=True)
            handles += ax.plot(*points, color=shades[name], label=name, **look)
        if predicted:
            handles += ax.plot([], [], color=PALE, lw=1.6, label="line: predicted")
        for name in log:
            getattr(ax, f"set_{name}scale")("log", base=2 if name == "x" else 10)
        for level in (levels or {}).values():
            ax.axhline(level, color=PALE, lw=1, ls=":", zorder=1)
        if "y" not in log:
            ax.set_ylim(bottom=0)
        for name, level in (levels or {}).items():
            place = free(ax, level), level
            ax.annotate(name, place, xycoords=("axes fraction", "data"), **LEVEL)
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
