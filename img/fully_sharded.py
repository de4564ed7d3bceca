"""The pictures of the lessons fully_sharded and fsdp_in_practice: fsdp_unit, fsdp_hybrid."""

from style import EMPTY, PALE, RANKS, Axes, arrow, bar, box, ink, name, paler, paper, save, words

from minidist.instruments.plot import color

PARAMETERS, GRADIENTS = color("parameters"), color("gradients")
TRAVEL = color("communication")
WIDTH, GAP, LEFT = 0.8, 1.0, 1.2  # inches: of a unit, between two moments, of the first one
OWN = 1  # the rank that is shown


def unit(axes: Axes, x: float, y: float, shade: str, there: str) -> None:
    """Four shards side by side, of which there are `there`: "all", the rank's
    "own" or "none"; of gradients also "rows": all, for the rank's own rows."""
    for rank in range(4):
        place = x + rank * WIDTH / 4, y, WIDTH / 4, 0.42
        bar(axes, *place, EMPTY)
        if there in ("all", "rows") or (there == "own" and rank == OWN):
            own = rank == OWN and there != "rows"
            bar(axes, *place, shade if own else paler(shade, 1))


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
    entries = [(1.2, PARAMETERS, "its own shard"), (3.3, paler(PARAMETERS, 1), "gathered")]
    entries += [(5.0, paler(GRADIENTS, 1), "of its own rows"), (7.1, GRADIENTS, "the mean")]
    for x, shade, text in entries:
        bar(axes, x, 0.21, 0.3, 0.18, shade)
        words(axes, x + 0.4, 0.3, text, ha="left")
    words(axes, 9.0, 0.3, "ψ: the parameters of the unit", color=PALE, ha="left")
    save(figure, "fsdp_unit")


def node(axes: Axes, x: float, number: int, ranks: tuple[int, int], shards: int) -> None:
    """A node of two ranks, one above the other, each with its shard of so many."""
    box(axes, x, 0.75, 1.6, 2.0)
    words(axes, x + 0.8, 2.9, f"node {number}", 9, color=PALE)
    for rank, y in zip(ranks, (2.15, 1.05), strict=True):
        bar(axes, x + 0.2, y, 1.2, 0.36, RANKS[rank])
        name(axes, x + 0.8, y + 0.18, rank, 9)
        part = 1.2 / shards
        bar(axes, x + 0.2, y - 0.2, 1.2, 0.18, EMPTY)
        bar(axes, x + 0.2 + part * (rank % shards), y - 0.2, part, 0.18, PARAMETERS)


def fsdp_hybrid() -> None:
    """What leaves a node, in full and in hybrid sharding."""
    figure, axes = paper(10.2, 3.6)
    slow = {"color": TRAVEL, "linewidth": 2.6}
    near = {"color": PALE, "linewidth": 1.6}
    words(axes, 0.2, 3.4, "full: one ring through all ranks", 11, ha="left", weight="bold")
    node(axes, 0.3, 0, (0, 1), 4)
    node(axes, 3.2, 1, (3, 2), 4)
    arrow(axes, (0.38, 2.1), (0.38, 1.2), **near)
    arrow(axes, (1.95, 1.23), (3.15, 1.23), **slow)
    arrow(axes, (4.72, 1.2), (4.72, 2.1), **near)
    arrow(axes, (3.15, 2.33), (1.95, 2.33), **slow)
    words(axes, 2.55, 1.78, "all of it:\n3Ψ (N − 1) / N", 9)
    words(axes, 2.55, 0.45, "shards of Ψ / N", 9, color=PALE)
    left = 5.2
    words(axes, left, 3.4, "hybrid: shards within a node", 11, ha="left", weight="bold")
    node(axes, left + 0.1, 0, (0, 1), 2)
    node(axes, left + 3.0, 1, (2, 3), 2)
    for x in (left + 0.2, left + 4.5):
        arrow(axes, (x, 2.1), (x, 1.2), arrowstyle="<|-|>", **near)
    for y in (1.23, 2.33):
        arrow(axes, (left + 1.75, y), (left + 2.95, y), arrowstyle="<|-|>", **slow)
    words(axes, left + 2.35, 1.78, "all_reduce of\ngradient shards:\n2Ψ (M − 1) / M", 9)
    words(axes, left + 2.35, 0.45, "shards of Ψ / G, one model a node", 9, color=PALE)
    words(axes, 5.1, 0.15, "N ranks, M nodes, G ranks a node", 9)
    save(figure, "fsdp_hybrid")


if __name__ == "__main__":
    fsdp_unit()
    fsdp_hybrid()
