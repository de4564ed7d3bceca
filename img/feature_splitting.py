"""The pictures: feature_split_model_parallel, copy_and_sum, attention_by_heads."""

from style import (
    FIELD,
    INK,
    PALE,
    RANKS,
    WHOLE,
    Axes,
    arrow,
    bar,
    box,
    darker,
    ink,
    name,
    paper,
    save,
    words,
)

from minidist.instruments.plot import color

PARTS = 4
WIDE, NARROW, ROWS = 1.2, 0.62, 0.5  # hidden features; features; rows of the batch


def matrix(axes: Axes, x: float, y: float, width: float, height: float, cut: str, text: str):
    """A matrix, from its left side and its middle: whole, cut, or partial."""
    low = y - height / 2
    if cut == "partial":
        for rank in reversed(range(PARTS)):
            shift = 0.09 * rank
            bar(axes, x + shift, low + shift, width, height, RANKS[rank])
        shade = RANKS[0]
    elif cut == "rows":
        for rank in range(PARTS):
            bottom = low + (PARTS - 1 - rank) * height / PARTS
            bar(axes, x, bottom, width, height / PARTS, RANKS[rank])
    else:
        shades = [WHOLE] if cut == "whole" else RANKS[:PARTS]
        for i, shade in enumerate(shades):
            bar(axes, x + i * width / len(shades), low, width / len(shades), height, shade)
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
    box(axes, 0.15, low, 9.3, 2.1, facecolor=FIELD, edgecolor="none")
    name = axes.text(0.35, low + 1.78, title, fontsize=11.5, fontweight="bold", va="baseline")
    beside = {"xycoords": (name, axes.transData), "xytext": (14, 0), "textcoords": "offset points"}
    axes.annotate(says, (1, low + 1.785), fontsize=9.5, color=PALE, va="baseline", **beside)
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
    matrix(axes, 5.62, y, NARROW, ROWS, "partial", "y, partial")
    message(axes, 6.75, 8.5, y, "all_reduce")
    matrix(axes, 8.74, y, NARROW, ROWS, "whole", "y")

    for rank in range(PARTS):
        box(axes, 0.35 + 1.2 * rank, 0.2, 1.05, 0.33, facecolor=RANKS[rank])
        look = {"color": ink(RANKS[rank]), "fontweight": "bold", "fontsize": 9.5}
        axes.text(0.875 + 1.2 * rank, 0.365, f"rank {rank}", ha="center", va="center", **look)
    box(axes, 5.15, 0.2, 1.05, 0.33, facecolor=WHOLE)
    axes.text(5.675, 0.365, "every rank", ha="center", va="center", fontsize=9.5, color=INK)
    axes.plot([6.65, 7.05], [0.365, 0.365], color=darker(color("tensor")), linewidth=4)
    axes.text(7.15, 0.365, "all ranks communicate", fontsize=9.5, va="center")
    save(figure, "feature_split_model_parallel")


Place = tuple[str, str, float]  # a state, what rank r has, and the width of it


def lanes(axes: Axes, low: float, title: str, places: list[Place]) -> None:
    """One direction through a pair of layers, two ranks above each other."""
    box(axes, 0.15, low, 9.9, 2.0, facecolor=FIELD, edgecolor="none")
    axes.text(0.35, low + 1.68, title, fontsize=11.5, fontweight="bold")
    for number, (state, text, width) in enumerate(places):
        middle = 1.65 + 1.9 * number
        words(axes, middle, low + 0.2, state, 9.5, fontweight="bold")
        for rank in range(2):
            shade = RANKS[rank] if "r" in text else WHOLE
            y = low + 0.98 - 0.54 * rank
            bar(axes, middle - width / 2, y, width, 0.42, shade)
            words(axes, middle, y + 0.21, text.replace("r", str(rank)), 10, color=ink(shade))
    for rank in range(2):
        y = low + 1.19 - 0.54 * rank
        box(axes, 0.26, y - 0.15, 0.72, 0.3, facecolor=RANKS[rank])
        name(axes, 0.62, y, rank, 9)


def steps(axes: Axes, low: float, texts: list[str], back: bool) -> None:
    """What leads from each place to the next: on each rank by itself, or where all meet."""
    for number, text in enumerate(texts):
        left, right = 2.2 + 1.9 * number, 3.0 + 1.9 * number
        ends, middle = (right, left) if back else (left, right), (left + right) / 2
        met = "all_reduce" in text
        shade = darker(color("tensor")) if met else INK
        look = {"color": shade, "linewidth": 3.2 if met else 1.4, "mutation_scale": 13}
        for y in (low + 1.19, low + 0.65):
            arrow(axes, (ends[0], y), (ends[1], y), **look)
        if met:
            axes.plot([middle] * 2, [low + 0.65, low + 1.19], color=shade, linewidth=3.2)
        words(axes, middle, low + 1.57, text, 9)


def copy_and_sum() -> None:
    """A pair of layers between Copy and Sum, on two ranks, forward and backward."""
    figure, axes = paper(10.2, 4.75)
    places = [("replicated", "x", 0.9), ("copied", "x", 0.9), ("sharded", "hr", 0.6)]
    lanes(axes, 2.65, "forward", [*places, ("partial", "yr", 0.9), ("replicated", "y", 0.9)])
    steps(axes, 2.65, ["Copy:\nidentity", "columns,\nReLU", "rows", "Sum:\nall_reduce"], False)
    places = [("replicated", "∂x", 0.9), ("partial", "∂xr", 0.9), ("sharded", "∂hr", 0.6)]
    lanes(axes, 0.5, "backward", [*places, ("copied", "∂y", 0.9), ("replicated", "∂y", 0.9)])
    steps(axes, 0.5, ["Copy:\nall_reduce", "ReLU,\ncolumns", "rows", "Sum:\nidentity"], True)
    axes.plot([0.35, 0.75], [0.22, 0.22], color=darker(color("tensor")), linewidth=4)
    axes.text(0.85, 0.22, "the ranks communicate", fontsize=9.5, va="center")
    bar(axes, 3.2, 0.1, 0.4, 0.24, WHOLE)
    axes.text(3.7, 0.22, "the same numbers on every rank", fontsize=9.5, va="center")
    axes.text(
        6.6, 0.22, "∂x: the gradient of the loss with respect to x", fontsize=9.5, va="center"
    )
    save(figure, "copy_and_sum")


def attention_by_heads() -> None:
    """Attention with four heads on four ranks."""
    figure, axes = paper(9.6, 3.3)
    box(axes, 0.15, 0.15, 9.3, 3.0, facecolor=FIELD, edgecolor="none")
    y, bold = 1.65, {"fontweight": "bold"}
    matrix(axes, 0.4, y, NARROW, ROWS, "whole", "x")
    sign(axes, 1.2, y, "×")
    for part, text in enumerate(("queries", "keys", "values")):
        matrix(axes, 1.4 + 0.98 * part, y, 0.92, NARROW, "columns", "")
        words(axes, 1.86 + 0.98 * part, y + 0.5, text, 9)
    words(axes, 2.84, y - 0.47, "qkv, by columns", 10.5, **bold)
    for rank in range(PARTS):
        low = 2.73 - 0.72 * rank
        arrow(axes, (4.36, y), (4.8, low), color=RANKS[rank], linewidth=1.8)
        box(axes, 4.85, low - 0.27, 1.3, 0.54, facecolor=RANKS[rank])
        said = f"rank {rank}\nattention of head {rank}"
        words(axes, 5.5, low, said, 8, color=ink(RANKS[rank]), linespacing=1.3)
        arrow(axes, (6.2, low), (6.62, y + 0.36 - 0.24 * rank), color=RANKS[rank], linewidth=1.8)
    matrix(axes, 6.7, y, NARROW, 1.0, "rows", "")
    words(axes, 7.3, y + 0.7, "out, by rows", 10.5, **bold)
    sign(axes, 7.5, y, "=")
    matrix(axes, 7.66, y, 0.42, 0.42, "partial", "partial")
    message(axes, 8.45, 8.93, y, "")
    words(axes, 8.75, y - 0.5, "all_reduce", 9)
    matrix(axes, 8.98, y, 0.42, 0.42, "whole", "y")
    save(figure, "attention_by_heads")


if __name__ == "__main__":
    feature_split_model_parallel()
    copy_and_sum()
    attention_by_heads()
