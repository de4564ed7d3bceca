"""What the pictures share: paper, boxes, arrows, and the palette of the course's charts.

Where `korean.json` has the words of a picture, it is drawn in Korean too, into `img/ko`.
"""

import json
import logging
import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from matplotlib.text import Text

from minidist.instruments.plot import RANKS
from minidist.instruments.plot.palette import (
    FAINT,
    INK,
    PALE,
    STYLE,
    area,
    darker,
    edge,
    ink,
    paler,
)

__all__ = [
    "EMPTY",
    "FIELD",
    "FAINT",
    "INK",
    "PALE",
    "RANKS",
    "SHEET",
    "WHOLE",
    "Axes",
    "arrow",
    "bar",
    "box",
    "darker",
    "ink",
    "name",
    "paler",
    "paper",
    "save",
    "stripes",
    "words",
]

HERE = Path(__file__).parent
EMPTY = "#DCE0E6"  # a place where nothing is
FIELD = "#DEE2E8"  # a part of a picture, behind what belongs together
SHEET = "#F7F8FA"  # a box
WHOLE = "#BDC2C9"  # what every rank has
FONT = "NanumGothic"  # of Debian's package fonts-nanum
# For each picture, English and Korean; # is a number. What is the same in both stands there, too.
KOREAN = json.loads((HERE / "korean.json").read_text())
plt.rcParams.update(STYLE)
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # its bold is called 600


def paper(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty sheet of so many inches; its coordinates are inches, from the lower left corner."""
    figure = plt.figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")
    return figure, axes


def save(figure: Figure, name: str) -> None:
    """Write `img/NAME.png`, the same bytes whenever it is drawn, and its Korean form."""
    write(figure, f"{name}.png")
    if name in KOREAN:
        translate(figure, KOREAN[name])
        try:
            findfont(FONT, fallback_to_default=False)
        except ValueError:
            print(f"img/ko/{name}.png stays: no font {FONT} (Debian: apt install fonts-nanum)")
        else:
            write(figure, f"ko/{name}.png")
    plt.close(figure)


def write(figure: Figure, name: str) -> None:
    (HERE / name).parent.mkdir(exist_ok=True)
    figure.savefig(HERE / name, dpi=150, metadata={"Software": None})
    print(f"img/{name}")


def translate(figure: Figure, words: dict[str, str]) -> None:
    """Say in Korean what the figure says. Raises KeyError for what `words` does not have."""
    for axes in figure.axes:
        if axes.axison:  # else these ticks, which are not shown, would make room for themselves
            labels = [label.get_text() for label in axes.get_yticklabels()]
            axes.set_yticks(axes.get_yticks(), [in_korean(label, words) for label in labels])
    for text in figure.findobj(Text):
        text.set_text(in_korean(text.get_text(), words))
        text.set_fontfamily([*plt.rcParams["font.sans-serif"], FONT])


def in_korean(text: str, words: dict[str, str]) -> str:
    key = re.sub(r"\d+", "#", text)
    if key not in words and not re.search("[a-z]{2}", text):
        return text
    numbers = iter(re.findall(r"\d+", text))
    return re.sub("#", lambda _: next(numbers), words[key])


def box(axes: Axes, x: float, y: float, width: float, height: float, **looks: object) -> None:
    """A box with round corners, from its lower left corner."""
    rim = edge(looks["facecolor"]) if "facecolor" in looks else PALE
    looks = {"facecolor": SHEET, "edgecolor": rim, "linewidth": 1.2} | looks
    shape = "round,pad=0,rounding_size=0.08"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, **looks))


def bar(axes: Axes, x: float, y: float, width: float, height: float, shade: str, **looks) -> None:
    """A filled rectangle, from its lower left corner."""
    axes.add_patch(Rectangle((x, y), width, height, **area(shade) | looks))


def words(axes: Axes, x: float, y: float, text: str, size: float = 9.5, **looks) -> None:
    """A text, centred upon a point."""
    looks = {"ha": "center", "va": "center", "linespacing": 1.4} | looks
    axes.text(x, y, text, fontsize=size, **looks)


def name(axes: Axes, x: float, y: float, rank: int, size: float) -> None:
    """The name of a rank, centred upon its colour."""
    looks = {"color": ink(RANKS[rank]), "fontsize": size, "fontweight": "bold"}
    axes.text(x, y, f"rank {rank}", ha="center", va="center", **looks)


def arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    bend: float = 0,
    **looks: object,
) -> None:
    """An arrow; `bend` is how far it swings out, as a part of its length."""
    looks = {"linewidth": 1.4, "arrowstyle": "-|>", "mutation_scale": 11} | looks
    looks["color"] = darker(looks.get("color", INK))
    curve = f"arc3,rad={bend}"
    axes.add_patch(
        FancyArrowPatch(start, end, connectionstyle=curve, shrinkA=0, shrinkB=0, **looks)
    )


def stripes(
    axes: Axes, x: float, y: float, size: float, ranks: list[int], text: str = "", new: bool = False
) -> None:
    """A piece of a vector: one stripe for each rank whose values are in it (none: an empty place).

    `new`, for what has just arrived, draws a heavy frame.
    """
    for count in range(len(ranks), 0, -1):  # each upon those before it, so that no gap is left
        width, shade = size * count / len(ranks), RANKS[ranks[count - 1]]
        axes.add_patch(Rectangle((x, y), width, size, facecolor=shade, linewidth=0))
    frame = {"edgecolor": INK, "linewidth": 2.2} if new else {"edgecolor": PALE, "linewidth": 0.6}
    axes.add_patch(Rectangle((x, y), size, size, facecolor="none", zorder=3 if new else 2, **frame))
    if text and len(ranks) == 1:
        shade = ink(RANKS[ranks[0]])
        axes.text(
            x + size / 2,
            y + size / 2,
            text,
            color=shade,
            ha="center",
            va="center",
            fontsize=9,
            zorder=4,
        )
