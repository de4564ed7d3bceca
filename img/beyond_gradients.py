"""The picture of the lesson beyond_gradients: ranks that meet rarely, and ranks that gossip."""

from style import RANKS, Axes, arrow, bar, ink, paper, save, words

from minidist.instruments.plot import color

STEP, HIGH, ROWS = 0.46, 0.36, (2.2, 1.65, 1.1, 0.55)  # inches; the row of each rank
SENDS = color("communication")


def steps(axes: Axes, left: float, numbers: range, gap: int, wide: float) -> float:
    """The steps of all ranks, with room after each `gap` of them. Returns where they end."""
    x = left
    for number in numbers:
        for rank, y in enumerate(ROWS):
            bar(axes, x, y, STEP - 0.04, HIGH, RANKS[rank])
            words(axes, x + STEP / 2, y + HIGH / 2, f"{number}", 9.5, color=ink(RANKS[rank]))
        x += STEP + (wide if number % gap == 0 else 0)
    return x


def rows(axes: Axes, left: float) -> None:
    for rank, y in enumerate(ROWS):
        words(axes, left - 0.12, y + HIGH / 2, f"rank {rank}", 10, ha="right")


def beyond_gradients() -> None:
    """Left, eight steps with period 4; right, two steps, each with a message to another rank."""
    figure, axes = paper(11.0, 3.15)
    left, wide = 1.0, 0.5
    words(axes, left, 2.9, "local SGD, period 4", 11, ha="left", fontweight="bold")
    rows(axes, left)
    steps(axes, left, range(1, 9), 4, wide)
    for place in (4 * STEP, 8 * STEP + wide):
        x = left + place + wide / 2 - 0.02
        bar(axes, x - 0.1, ROWS[-1], 0.2, ROWS[0] + HIGH - ROWS[-1], SENDS)
    says = "Nothing is sent within a period, and the ranks differ."
    words(axes, left, 0.32, says, 10, ha="left")
    words(axes, left, 0.1, "At a meeting (red) all take the mean of their weights.", 10, ha="left")
    left, wide = 7.0, 1.35
    words(axes, left, 2.9, "gossip", 11, ha="left", fontweight="bold")
    rows(axes, left)
    steps(axes, left, range(1, 3), 1, wide)
    for number, far in (0, 1), (1, 2):
        x = left + STEP + number * (STEP + wide)
        for rank, y in enumerate(ROWS):
            to = ROWS[(rank + far) % 4] + HIGH / 2
            arrow(axes, (x, y + HIGH / 2), (x + wide - 0.08, to), color=SENDS)
    says = "After step 1 each sends to the next rank, after step 2 two on."
    words(axes, left - 0.6, 0.32, says, 10, ha="left")
    says = "Each takes the mean of its own weights and the received ones."
    words(axes, left - 0.6, 0.1, says, 10, ha="left")
    save(figure, "beyond_gradients")


if __name__ == "__main__":
    beyond_gradients()
