"""The picture of the lesson mixed_parallelism: mixed_model_parallel."""

from style import EMPTY, FIELD, INK, PALE, RANKS, Axes, arrow, bar, box, darker, name, paper, save

from minidist.instruments.plot import color

LAYERS, WIDE, HIGH = 4, 1.75, 1.4  # of the model; inches of a rank's box
SAYS = {
    "tensor": "sums of activations,\nfour a block",
    "pipeline": "activations, and\ntheir gradients back",
    "data": "gradients, once a step,\nfrom node to node",
}


def corner(d: int, p: int, t: int) -> tuple[float, float]:
    """The lower left corner of the box of a rank."""
    return 0.45 + 4.7 * d + 2.25 * p, 2.95 - 1.85 * t


def rank_box(axes: Axes, d: int, p: int, t: int) -> None:
    """A rank, and of the model, layers × features, what it holds."""
    rank, (x, y) = 4 * d + 2 * p + t, corner(d, p, t)
    shade = RANKS[rank]
    box(axes, x, y, WIDE, HIGH, edgecolor=darker(shade), linewidth=2)
    box(axes, x, y + HIGH - 0.34, WIDE, 0.34, facecolor=shade, edgecolor=darker(shade))
    name(axes, x + WIDE / 2, y + HIGH - 0.17, rank, 10.5)
    size = 0.21
    for layer in range(LAYERS):
        for half in range(2):
            mine = layer // 2 == p and half == t
            left = x + (WIDE - LAYERS * 1.15 * size) / 2 + layer * 1.15 * size
            bar(axes, left, y + 0.79 - size * half, size, size, shade if mine else EMPTY)
    held = f"layers {2 * p}, {2 * p + 1}\n{('first', 'second')[t]} half of features"
    middle = {"ha": "center", "va": "center", "linespacing": 1.4}
    axes.text(x + WIDE / 2, y + 0.29, held, fontsize=8.5, **middle)


def mixed_model_parallel() -> None:
    """Eight ranks on a mesh of 2 × 2 × 2, on two nodes: what each holds, who talks to whom."""
    figure, axes = paper(9.6, 5.6)
    title = "one model of 4 layers on 2 × 2 × 2 ranks, on two nodes: rank = 4d + 2p + t"
    axes.text(0.25, 5.25, title, fontsize=11.5, fontweight="bold")
    for d in range(2):
        box(axes, 0.25 + 4.7 * d, 0.93, 4.4, 3.59, facecolor=FIELD, edgecolor=INK)
        side = {"ha": ("left", "right")[d], "fontweight": "bold", "fontsize": 10.5}
        axes.text(0.3 + 9 * d, 4.62, f"node {d}", **side)
        middle = {"ha": "center", "va": "center", "fontsize": 10}
        axes.text(2.45 + 4.7 * d, 2.74, f"replica {d}", color=PALE, **middle)
        for p in range(2):
            for t in range(2):
                rank_box(axes, d, p, t)
    for d in range(2):
        for i in range(2):
            x, y = corner(d, i, 0)
            looks = {"color": color("tensor"), "linewidth": 4, "mutation_scale": 14}
            line(axes, (x + WIDE / 2, y - 0.03), (x + WIDE / 2, y - 0.42), **looks)
            x, y = corner(d, 0, i)
            looks = {"color": color("pipeline"), "linewidth": 2.6, "mutation_scale": 12}
            line(axes, (x + WIDE + 0.03, y + 0.7), (x + WIDE + 0.47, y + 0.7), **looks)
    for p in range(2):
        looks = {"color": color("data"), "linewidth": 1.8}
        for t, edge, bend in ((0, HIGH + 0.04, -0.17), (1, -0.04, 0.17)):
            (x, y), (far, _) = corner(0, p, t), corner(1, p, t)
            start, end = (x + WIDE / 2, y + edge), (far + WIDE / 2, y + edge)
            line(axes, start, end, bend, **looks)
    for i, (axis, says) in enumerate(SAYS.items()):
        x, width = 0.75 + 3.0 * i, {"tensor": 5, "pipeline": 3.2, "data": 2.2}[axis]
        axes.plot([x, x + 0.4], [0.32, 0.32], color=darker(color(axis)), linewidth=width)
        axes.text(x + 0.52, 0.32, f"{axis}:", fontsize=9.5, va="center", fontweight="bold")
        axes.text(x + 0.68 + 0.09 * len(axis), 0.32, says, fontsize=9, va="center", linespacing=1.3)
    save(figure, "mixed_model_parallel")


def line(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    bend: float = 0,
    **looks: object,
) -> None:
    """An arrow with two heads."""
    arrow(axes, start, end, bend, arrowstyle="<|-|>", **looks)


if __name__ == "__main__":
    mixed_model_parallel()
