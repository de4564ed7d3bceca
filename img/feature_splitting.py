"""The picture of the lesson feature_splitting: feature_split_model_parallel."""

from matplotlib.patches import Rectangle
from style import INK, PALE, RANKS, Axes, arrow, box, ink, paper, save

from minidist.plot import color

WHOLE = "#CFCFCF"  # what every rank has
PARTS = 4
WIDE, NARROW, ROWS = 1.2, 0.62, 0.5  # hidden features; features; rows of the batch


def matrix(axes: Axes, x: float, y: float, width: float, height: float, cut: str, text: str):
    """A matrix, from its left side and its middle: whole, cut, or a summand of each rank."""
    low, edge = y - height / 2, {"edgecolor": "white", "linewidth": 0.9}
    if cut == "summands":
        for rank in reversed(range(PARTS)):
            shift = 0.09 * rank
            place = (x + shift, low + shift)
            axes.add_patch(Rectangle(place, width, height, facecolor=RANKS[rank], **edge))
        shade = RANKS[0]
    elif cut == "rows":
        for rank in range(PARTS):
            place = (x, low + (PARTS - 1 - rank) * height / PARTS)
            axes.add_patch(Rectangle(place, width, height / PARTS, facecolor=RANKS[rank], **edge))
    else:
        shades = [WHOLE] if cut == "whole" else RANKS[:PARTS]
        for i, shade in enumerate(shades):
            place = (x + i * width / len(shades), low)
            axes.add_patch(Rectangle(place, width / len(shades), height, facecolor=shade, **edge))
    middle = {"ha": "center", "va": "top", "fontsize": 10.5, "fontweight": "bold"}
    axes.text(x + width / 2, low - 0.07, text, **middle)


def sign(axes: Axes, x: float, y: float, text: str) -> None:
    axes.text(x, y, text, ha="center", va="center", fontsize=13)


def message(axes: Axes, start: float, end: float, y: float, text: str) -> None:
    """A collective, from what it takes to what it gives."""
    look = {"color": color("tensor"), "linewidth": 4, "mutation_scale": 15}
    arrow(axes, (start, y), (end, y), **look)
    axes.text((start + end) / 2, y + 0.16, text, ha="center", fontsize=9)


def panel(axes: Axes, low: float, title: str, says: str) -> float:
    """The grey ground of one way. Returns the height of the middle of its matrices."""
    box(axes, 0.15, low, 9.3, 2.1, facecolor="#F6F6F6", edgecolor="none")
    axes.text(0.35, low + 1.78, title, fontsize=11.5, fontweight="bold")
    axes.text(0.5 + 0.105 * len(title), low + 1.785, says, fontsize=9.5, color=PALE)
    y = low + 0.9
    matrix(axes, 0.4, y, NARROW, ROWS, "whole", "x")
    sign(axes, 1.17, y, "×")
    matrix(axes, 1.32, y, WIDE, NARROW, "columns", "A")
    sign(axes, 2.68, y, "=")
    matrix(axes, 2.83, y, WIDE, ROWS, "columns", "h = relu(xA)")
    return y


def feature_split_model_parallel() -> None:
    """Two layers, h = relu(x A) and y = h B, on four ranks, in two ways."""
    figure, axes = paper(9.6, 5.25)
    y = panel(axes, 2.98, "only columns", "each rank computes its features, all meet after a layer")
    message(axes, 4.12, 4.87, y, "all_gather")
    matrix(axes, 4.95, y, WIDE, ROWS, "whole", "h")
    sign(axes, 6.3, y, "×")
    matrix(axes, 6.45, y, NARROW, WIDE, "columns", "B")
    sign(axes, 7.22, y, "=")
    matrix(axes, 7.37, y, NARROW, ROWS, "columns", "y")
    message(axes, 8.05, 8.68, y, "all_gather")
    matrix(axes, 8.74, y, NARROW, ROWS, "whole", "y")

    y = panel(axes, 0.73, "columns, then rows", "what a rank has computed is what it needs next")
    sign(axes, 4.25, y, "×")
    matrix(axes, 4.47, y, NARROW, WIDE, "rows", "B")
    sign(axes, 5.36, y, "=")
    matrix(axes, 5.62, y, NARROW, ROWS, "summands", "a summand each")
    message(axes, 6.75, 8.5, y, "all_reduce")
    matrix(axes, 8.74, y, NARROW, ROWS, "whole", "y")

    for rank in range(PARTS):
        box(axes, 0.35 + 1.2 * rank, 0.2, 1.05, 0.33, facecolor=RANKS[rank], edgecolor="none")
        look = {"color": ink(RANKS[rank]), "fontweight": "bold", "fontsize": 9.5}
        axes.text(0.875 + 1.2 * rank, 0.365, f"rank {rank}", ha="center", va="center", **look)
    box(axes, 5.15, 0.2, 1.05, 0.33, facecolor=WHOLE, edgecolor="none")
    axes.text(5.675, 0.365, "every rank", ha="center", va="center", fontsize=9.5, color=INK)
    axes.plot([6.65, 7.05], [0.365, 0.365], color=color("tensor"), linewidth=4)
    axes.text(7.15, 0.365, "all ranks communicate", fontsize=9.5, va="center")
    save(figure, "feature_split_model_parallel")


if __name__ == "__main__":
    feature_split_model_parallel()
