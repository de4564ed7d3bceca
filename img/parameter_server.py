"""The picture of the lesson parameter_server: who pulls which weights, and who pushes when."""

from style import INK, RANKS, Axes, arrow, bar, ink, paper, save, words

from minidist.instruments.plot import color

LEFT, UNIT, SERVER = 1.3, 0.9, 2.45  # inches: where time begins, one unit of it, the server's row
ROWS = {1: 1.65, 2: 1.1, 3: 0.55}  # of each trainer
HIGH, SENDS = 0.38, color("communication")
ASIDE = {(1, 1.9): 0.35, (1, 3.8): -0.15, (1, 5.7): -0.3, (2, 5.3): -0.4}  # where words stand
# Trainer, and when it has pulled and pushed: trainer 3 is slow.
WORK = (
    *((1, 0.0, 1.6), (1, 1.9, 3.5), (1, 3.8, 5.4), (1, 5.7, 7.3)),
    *((2, 0.0, 2.4), (2, 2.7, 5.0), (2, 5.3, 7.7)),
    (3, 0.0, 6.5),
)


def place(time: float) -> float:
    return LEFT + UNIT * time


def weights(axes: Axes, start: float, end: float, version: int) -> None:
    """A version of the weights on the server."""
    bar(axes, place(start), SERVER, place(end) - place(start) - 0.03, HIGH, RANKS[0])
    words(axes, place((start + end) / 2), SERVER + HIGH / 2, f"{version}", 10, color=ink(RANKS[0]))


def parameter_server() -> None:
    """Three trainers; the slow one pushes a gradient that is five updates late."""
    figure, axes = paper(9.8, 3.15)
    words(axes, LEFT - 0.12, SERVER + HIGH / 2, "server", 10, ha="right")
    pushes = sorted(end for _, _, end in WORK)
    times = [0.0, *(end + 0.15 for end in pushes), 8.6]
    for version, (start, end) in enumerate(zip(times, times[1:], strict=False)):
        weights(axes, start, end, version)
    for rank, y in ROWS.items():
        words(axes, LEFT - 0.12, y + HIGH / 2, f"trainer {rank}", 10, ha="right")
    for rank, start, end in WORK:
        y, shade = ROWS[rank], RANKS[rank]
        bar(axes, place(start), y, UNIT * (end - start), HIGH, shade)
        said = (
            "gradient"
            if end - start < 5
            else "a slow gradient, computed with weights 0, pushed 5 updates later"
        )
        at = place((start + end) / 2 + ASIDE.get((rank, start), 0))  # no arrow goes through it
        words(axes, at, y + HIGH / 2, said, 9, color=ink(shade))
        arrow(axes, (place(end), y + HIGH), (place(end + 0.15), SERVER), color=SENDS)
        if end < 6:  # it pulls the new weights, and goes on
            arrow(axes, (place(end + 0.15), SERVER), (place(end + 0.3), y + HIGH), color=INK)
    words(axes, LEFT, SERVER + 0.52, "versions of the weights", 10, ha="left", color=INK)
    says = "Red: a gradient is pushed, and the server steps. Black: the new weights are pulled."
    words(axes, LEFT, 0.22, says, 10, ha="left")
    save(figure, "parameter_server")


if __name__ == "__main__":
    parameter_server()
