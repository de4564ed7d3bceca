"""The pictures of the lesson collectives: collectives, ring_all_reduce, all_reduce_algorithms."""

from collections.abc import Callable

from style import (
    FAINT,
    FIELD,
    INK,
    PALE,
    RANKS,
    Axes,
    arrow,
    bar,
    box,
    darker,
    paper,
    save,
    stripes,
)

P = 4
LEGEND = (
    "column: the rank that has it · colour: the rank it came from · "
    "number: its place in the vector · stripes: the sum"
)
Grid = Callable[[int, int], list[int]]  # (rank, row) -> whose values are there
EVERYBODY = list(range(P))


def own(rank: int, row: int) -> list[int]:
    """Before most collectives: a vector of four pieces on each rank."""
    return [rank]


COLLECTIVES: list[tuple[str, str, Grid, Grid]] = [
    (
        "broadcast",
        "all get what one has",
        lambda rank, row: [0] if rank == 0 else [],
        lambda rank, row: [0],
    ),
    (
        "scatter",
        "one gives each a piece",
        lambda rank, row: [0] if rank == 0 else [],
        lambda rank, row: [0] if row == rank else [],
    ),
    (
        "gather",
        "one gets a piece from each",
        lambda rank, row: [rank] if row == rank else [],
        lambda rank, row: [row] if rank == 0 else [],
    ),
    (
        "reduce",
        "one gets the sum",
        own,
        lambda rank, row: EVERYBODY if rank == 0 else [],
    ),
    ("all_reduce", "all get the sum", own, lambda rank, row: EVERYBODY),
    (
        "reduce_scatter",
        "each gets a piece of the sum",
        own,
        lambda rank, row: EVERYBODY if row == rank else [],
    ),
    (
        "all_gather",
        "all get a piece from each",
        lambda rank, row: [rank] if row == rank else [],
        lambda rank, row: [row],
    ),
    ("all_to_all", "each gives each a piece", own, lambda rank, row: [row]),
]


def collectives() -> None:
    """The nine, before and after: a column is a rank, a cell a piece of its vector."""
    figure, axes = paper(9.0, 7.02)
    for place, (name, says, before, after) in enumerate(COLLECTIVES):
        left, top = _panel(axes, place, name, says)
        # In an all_to_all the piece keeps its number, which is that of the rank it goes to.
        number = (lambda rank, row: rank) if name == "all_to_all" else (lambda rank, row: row)
        _grid(axes, left + 0.08, top - 1.75, before, lambda rank, row: row)
        arrow(axes, (left + 1.34, top - 1.2), (left + 1.54, top - 1.2), linewidth=2)
        _grid(axes, left + 1.62, top - 1.75, after, number)
    _barrier(axes, *_panel(axes, 8, "barrier", "nobody leaves before all have come"))
    axes.text(
        4.5,
        0.16,
        LEGEND,
        ha="center",
        fontsize=10,
        color=PALE,
    )
    save(figure, "collectives")


def _panel(axes: Axes, place: int, name: str, says: str) -> tuple[float, float]:
    """Frame and title; returns the left and the upper edge."""
    left, top = 0.12 + 2.97 * (place % 3), 6.94 - 2.18 * (place // 3)
    box(axes, left, top - 2.06, 2.82, 2.06, linewidth=0.8)
    axes.text(left + 0.12, top - 0.24, name, fontsize=12, fontweight="bold", family="monospace")
    axes.text(left + 0.12, top - 0.47, says, fontsize=9.5, color=PALE)
    return left, top


def _grid(axes: Axes, x: float, y: float, content: Grid, number: Callable[[int, int], int]) -> None:
    for rank in range(P):
        for row in range(P):
            left, bottom = x + 0.295 * rank, y + 0.275 * (P - 1 - row)
            stripes(axes, left, bottom, 0.265, content(rank, row), str(number(rank, row)))
        middle = x + 0.295 * rank + 0.13
        axes.text(middle, y - 0.17, str(rank), fontsize=8.5, ha="center", color=PALE)


def _barrier(axes: Axes, left: float, top: float) -> None:
    arrivals = [1.25, 0.6, 1.55, 0.95]
    wall = left + 1.72
    for rank, arrival in enumerate(arrivals):
        y = top - 0.75 - 0.28 * rank
        axes.text(left + 0.16, y, f"{rank}", fontsize=8.5, color=PALE, ha="center", va="center")
        axes.plot([left + 0.28, left + arrival], [y, y], color=darker(RANKS[rank]), linewidth=5)
        axes.plot([left + arrival, wall], [y, y], color=PALE, linewidth=1.2, linestyle=":")
        arrow(axes, (wall, y), (left + 2.7, y), color=RANKS[rank], linewidth=5, mutation_scale=14)
    axes.plot([wall, wall], [top - 0.6, top - 1.76], color=INK, linewidth=2.5)
    axes.text(left + 1.1, top - 1.94, "wait", fontsize=8.5, color=PALE, ha="center")
    axes.text(left + 2.2, top - 1.94, "go on", fontsize=8.5, color=PALE, ha="center")


def ring_all_reduce() -> None:
    """The pieces fill up, step by step: the ring is computed here, not painted."""
    held = [[{rank} for _ in range(P)] for rank in range(P)]  # held[rank][piece]: whose values
    snapshots = [("start", [[set(s) for s in row] for row in held], set())]
    for step in range(2 * (P - 1)):
        half, shift = ("sum up", 0) if step < P - 1 else ("hand out", 1)
        turn = step % (P - 1)
        sent = [((r - turn + shift) % P, held[r][(r - turn + shift) % P]) for r in range(P)]
        new = set()
        for rank, (piece, values) in enumerate(sent):
            right = (rank + 1) % P
            held[right][piece] = held[right][piece] | values if half == "sum up" else values
            new.add((right, piece))
        snapshots.append((f"{half} {turn + 1}", [[set(s) for s in row] for row in held], new))
    assert all(values == set(EVERYBODY) for row in held for values in row)

    figure, axes = paper(9.0, 4.55)
    for number, (name, state, new) in enumerate(snapshots):
        row, column = divmod(number - 1, P - 1) if number else (0, -1)
        x, y = 0.35 + 2.22 * (column + 1), 2.55 - 2.12 * row
        axes.text(x + 0.75, y + 1.62, name, fontsize=11, fontweight="bold", ha="center")
        for rank in range(P):
            for piece in range(P):
                place = (x + 0.38 * rank, y + 0.38 * (P - 1 - piece))
                stripes(axes, *place, 0.36, sorted(state[rank][piece]), "", (rank, piece) in new)
            axes.text(
                x + 0.38 * rank + 0.18, y - 0.18, str(rank), fontsize=9, ha="center", color=PALE
            )
        for piece in range(P):
            height = y + 0.38 * (P - 1 - piece) + 0.12
            axes.text(x - 0.1, height, str(piece), fontsize=9, ha="right", color=PALE)
    text = """A column is a rank,
a row is a piece of the
vector. Stripes: whose
values are in the sum.

Framed: it has just
arrived from the rank
on the left (rank 0
hears from rank 3)."""
    axes.text(0.3, 1.1, text, fontsize=9.5, va="center", linespacing=1.35)
    save(figure, "ring_all_reduce")


def all_reduce_algorithms() -> None:
    """Who talks to whom in each round, and how much is sent."""
    neighbours = [(rank, (rank + 1) % P) for rank in range(P)]
    near, far = [(0, 1), (1, 0), (2, 3), (3, 2)], [(0, 2), (2, 0), (1, 3), (3, 1)]
    algorithms: list[tuple[str, list[tuple[str, list[tuple[int, int]]]]]] = [
        ("naive", [("n", [(r, 0)]) for r in (1, 2, 3)] + [("n", [(0, r)]) for r in (1, 2, 3)]),
        ("ring", [("n/4", neighbours)] * 6),
        (
            "tree",
            [("n", [(1, 0), (3, 2)]), ("n", [(2, 0)]), ("n", [(0, 2)]), ("n", [(0, 1), (2, 3)])],
        ),
        ("recursive_doubling", [("n", near), ("n", far)]),
        ("halving_doubling", [("n/2", far), ("n/4", near), ("n/4", near), ("n/2", far)]),
    ]
    figure, axes = paper(9.0, 8.75)
    for place, (name, rounds) in enumerate(algorithms):
        top = 8.3 - 1.66 * place
        axes.text(0.15, top - 0.25, name, fontsize=11.5, fontweight="bold", family="monospace")
        steps = f"{len(rounds)} steps"
        axes.text(0.15, top - 0.5, steps, fontsize=9.5, color=PALE)
        lane = [top - 0.3 - 0.3 * rank for rank in range(P)]
        end = 2.75 + 1.02 * len(rounds)
        for rank, y in enumerate(lane):
            axes.plot(
                [2.65, end], [y, y], color=darker(RANKS[rank]), linewidth=3, solid_capstyle="round"
            )
            axes.text(2.5, y, str(rank), fontsize=9, va="center", ha="center", color=PALE)
        for step, (size, messages) in enumerate(rounds):
            x = 2.95 + 1.02 * step
            bar(axes, x - 0.08, lane[-1] - 0.4, 0.78, 1.42, FIELD, zorder=0, linewidth=0)
            for column, (source, target) in enumerate(messages):
                at = (
                    x
                    + 0.19 * column
                    + (0.28 if len(messages) == 1 else 0.1 if len(messages) == 2 else 0)
                )
                color = darker(RANKS[source])
                arrow(
                    axes,
                    (at, lane[source]),
                    (at, lane[target]),
                    color=color,
                    linewidth=2.2,
                    zorder=3,
                )
                axes.plot(at, lane[source], "o", color=color, markersize=5, zorder=4)
            axes.text(x + 0.28, lane[-1] - 0.27, size, fontsize=9.5, ha="center", color=INK)
        if place:
            axes.plot([0.15, 8.85], [top + 0.06] * 2, color=FAINT, linewidth=1)
    axes.text(
        2.65,
        8.5,
        "a grey field is a step: its messages are sent at the same time; below it is their size",
        ha="left",
        fontsize=9.5,
        color=PALE,
    )
    save(figure, "all_reduce_algorithms")


if __name__ == "__main__":
    collectives()
    ring_all_reduce()
    all_reduce_algorithms()
