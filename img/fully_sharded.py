"""The picture of the lesson fully_sharded: fsdp_unit."""

from style import EMPTY, PALE, Axes, arrow, bar, ink, paper, save, words

from minidist.plot import color

PARAMETERS, GRADIENTS = color("parameters"), color("gradients")
TRAVEL, STEP = color("communication"), color("step")
WIDTH, GAP, LEFT = 0.8, 1.0, 1.2  # inches: of a unit, between two moments, of the first one
OWN = 1  # the rank that is shown


def unit(axes: Axes, x: float, y: float, shade: str, there: str) -> None:
    """Four shards side by side, of which there are `there`: "all", the rank's
    "own" or "none"; of gradients also "rows": all, for the rank's own rows."""
    for rank in range(4):
        place = x + rank * WIDTH / 4, y, WIDTH / 4, 0.42
        bar(axes, *place, EMPTY)
        if there in ("all", "rows") or (there == "own" and rank == OWN):
            strong = rank == OWN and there != "rows"
            bar(axes, *place, shade, alpha=1.0 if strong else 0.45)


def fsdp_unit() -> None:
    """What one of four ranks has of one unit, through a step."""
    figure, axes = paper(11.2, 3.2)
    words(
        axes, 0.2, 3.05, "one unit on rank 1 of 4, through a step", 11.5, ha="left", weight="bold"
    )
    moments = [  # its name, what there is of parameters and of gradients
        ("", "own", "none"),
        ("forward", "all", "none"),
        ("others compute", "own", "none"),
        ("backward", "all", "rows"),
        ("others compute", "own", "own"),
        ("step", "own", "own"),
    ]
    moves = [  # between two moments: in which row, what is done, and how much travels
        [(1.96, "all_gather", "ψ (N − 1) / N")],
        [(1.96, "free", "")],
        [(1.96, "all_gather", "ψ (N − 1) / N")],
        [(1.96, "free", ""), (1.21, "reduce_scatter", "ψ (N − 1) / N")],
        [],
    ]
    words(axes, 0.2, 1.96, "parameters", ha="left")
    words(axes, 0.2, 1.21, "gradients", ha="left")
    for number, (title, parameters, gradients) in enumerate(moments):
        x = LEFT + number * (WIDTH + GAP)
        if title in ("forward", "backward", "step"):
            bar(axes, x, 2.5, WIDTH, 0.3, color(title))
            words(axes, x + WIDTH / 2, 2.65, title, color=ink(color(title)))
        else:
            words(axes, x + WIDTH / 2, 2.65, title, 9, color=PALE)
        unit(axes, x, 1.75, PARAMETERS, parameters)
        unit(axes, x, 1.0, GRADIENTS, gradients)
        for row, done, travels in moves[number] if number < len(moves) else []:
            middle = x + WIDTH + GAP / 2
            ends = (middle - 0.35, row - 0.04), (middle + 0.35, row - 0.04)
            arrow(axes, *ends, color=TRAVEL if travels else PALE, linewidth=2)
            words(axes, middle, row + 0.16, done, 8.5)
            words(axes, middle, row - 0.23, travels, 8.5, color=PALE)
    entries = [(1.2, PARAMETERS, "its own shard", 1.0), (3.3, PARAMETERS, "gathered", 0.45)]
    entries += [(5.0, GRADIENTS, "of its own rows", 0.45), (7.1, GRADIENTS, "the mean", 1.0)]
    for x, shade, text, strength in entries:
        bar(axes, x, 0.21, 0.3, 0.18, shade, alpha=strength)
        words(axes, x + 0.4, 0.3, text, ha="left")
    save(figure, "fsdp_unit")


if __name__ == "__main__":
    fsdp_unit()
