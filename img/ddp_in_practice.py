"""The pictures of the lesson ddp_in_practice: ddp_equal, no_sync, ddp_join."""

from style import EMPTY, PALE, RANKS, Axes, arrow, bar, ink, paper, save, words

from minidist.instruments.plot import color

FORWARD, BACKWARD, TRAVEL = color("forward"), color("backward"), color("communication")
EQUAL = [("weights", "parameters"), ("optimizer's states", "optimizer states")]
EQUAL += [("sampler's seed", "compute"), ("gradients after averaging", "gradients")]
OWN = ["images", "dropout's seed", "batch norm's means", "gradients before that"]


def block(axes: Axes, x: float, y: float, width: float, shade: str, text: str) -> None:
    bar(axes, x, y, width, 0.36, shade, linewidth=1.2)
    words(axes, x + width / 2, y + 0.18, text, 9, color=ink(shade))


def ddp_equal() -> None:
    """What all ranks have in common, and what is each one's own."""
    figure, axes = paper(9.6, 4.35)
    left, width = 2.3, 1.75
    for rank in range(4):
        words(axes, left + (rank + 0.5) * width, 4.1, f"rank {rank}", 10, fontweight="bold")
    for row, (name, kind) in enumerate(EQUAL):
        y = 3.5 - 0.44 * row
        words(axes, left - 0.15, y + 0.18, name, ha="right")
        block(axes, left, y, 4 * width, color(kind), "the same")
    for row, name in enumerate(OWN):
        y = 1.55 - 0.44 * row
        words(axes, left - 0.15, y + 0.18, name, ha="right")
        for rank in range(4):
            block(axes, left + rank * width, y, width, RANKS[rank], "its own")
    save(figure, "ddp_equal")


def no_sync() -> None:
    """Four micro-batches on a rank: what travels, each time and once."""
    figure, axes = paper(9.6, 2.9)
    rows = {"each time": (2.1, range(4)), "no_sync": (0.75, [3])}
    for name, (y, sent) in rows.items():
        words(axes, 0.15, y + 0.18, name, 11, fontweight="bold", ha="left")
        for number in range(4):
            x = 1.4 + 2.0 * number
            block(axes, x, y, 0.7, FORWARD, "forward")
            block(axes, x + 0.7, y, 1.1, BACKWARD, "backward")
            if number in sent:
                what = "sum" if len(sent) == 1 else "gradients"
                arrow(axes, (x + 1.5, y), (x + 1.5, y - 0.14), linewidth=1.2, mutation_scale=8)
                block(axes, x + 0.95, y - 0.5, 0.9, TRAVEL, what)
    words(axes, 1.4, 2.72, "one rank's step: four micro-batches", color=PALE, ha="left")
    save(figure, "no_sync")


def ddp_join() -> None:
    """Ranks with 5, 3, 1 and 2 batches, and zeros in place of those that they lack."""
    figure, axes = paper(9.2, 2.35)
    for step in range(5):
        words(axes, 2.05 + 1.5 * step, 2.15, f"step {step + 1}", color=PALE)
    for rank, batches in enumerate((5, 3, 1, 2)):
        y = 1.6 - 0.46 * rank
        words(axes, 0.15, y + 0.18, f"rank {rank}", ha="left")
        for step in range(5):
            shade, text = (RANKS[rank], "batch") if step < batches else (EMPTY, "zeros")
            block(axes, 1.3 + 1.5 * step, y, 1.5, shade, text)
    save(figure, "ddp_join")


if __name__ == "__main__":
    ddp_equal()
    no_sync()
    ddp_join()
