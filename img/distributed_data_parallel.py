"""The picture of the lesson distributed_data_parallel: ddp_buckets."""

from style import PALE, Axes, arrow, bar, box, darker, ink, paper, save

from minidist.instruments.plot import color

FORWARD, BACKWARD, TRAVEL = color("forward"), color("backward"), color("communication")
LAYER = 1.0  # inches of time that a layer takes in backward
START = 2.75  # where backward begins
BUCKETS = [("bucket 0", 2, 1.3), ("bucket 1", 1, 0.85), ("bucket 2", 1, 0.85)]  # layers, time


def block(axes: Axes, x: float, y: float, width: float, shade: str, text: str) -> None:
    box(axes, x + 0.02, y, width - 0.04, 0.42, facecolor=shade)
    axes.text(x + width / 2, y + 0.21, text, color=ink(shade), fontsize=9, ha="center", va="center")


def computation(axes: Axes, y: float) -> float:
    """Forward and backward of four layers; returns when backward is over."""
    block(axes, 1.25, y, START - 1.25, FORWARD, "forward")
    x = START
    for layer in (4, 3, 2, 1):
        block(axes, x, y, LAYER, BACKWARD, f"layer {layer}")
        x += LAYER
    return x


def title(axes: Axes, y: float, text: str, more: str) -> None:
    axes.text(0.15, y, text, fontsize=11, fontweight="bold", va="center")
    axes.text(1.25, y, more, fontsize=9.5, color=PALE, va="center")


def rows(axes: Axes, y: float) -> None:
    axes.text(0.15, y + 0.21, "compute", fontsize=9.5, va="center")
    axes.text(0.15, y - 0.31, "communicate", fontsize=9.5, va="center")


def ddp_buckets() -> None:
    """Communication after backward, and during it; what is in a bucket."""
    figure, axes = paper(10.2, 5.5)

    title(axes, 5.27, "wait", "first backward, then communication")
    rows(axes, 4.6)
    x = computation(axes, 4.6)
    for name, _, width in BUCKETS:
        block(axes, x, 4.08, width, TRAVEL, name)
        x += width
    late = x

    title(axes, 3.67, "overlap", "a bucket leaves as soon as its last gradient is there")
    rows(axes, 3.0)
    computation(axes, 3.0)
    ready, free = START, START
    for name, layers, width in BUCKETS:
        ready += layers * LAYER
        free = max(free, ready)
        arrow(axes, (ready, 3.0), (ready, 2.91), linewidth=1.2, mutation_scale=8)
        block(axes, free, 2.48, width, TRAVEL, name)
        free += width
    for x in (free, late):
        axes.plot([x, x], [2.3, 5.05], color=PALE, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    arrow(axes, (late, 2.69), (free, 2.69), linewidth=1.4, arrowstyle="<|-|>")
    axes.text((late + free) / 2, 2.8, "saved", fontsize=9.5, ha="center")
    arrow(axes, (1.25, 2.2), (9.95, 2.2), color=PALE, linewidth=1)
    axes.text(9.95, 2.05, "time", fontsize=9.5, color=PALE, ha="right", va="top")

    title(axes, 1.72, "bucket 0", "one flat tensor; the gradients are views of it")
    x, shade = 1.25, color("gradients")
    for number in range(4):
        name = f"layer {4 - number // 2} {('bias', 'weight')[number % 2]}"
        width = (1.15, 2.9)[number % 2]
        bar(axes, x, 0.2, width, 0.42, shade)
        box(axes, x + width / 2 - 0.55, 1.0, 1.1, 0.36, edgecolor=darker(shade), linewidth=1.6)
        axes.text(x + width / 2, 1.18, name, fontsize=8.5, ha="center", va="center")
        arrow(axes, (x + width / 2, 0.99), (x + width / 2, 0.63), linewidth=1.2, mutation_scale=9)
        x += width
    axes.text(0.15, 1.18, ".grad of", fontsize=9.5, va="center")
    axes.text(0.15, 0.41, "memory", fontsize=9.5, va="center")
    save(figure, "ddp_buckets")


if __name__ == "__main__":
    ddp_buckets()
