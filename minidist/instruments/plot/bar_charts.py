"""Charts of bars: what was measured beside what was predicted. Bytes go in; kB and MB are shown."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from minidist.instruments.plot.frame import chart, legend, swatches, ticks
from minidist.instruments.plot.palette import MEMORY, PALE, area, colors, human_bytes, ink

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def bars(
    series: Mapping[str, Mapping[str, float]],
    title: str = "Measured and predicted",
    ylabel: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Bars side by side: for each name of a series a value of each series, written above it.

    `series` goes from what a colour stands for ("measured") to {name: value}; all have the same
    names. Lesson: communication.
    """
    names = list(next(iter(series.values()), {}))
    if not names or any(list(values) != names for values in series.values()):
        raise ValueError("bars: nothing to draw, or series of different names")
    shades, wide = colors(series), 0.8 / len(series)
    size = 8.5 if len(names) * len(series) < 15 else 6.6  # or neighbours would touch
    with chart(ax, title, 8, 3.4) as ax:
        handles: list[Any] = []
        for i, (label, by_name) in enumerate(series.items()):
            values = list(by_name.values())
            middle = [place + (i + 0.5) * wide - 0.4 for place in range(len(names))]
            drawn = ax.bar(middle, values, 0.88 * wide, label=label, **area(shades[label]))
            said = [f"{value:.2g}" if value < 10 else f"{value:.0f}" for value in values]
            ax.bar_label(drawn, said, size=size, color=PALE)
            handles.append(drawn)
        ax.set_xticks(range(len(names)), [name.replace("_", "\n") for name in names])
        ax.set_ylabel(ylabel)
        ax.tick_params(axis="x", length=0)
        ticks(ax.yaxis, lambda value: f"{value:g}")
        legend(ax, handles)
        return ax


def stacked(
    measured: Mapping[str, Mapping[str, float]],
    predicted: Mapping[str, Mapping[str, float]] | None = None,
    ax: Axes | None = None,
    title: str = "Measured and predicted",
    ylabel: str = "",
    show: Callable[[float], str] = "{:g}".format,
    kinds: Mapping[str, str] | None = None,
) -> Axes:
    """A stacked bar a name, by what it is made of; black lines mark the formula.

    Both mappings go from a bar's name to {part: value}. The lines stand where the parts of the bar
    would end by the formula. show: how to write a value, such as `md.plot.human_time`. kinds: the
    parts from the bottom, and their colours; None: in their own order, by the palette.
    Lesson: mixed_parallelism.
    """
    predicted = predicted or {}
    bars = [*measured.values(), *predicted.values()]
    kinds = kinds or colors(dict.fromkeys(kind for parts in bars for kind in parts))
    highest = max((sum(parts.values()) for parts in bars), default=0)
    if not measured or not highest:
        raise ValueError("stacked: nothing measured to draw")
    with chart(ax, title, 8, 3.8) as ax:
        for x, (name, parts) in enumerate(measured.items()):
            foot: float = 0
            for kind, shade in kinds.items():
                if not (value := parts.get(kind, 0)):
                    continue
                ax.bar(x, value, 0.62, foot, label=kind, **area(shade))
                if value > 0.06 * highest and len(measured) < 7:
                    look: dict[str, Any] = {"ha": "center", "va": "center", "color": ink(shade)}
                    look["bbox"] = {"fc": shade, "ec": "none", "pad": 0}  # upon a formula's line
                    ax.text(x, foot + value / 2, show(value), size=8.5, **look)
                foot += value
            marks = list(accumulate(predicted.get(name, {}).get(kind, 0) for kind in kinds))
            said = show(foot)
            if name in predicted:
                ax.hlines(sorted(set(marks)), x - 0.37, x + 0.37, color="black", lw=1.8)
                said += f"\nformula: {show(marks[-1])}" if len(measured) < 7 else ""  # no room
            top = max(foot, *marks) + 0.02 * highest
            size = 9.5 if len(measured) < 5 else 8  # or neighbours would touch
            ax.text(x, top, said, ha="center", va="bottom", size=size)
        named = swatches(kinds)[::-1]
        if predicted:
            named += ax.plot([], [], color="black", lw=1.8, label="formula")
        ax.set_xticks(range(len(measured)), list(measured))
        ax.set_xlim(-0.6, len(measured) - 0.4)
        ax.set_ylim(0, 1.2 * highest)
        ax.set_ylabel(ylabel)
        ticks(ax.yaxis, show)
        legend(ax, named)
        return ax


def memory_by_rank(
    measured: Mapping[str, Mapping[str, int]],
    predicted: Mapping[str, Mapping[str, float]] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """A stacked bar of bytes a rank, by what they are; black lines mark the formula.

    Both mappings go from a bar's name to {category: bytes}: {"rank 0": tracker.after("backward")}.
    The lines stand where the parts of the bar would end by the formula, and its sum beside them.
    Lesson: ddp_in_practice.
    """
    predicted = predicted or {}
    kinds = kinds_of([*measured.values(), *predicted.values()])
    if not measured or not kinds:
        raise ValueError("memory_by_rank: nothing measured to draw")
    if strange := [name for name in predicted if name not in measured]:
        raise ValueError(f"memory_by_rank: {', '.join(strange)} is predicted and not measured")
    return stacked(measured, predicted, ax, "Memory by rank", "live bytes", human_bytes, kinds)


def breakdown(
    measured: Mapping[str, Mapping[str, float]],
    title: str = "Memory at the peak",
    predicted: Mapping[str, float] | None = None,
    show: Callable[[float], str] = human_bytes,
    aside: Collection[str] = (),
    ax: Axes | None = None,
) -> Axes:
    """A bar for each name, from top to bottom, of parts that stand one after another.

    measured: {name: {what the part is: its size}}; no parts leave the line empty. predicted:
    {name: size} of the whole bar, a black line. show: writes a size, such as `human_time`. aside:
    parts that the size written at the bar leaves out. The legend names the parts if there are
    several. Lesson: real_tools.
    """
    predicted = predicted or {}
    kinds = kinds_of(measured.values())
    if not kinds:
        raise ValueError("breakdown: nothing measured to draw")
    longest = max([sum(parts.values()) for parts in measured.values()] + list(predicted.values()))
    with chart(ax, title, 8, 0.9 + 0.32 * len(measured)) as ax:
        from matplotlib.ticker import MaxNLocator

        for y, (name, parts) in enumerate(measured.items()):
            left = 0.0
            for kind, shade in kinds.items():
                if width := parts.get(kind, 0):
                    ax.barh(y, width, 0.66, left, **area(shade))
                    left += width
            if name in predicted:
                ax.vlines(predicted[name], y - 0.42, y + 0.42, color="black", lw=1.8)
            counted = sum(size for kind, size in parts.items() if kind not in aside)
            end = max(left, predicted.get(name, 0)) + 0.015 * longest
            ax.text(end, y, show(counted) if parts else "–", va="center", size=8.5, color=PALE)
        if len(kinds) > 1:
            line = ax.plot([], [], color="black", lw=1.8, label="formula") if predicted else []
            legend(ax, [*swatches(kinds), *line])
        ax.set_xlim(0, 1.22 * longest)
        ax.set_yticks(range(len(measured)), list(measured))
        ax.set_ylim(len(measured) - 0.5, -0.5)
        ax.tick_params(axis="y", length=0)
        ticks(ax.xaxis, show)
        ax.xaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))
        return ax


def kinds_of(measured: Iterable[Mapping[str, float]]) -> dict[str, str]:
    """The colour of each category that has bytes anywhere: from the bottom, in the palette's order
    and then others in their own."""
    there = [name for parts in measured for name, nbytes in parts.items() if nbytes]
    return colors([name for name in MEMORY if name in there] + there)
