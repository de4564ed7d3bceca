"""The picture of the lesson activation_checkpointing: what is kept, and what is computed again."""

from style import EMPTY, INK, PALE, Axes, arrow, bar, box, paper, save, words

from minidist.instruments.plot import color

KEPT = color("activations")
BLOCKS, BARS, WIDTH, HIGH = 4, 7, 0.17, 0.62  # bars of a block: its input, and six more
LEFT, APART = 2.6, 2.05  # inches: the first block, from one to the next


def row(axes: Axes, y: float, title: str, filled: dict[int, int], done: int = BLOCKS) -> None:
    """Of each block the first so many bars are filled; those from `done` on are ready."""
    words(axes, 0.2, y + HIGH / 2, title, 10, ha="left")
    for block in range(BLOCKS):
        x = LEFT + APART * block
        box(axes, x - 0.1, y - 0.1, BARS * 0.21 + 0.16, HIGH + 0.2)
        for place in range(BARS):
            there = block < done and place < filled.get(block, 0)
            edge = {"edgecolor": INK, "linewidth": 1.3} if not place and there else {}
            bar(axes, x + 0.21 * place, y, WIDTH, HIGH, KEPT if there else EMPTY, **edge)


def activation_checkpointing() -> None:
    """Four blocks: plain after forward, checkpointed after forward, and within backward."""
    figure, axes = paper(11.0, 4.1)
    for block in range(BLOCKS):
        x = LEFT + APART * block + 0.66
        words(axes, x, 3.92, f"block {block + 1}", 11, fontweight="bold")
    every, inputs = dict.fromkeys(range(BLOCKS), BARS), dict.fromkeys(range(BLOCKS), 1)
    row(axes, 2.9, "plain,\nafter forward", every)
    row(axes, 1.75, "checkpointed,\nafter forward", inputs)
    row(axes, 0.6, "checkpointed,\nbackward is in block 3", inputs | {2: BARS}, done=3)
    x = LEFT + 2 * APART
    arrow(axes, (x + 0.1, 0.42), (x + 1.35, 0.42), color=color("forward"), linewidth=2)
    words(axes, x + 0.66, 0.22, "forward, once more", 9.5)
    words(axes, x + APART + 0.66, 0.22, "done: all is free", 9.5, color=PALE)
    words(axes, LEFT - 0.1, 0.22, "framed: the input of a block", 9.5, color=PALE, ha="left")
    save(figure, "activation_checkpointing")


if __name__ == "__main__":
    activation_checkpointing()
