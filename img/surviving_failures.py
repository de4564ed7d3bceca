"""The picture of the lesson surviving_failures: a node dies, and the other one goes on."""

from style import EMPTY, INK, PALE, RANKS, Axes, bar, box, darker, ink, paper, save, words

from minidist.instruments.plot import color

LEFT, STEP, HIGH = 1.75, 0.52, 0.36  # inches: the first step, from one to the next, a rank's row
WRONG = darker(color("communication"), 4.5)
ROWS = {0: 2.5, 1: 2.0, 2: 1.1, 3: 0.6}  # of each rank
DIES, SAVED, RESTART = 8, 6, 2  # the step within which the node dies; the newest save; a pause


def steps(axes: Axes, rank: int, first: int, numbers: range, shade: str) -> None:
    for place, number in enumerate(numbers, start=first):
        x = LEFT + STEP * place
        bar(axes, x, ROWS[rank], STEP - 0.05, HIGH, shade)
        words(axes, x + STEP / 2 - 0.025, ROWS[rank] + HIGH / 2, f"{number}", 9.5, color=ink(shade))


def saves(axes: Axes, low: float, *places: int) -> None:
    for place in places:
        x = LEFT + STEP * place - 0.025
        axes.plot([x, x], [low, 3.1], color=darker(color("step")), linewidth=2.2)
        words(axes, x, 3.24, "save", 9.5, color=darker(color("step"), 4.5))


def surviving_failures() -> None:
    """Steps of four ranks on two nodes; one node dies; two ranks go on after the newest save."""
    figure, axes = paper(11.0, 3.45)
    for node, y in (0, 1.9), (1, 0.5):
        box(axes, 0.15, y, 10.7, 1.06, linestyle="--")
        words(axes, 0.3, y + 0.53, f"node {node}", 10, ha="left", color=PALE)
    for rank, y in ROWS.items():
        words(axes, LEFT - 0.12, y + HIGH / 2, f"rank {rank}", 10, ha="right")
        steps(axes, rank, 0, range(1, SAVED + 1), RANKS[rank])
        steps(axes, rank, SAVED, range(SAVED + 1, DIES), EMPTY)  # lost
        if rank < 2:
            steps(axes, rank, DIES + RESTART, range(SAVED + 1, SAVED + 7), RANKS[rank])
    x = LEFT + STEP * (DIES - 1)
    words(axes, x + 0.42, 1.03, "✕", 26, color=WRONG)
    words(axes, x + 0.75, 1.03, "kill -9", 11, color=WRONG, ha="left", fontweight="bold")
    words(axes, x + 0.55, 2.43, "restart", 10, color=PALE)
    saves(axes, 0.42, 3, SAVED)
    saves(axes, 1.82, DIES + RESTART + 3, DIES + RESTART + 6)
    says = "step 7 was not saved: two ranks do it again, with the examples that four had"
    words(axes, LEFT, 0.22, says, 10, ha="left", color=INK)
    save(figure, "surviving_failures")


if __name__ == "__main__":
    surviving_failures()
