"""The chart: bars from left to right, each the sum of its parts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from minidist.instruments.plot.bar_charts import handles, kinds_of
from minidist.instruments.plot.frame import chart, legend, ticks
from minidist.instruments.plot.palette import PALE, human_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
    several. Lesson: zero.
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
                ax.barh(y, parts.get(kind, 0), 0.66, left, color=shade)
                left += parts.get(kind, 0)
            if name in predicted:
                ax.vlines(predicted[name], y - 0.42, y + 0.42, color="black", lw=1.8)
            counted = sum(size for kind, size in parts.items() if kind not in aside)
            end = max(left, predicted.get(name, 0)) + 0.015 * longest
            ax.text(end, y, show(counted) if parts else "–", va="center", size=8.5, color=PALE)
        if len(kinds) > 1:
            line = ax.plot([], [], color="black", lw=1.8, label="formula") if predicted else []
            legend(ax, [*handles(kinds)[::-1], *line])
        ax.set_xlim(0, 1.22 * longest)
        ax.set_yticks(range(len(measured)), list(measured))
        ax.set_ylim(len(measured) - 0.5, -0.5)
        ax.tick_params(axis="y", length=0)
        ticks(ax.xaxis, show)
        ax.xaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))
        return ax
