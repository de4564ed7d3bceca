"""The picture of the lesson sequence_parallel: sequence_layout."""

from style import FIELD, PALE, RANKS, WHOLE, Axes, arrow, bar, box, darker, ink, paper, save, words

from minidist.instruments.plot import color

PARTS = 4
NARROW, WIDE, TALL = 0.72, 1.5, 1.0  # C features, 4 C features, T tokens


def activation(axes: Axes, x: float, y: float, width: float, cut: str, text: str) -> None:
    """An activation (T, C), from its left side and its middle: whole, cut, or a summand each."""
    low, ranks = y - TALL / 2, range(PARTS)
    if cut == "whole":
        bar(axes, x, low, width, TALL, WHOLE)
    elif cut == "tokens":
        for rank in ranks:
            place = low + (PARTS - 1 - rank) * TALL / PARTS
            bar(axes, x, place, width, TALL / PARTS, RANKS[rank])
    elif cut == "features":
        for rank in ranks:
            bar(axes, x + rank * width / PARTS, low, width / PARTS, TALL, RANKS[rank])
    else:
        for rank in reversed(ranks):
            bar(axes, x + 0.08 * rank, low + 0.08 * rank, width, TALL, RANKS[rank])
    words(axes, x + width / 2, low - 0.2, text, fontweight="bold", va="baseline")


def message(axes: Axes, start: float, end: float, y: float, forward: str, backward: str) -> None:
    """What travels here: forward above the arrow, backward below it."""
    shade = color("tensor") if forward else PALE
    look = {"color": shade, "linewidth": 4 if forward else 1.4, "mutation_scale": 15}
    arrow(axes, (start, y), (end, y), **look)
    words(axes, (start + end) / 2, y + 0.2, forward or "nothing sent", 9)
    words(axes, (start + end) / 2, y - 0.24, f"backward:\n{backward}", 8, color=PALE, va="top")


def panel(axes: Axes, low: float, title: str, ends: str, first: tuple[str, str], last: tuple):
    """One way: the cut at both ends, and what is sent at the entrance and at the exit."""
    box(axes, 0.15, low, 10.3, 2.15, facecolor=FIELD, edgecolor="none")
    axes.text(0.35, low + 1.84, title, fontsize=11.5, fontweight="bold")
    y = low + 0.95
    activation(axes, 0.62, y, NARROW, ends, "norm(x)")
    axes.text(0.5, y, "T tokens", rotation=90, fontsize=8, va="center", ha="right", color=PALE)
    words(axes, 0.62 + NARROW / 2, y + TALL / 2 + 0.12, "C features", 8, color=PALE)
    message(axes, 1.5, 2.7, y, *first)
    activation(axes, 2.85, y, NARROW, "whole", "all tokens")
    words(axes, 3.8, y, "× A", 10.5)
    activation(axes, 4.05, y, WIDE, "features", "hidden")
    words(axes, 5.82, y, "× B", 10.5)
    activation(axes, 6.1, y, NARROW, "summands", "a summand each")
    message(axes, 7.25, 8.6, y, *last)
    activation(axes, 8.75, y, NARROW, ends, "dropout, + x")


def sequence_layout() -> None:
    """Which part of an activation each of four ranks holds, in the two kinds of region."""
    figure, axes = paper(10.6, 5.75)
    ends, middle = "between split layers", "split layers"
    for x, wide, text in (0.15, 1.9, ends), (2.3, 4.75, middle), (8.5, 1.95, ends):
        words(axes, x + wide / 2, 5.51, text, 10, color=PALE, va="baseline")
        axes.plot([x, x + wide], [5.4, 5.4], color=PALE, linewidth=1)
    panel(axes, 3.1, "tensor parallel", "whole", ("", "all_reduce"), ("all_reduce", "nothing sent"))
    ends = ("all_gather", "reduce_scatter"), ("reduce_scatter", "all_gather")
    panel(axes, 0.75, "and sequence parallel", "tokens", *ends)

    for rank in range(PARTS):
        box(axes, 0.35 + 1.2 * rank, 0.22, 1.05, 0.33, facecolor=RANKS[rank])
        look = {"color": ink(RANKS[rank]), "fontweight": "bold"}
        words(axes, 0.875 + 1.2 * rank, 0.385, f"rank {rank}", **look)
    box(axes, 5.15, 0.22, 1.05, 0.33, facecolor=WHOLE)
    words(axes, 5.675, 0.385, "every rank")
    axes.plot([6.65, 7.05], [0.385, 0.385], color=darker(color("tensor")), linewidth=4)
    axes.text(7.15, 0.385, "all ranks communicate", fontsize=9.5, va="center")
    save(figure, "sequence_layout")


if __name__ == "__main__":
    sequence_layout()
