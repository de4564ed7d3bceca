"""The picture of the lesson offload: memory_savers, which saver takes what."""

from style import EMPTY, PALE, arrow, bar, box, ink, paper, save, words

from minidist.instruments.plot import color

KINDS = {"parameters": 1, "gradients": 1, "optimizer states": 2, "activations": 2.7}
UNIT, WIDTH, FOOT = 0.48, 1.3, 0.85  # inches


def memory_savers() -> None:
    """What a rank holds at the peak of a step, and which part of it each saver takes."""
    figure, axes = paper(12.1, 4.95)
    savers = [  # a name, what is left of each kind, and the price
        ("nothing saved", {}, ()),
        (
            "sharded",
            dict.fromkeys(list(KINDS)[:3], 0.25),
            ("price: communication", "between ranks"),
        ),
        ("micro-batches", {"activations": 0.25}, ("price: smaller", "products")),
        ("checkpointed", {"activations": 0.125}, ("price: forward", "once more")),
        ("autocast", {"activations": 0.7}, ("16 bits on the way;", "price: digits")),
        (
            "offloaded",
            {"optimizer states": 0, "gradients": 0},
            ("price: copies,", "and a slower step"),
        ),
    ]
    for column, (title, left, price) in enumerate(savers):
        x, y = 0.4 + 1.72 * column, FOOT
        middle = x + WIDTH / 2
        words(axes, middle, 4.65, title, 11.5, fontweight="bold", va="baseline")
        words(axes, middle, 4.3, "the device", color=PALE, va="baseline")
        for kind, units in KINDS.items():
            height = UNIT * units
            bar(axes, x, y, WIDTH, height, EMPTY)
            if left.get(kind, 1):
                bar(axes, x, y, WIDTH, height * left.get(kind, 1), color(kind))
            if not column:
                looks = {"linespacing": 1.1, "color": ink(color(kind))}
                words(axes, middle, y + height / 2, kind.replace(" ", "\n"), **looks)
            y += height
        for row, line in enumerate(price):
            words(axes, middle, 0.5 - 0.22 * row, line, va="baseline")
    x, y = 0.4 + 1.72 * (len(savers) - 1), FOOT + UNIT
    host = x + 1.77
    words(axes, host + 0.45, 3.28, "the host", color=PALE)
    box(axes, host - 0.1, y - 0.1, 1.1, 1.9)
    bar(axes, host, y, 0.9, UNIT, color("gradients"))
    bar(axes, host, y + UNIT, 0.9, 2 * UNIT, color("optimizer states"))
    words(axes, host + 0.45, y + 3 * UNIT + 0.17, "Adam's step", 9)
    travel = {"color": color("communication"), "linewidth": 2}
    arrow(axes, (x + WIDTH + 0.02, y + UNIT / 2), (host - 0.02, y + UNIT / 2), **travel)
    arrow(axes, (host + 0.35, y - 0.12), (x + WIDTH + 0.02, FOOT + UNIT / 2), bend=-0.35, **travel)
    save(figure, "memory_savers")


if __name__ == "__main__":
    memory_savers()
