"""What a picture shows, in words: its alternative text, for a reader who does not see it.

It is kept in the metadata of an output, where IPython and nbconvert's page "classic" have it.
JupyterLab 4.6 does not read it yet.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

MOST = 24  # texts in a chart; more are a table that nobody listens to


def describe(figure: Figure) -> str:
    """Each chart of the figure: kind, title, axes, what its colours stand for, and what is written
    in it."""
    return " ".join(_chart(ax) for ax in figure.axes if ax.get_visible()) or "An empty figure."


def _chart(ax: Axes) -> str:
    titles = [_words(ax.get_title(side)) for side in ("left", "center", "right")]
    said = f"{_kind(ax)}: {' '.join(filter(None, titles)) or 'no title'}."
    for name, axis in (("across", ax.xaxis), ("up", ax.yaxis)):
        if found := " ".join(filter(None, [_words(axis.get_label_text()), _range(axis)])):
            said += f" {name.capitalize()}: {found}."
    legend = ax.get_legend()
    if named := [_words(each.get_text()) for each in (legend.get_texts() if legend else [])]:
        said += f" Shown: {', '.join(named)}."
    written = [_words(text.get_text()) for text in ax.texts if text.get_text()]
    if 0 < len(written) <= MOST:
        said += f" Written in it: {', '.join(written)}."
    return said


def _range(axis: Axis) -> str:
    """The first and last tick that are seen; all of them where they are names."""
    axis.get_ticklabels()  # so that the ticks have their names
    low, high = sorted(axis.get_view_interval())
    seen = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    ticks = [words for tick in seen if (words := _words(tick.label1.get_text()))]
    if axis.get_inverted():
        ticks = ticks[::-1]
    if any(re.search(r"\d", tick) is None for tick in ticks):
        return ", ".join(ticks)
    return f"{ticks[0]} to {ticks[-1]}" if len(ticks) > 1 else "".join(ticks)


def _kind(ax: Axes) -> str:
    if ax.get_label() == "<colorbar>":
        return "Colours"
    if ax.images:
        return "Heat map"
    if ax.containers or ax.patches:
        return "Bars"
    return "Lines" if ax.lines else "Chart"


def _words(text: str) -> str:
    """On one line, without mathematical marks."""
    return " ".join(re.sub(r"\$|\\mathdefault|[{}]", "", text).split())
