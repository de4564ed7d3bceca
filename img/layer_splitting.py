"""The pictures: model_parallelism, layer_split_model_parallel, autograd_across_ranks, and
pipeline_schedules."""

from style import (
    FIELD,
    INK,
    PALE,
    RANKS,
    Axes,
    arrow,
    box,
    darker,
    ink,
    name,
    paper,
    plt,
    save,
    words,
)

from minidist.instruments.plot import color, schedule
from minidist.pipeline import SCHEDULES, simulate

FORWARD, BACKWARD = color("forward"), color("backward")


def layer(axes: Axes, x: float, y: float, shade: str, text: str, width=0.9, height=1.5) -> None:
    box(axes, x, y, width, height, facecolor=shade, linewidth=1.5)
    middle = {"ha": "center", "va": "center", "color": ink(shade), "fontsize": 9.5}
    axes.text(x + width / 2, y + height / 2, text, **middle)


def model_parallelism() -> None:
    """Two ways to cut one model."""
    figure, axes = paper(9.6, 4.3)
    for left, title, says, lesson in (
        (0.25, "by layers", "a rank has some of the layers, whole", "layer splitting"),
        (5.05, "by features", "a rank has a part of every layer", "feature splitting"),
    ):
        box(axes, left, 0.15, 4.3, 4.0, facecolor=FIELD, edgecolor="none")
        axes.text(left + 0.2, 3.8, f"{title}: {lesson}", fontsize=11.5, fontweight="bold")
        axes.text(left + 0.2, 3.53, says, fontsize=9.5, color=PALE)
    for number in range(4):
        x = 0.45 + 1.0 * number
        layer(axes, x, 1.55, RANKS[number // 2], f"layer {number}", 0.8)
        if number:
            arrow(axes, (x - 0.2, 2.3), (x, 2.3), linewidth=1.8)
    for rank in range(2):
        label(axes, 1.35 + 2.0 * rank, 1.25, rank)
    axes.plot([2.35, 2.35], [1.1, 3.3], color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
    words(axes, 2.4, 0.65, "activations cross the cut forward,\ntheir gradients backward")
    for rank in range(2):
        label(axes, 5.68, 2.71 - 0.84 * rank, rank)
    for number in range(4):
        x = 6.22 + 0.79 * number
        for rank in range(2):
            shade = RANKS[rank]
            layer(axes, x, 2.37 - 0.84 * rank, shade, f"layer\n{number}", 0.56, 0.7)
        if number:
            for start in (1.88, 2.72):
                for end in (1.88, 2.72):
                    looks = {"linewidth": 1.1, "mutation_scale": 7}
                    arrow(axes, (x - 0.22, start), (x - 0.01, end), **looks)
    axes.plot([5.25, 9.2], [2.3, 2.3], color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
    words(axes, 7.2, 0.65, "features of all ranks meet\nbetween layers: a collective")
    save(figure, "model_parallelism")


def label(axes: Axes, x: float, y: float, rank: int) -> None:
    box(axes, x - 0.4, y - 0.16, 0.8, 0.32, facecolor=RANKS[rank], edgecolor=darker(RANKS[rank]))
    name(axes, x, y, rank, 9.5)


def layer_split_model_parallel() -> None:
    """Eight layers on four ranks, and what goes over each boundary."""
    figure, axes = paper(9.6, 3.5)
    axes.text(0.2, 3.2, "one model of 8 layers", fontsize=11.5, fontweight="bold")
    for number in range(8):
        layer(axes, 0.9 + 0.98 * number, 2.55, RANKS[number // 2], f"layer {number}", 0.94, 0.4)
    for rank in range(4):
        x, shade = 0.95 + 2.13 * rank, RANKS[rank]
        box(axes, x, 0.75, 1.5, 1.3, edgecolor=darker(shade), linewidth=2)
        box(axes, x, 1.67, 1.5, 0.38, facecolor=shade, edgecolor=darker(shade))
        name(axes, x + 0.75, 1.86, rank, 10.5)
        held = f"layers {2 * rank}, {2 * rank + 1}\ntheir gradients\noptimizer states"
        axes.text(x + 0.75, 1.2, held, fontsize=9, ha="center", va="center", linespacing=1.5)
        middle = 0.9 + 0.98 * (2 * rank + 1)
        looks = {"arrowstyle": "-", "color": PALE, "linewidth": 1, "linestyle": (0, (3, 2))}
        arrow(axes, (middle - 0.02, 2.52), (x + 0.75, 2.08), **looks)
        if rank:
            arrow(axes, (x - 0.6, 1.5), (x - 0.04, 1.5), color=FORWARD, linewidth=2.4)
            arrow(axes, (x - 0.04, 1.1), (x - 0.6, 1.1), color=BACKWARD, linewidth=2.4)
    axes.text(0.6, 1.5, "batch", fontsize=9.5, ha="center", va="center")
    arrow(axes, (0.3, 1.3), (0.9, 1.3), color=FORWARD, linewidth=2.4)
    axes.text(9.13, 1.5, "loss", fontsize=9.5, ha="center", va="center")
    arrow(axes, (8.88, 1.3), (9.42, 1.3), color=FORWARD, linewidth=2.4)
    for x, shade, text in (
        (2.0, FORWARD, "activations go to the next stage"),
        (5.4, BACKWARD, "their gradients come back"),
    ):
        axes.plot([x, x + 0.4], [0.35, 0.35], color=darker(shade), linewidth=3)
        axes.text(x + 0.5, 0.35, text, fontsize=9.5, va="center")
    save(figure, "layer_split_model_parallel")


def autograd_across_ranks() -> None:
    """Autograd's graph ends at the edge of a rank; two messages join the halves."""
    figure, axes = paper(9.6, 3.0)
    looks = {"linewidth": 2.2}
    for rank, left in enumerate((0.25, 5.45)):
        box(axes, left, 0.35, 3.9, 2.3, edgecolor=darker(RANKS[rank]), linewidth=2)
        box(axes, left, 2.3, 3.9, 0.35, facecolor=RANKS[rank], edgecolor=darker(RANKS[rank]))
        name(axes, left + 1.95, 2.48, rank, 10.5)
    steps = (
        (1.75, FORWARD, ("images", "half", "y"), ("x", "half", "loss")),
        (0.85, BACKWARD, ("", "half", "gradient"), ("x.grad", "half", "1")),
    )
    for y, shade, *ranks in steps:
        for left, names in zip((0.25, 5.45), ranks, strict=True):
            places = [left + 0.65 + 1.3 * number for number in range(3)]
            for x, text in zip(places, names, strict=True):
                words(axes, x, y, text, 10)
            for x, named in zip(places[1:], names, strict=False):
                ends = (x - 0.85, y), (x - 0.5, y)
                if named:  # images need no gradient
                    arrow(axes, *(ends if shade == FORWARD else ends[::-1]), color=shade, **looks)
    for left in (0.25, 5.45):
        words(axes, left + 1.95, 0.58, "its weights' .grad", 8.5, color=PALE)
    dashed = {"linestyle": (0, (4, 2)), "linewidth": 2.2}
    arrow(axes, (4.2, 1.75), (5.4, 1.75), color=FORWARD, **dashed)
    arrow(axes, (5.4, 0.85), (4.2, 0.85), color=BACKWARD, **dashed)
    words(axes, 4.8, 2.0, "y.detach()", 9)
    words(axes, 4.8, 0.6, "x.grad", 9)
    words(axes, 4.8, 1.3, "messages: autograd\ndoes not see them", 8.5, color=PALE)
    words(axes, 2.2, 1.3, "y.backward(gradient)", 9, color=PALE)
    words(axes, 7.4, 1.3, "loss.backward()", 9, color=PALE)
    save(figure, "autograd_across_ranks")


def pipeline_schedules() -> None:
    """The lists of four schedules, on the simulator's clock."""
    names = "gpipe", "1f1b", "interleaved", "zero_bubble"
    figure, panels = plt.subplots(4, 1, figsize=(10.5, 9.2), layout="constrained", sharex=True)
    for ax, each in zip(panels, names, strict=True):
        made = SCHEDULES[each](4, 8)
        part = 4 / made.stages  # of an interleaved stage, which has half of the layers
        predicted = simulate(made, part, part, part)
        title = f"{each}: {predicted.time:g} units of time, idle {predicted.idle:.0%}"
        schedule(predicted.spans, ax, title, unit="forward passes of a micro-batch")
        ax.set_xlabel("" if ax is not panels[-1] else ax.get_xlabel())
    panels[0].set_xlim(0, 33)
    save(figure, "pipeline_schedules")


if __name__ == "__main__":
    model_parallelism()
    layer_split_model_parallel()
    autograd_across_ranks()
    pipeline_schedules()
