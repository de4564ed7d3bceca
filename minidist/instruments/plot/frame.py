"""What the charts share: axes to draw in, a legend beside them, ticks at round values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from minidist.instruments.plot.palette import FAINT, GROUND, INK, PALE, area, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@contextmanager
def chart(
    ax: Axes | None, title: str, width: float, height: float, pad: float = 10
) -> Iterator[Axes]:
    """The axes to draw in: `ax`, or those of a new figure of `width` × `height` inches. The title
    stands `pad` points above them."""
    with style() as plt:
        if ax is None:
            ax = plt.subplots(figsize=(width, height), layout="constrained")[1]
        for paper in ax, ax.figure:  # they may have been made without the course's style
            paper.set_facecolor(GROUND)
        ax.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=pad)
        ax.tick_params(which="both", labelsize=9.5, length=3, color=PALE, labelcolor=INK)
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(PALE)
        ax.set_axisbelow(True)
        yield ax


def legend(ax: Axes, handles: Sequence[Any]) -> None:
    """At the right of the axes, where it hides nothing."""
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.02))


def swatches(shades: Mapping[str, str]) -> list[Any]:
    """For the legend: an area of each colour, and its name."""
    from matplotlib.patches import Patch

    return [Patch(**area(shade), label=name) for name, shade in shades.items()]


def ticks(axis: Any, show: Any, grid: str | None = FAINT, whole: bool = False) -> None:
    """Ticks at few round values, written by `show`, on a linear or a logarithmic axis."""
    from matplotlib.ticker import FuncFormatter, Locator, LogLocator, MaxNLocator, NullLocator

    if axis.get_scale() == "log":
        low, high = axis.get_view_interval()
        subs = (1,) if high > 300 * low else (1, 2, 5) if high > 10 * low else (1, 1.5, 2, 3, 5, 7)
        locator: Locator = LogLocator(10, subs)
        if sum(low <= tick <= high for tick in locator.tick_values(low, high)) < 3:
            locator = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10])  # such as 100 to 150 ms
        axis.set_major_locator(locator)
        axis.set_minor_locator(NullLocator())
    else:
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10], integer=whole))
    axis.set_major_formatter(FuncFormatter(lambda value, _: show(value)))
    if grid:
        axis.grid(True, color=grid, linewidth=0.8)
