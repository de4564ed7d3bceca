"""The pictures of the lesson zero: zero, zero1, zero2, zero3."""

from style import EMPTY, PALE, RANKS, Axes, arrow, bar, box, darker, ink, paler, paper, save, words

from minidist.instruments.plot import color

KINDS = {"parameters": 4, "gradients": 4, "optimizer states": 8}  # bytes: float32, Adam
PARAMETERS, GRADIENTS, _ = (color(kind) for kind in KINDS)
GATHERED, OWN = paler(PARAMETERS, 1), paler(GRADIENTS, 1)
TRAVEL, STEP = color("communication"), color("step")
ON_ITS_WAY = {"hatch": "////", "edgecolor": color("parameters"), "linewidth": 0}


def keys(axes: Axes, y: float, entries: list[tuple[float, str, str]]) -> None:
    """A legend: where, its colour, what it means."""
    for x, shade, text in entries:
        bar(axes, x, y - 0.09, 0.3, 0.18, shade)
        words(axes, x + 0.4, y, text, ha="left")


def zero() -> None:
    """What each of four ranks holds, with DDP and in three stages."""
    figure, axes = paper(10.4, 5.0)
    scale, width, pitch = 0.2, 0.42, 0.5  # inches: of a byte, of a rank, from rank to rank
    stages = {
        "DDP": "16 Ψ",
        "stage 1": "8 Ψ + 8 Ψ / N",
        "stage 2": "4 Ψ + 12 Ψ / N",
        "stage 3": "16 Ψ / N",
    }
    for stage, (title, formula) in enumerate(stages.items()):
        left = 0.45 + 2.5 * stage
        words(axes, left, 4.68, title, 12, fontweight="bold", ha="left", va="baseline")
        words(axes, left, 4.47, f"{formula} bytes", color=PALE, ha="left")
        shared = list(KINDS)[3 - stage :]  # the last one first
        for rank in range(4):
            x, y = left + pitch * rank, 0.95
            for kind, nbytes in KINDS.items():
                height = scale * nbytes
                bar(axes, x, y, width, height, EMPTY)
                part = height / 4 if kind in shared else height
                above = (3 - rank) * part if kind in shared else 0
                bar(axes, x, y + above, width, part, color(kind), linewidth=0.6)
                y += height
            words(axes, x + width / 2, 0.78, f"{rank}")
        words(axes, left + 2 * pitch - 0.04, 0.55, "rank")
    entries = zip((0.45, 2.2, 3.7), KINDS, strict=True)
    keys(axes, 0.2, [(x, color(kind), kind) for x, kind in entries])
    says = "4 + 4 + 8 bytes a parameter: Adam in float32"
    words(axes, 9.88, 0.2, says, color=PALE, ha="right")
    save(figure, "zero")


def zero1() -> None:
    """Each parameter is cut into four parts of rows; what becomes of them in a step."""
    figure, axes = paper(10.8, 3.1)
    tensors = [("embedding", 1.3), ("weight", 0.9), ("bias", 0.12), ("weight", 0.6), ("bias", 0.12)]
    top, height = 2.2, 0.5  # of the first rank's rows

    def rows(left: float, shades: list[str]) -> float:
        """The parameters side by side, with each rank's rows in its shade. Returns the end."""
        x = left
        for title, width in tensors:
            for rank, shade in enumerate(shades):
                bar(axes, x, top - height * rank, width, height - 0.04, shade)
            if width > 0.5:
                words(axes, x + width / 2, top + 0.62, title, 8.5)
            x += width + 0.1
        return x

    end = rows(1.0, RANKS[:4])
    right = rows(7.1, RANKS[:4])
    for rank, shade in enumerate(RANKS[:4]):
        middle = top + height / 2 - height * rank - 0.02
        words(axes, 0.9, middle, f"rank {rank}", 10, ha="right")
        arrow(axes, (end, middle), (end + 0.35, middle), color=STEP, linewidth=2)
        box(axes, end + 0.4, middle - 0.2, 1.5, 0.4, edgecolor=darker(shade), linewidth=1.8)
        words(axes, end + 1.15, middle, "states, a step", 9)
        arrow(axes, (end + 1.95, middle), (7.0, middle), color=TRAVEL, linewidth=2)
    words(axes, (1.0 + end) / 2, 0.4, "a rank's rows of every parameter", 9.5)
    words(axes, 6.65, 0.4, "all_gather", 9.5)
    words(axes, (7.1 + right) / 2, 0.4, "all new rows, on every rank", 9.5)
    save(figure, "zero1")


def zero2() -> None:
    """An all_reduce is a reduce_scatter and an all_gather; stage 2 takes the step in between."""
    figure, axes = paper(10.2, 4.65)

    def blocks(x: float, y: float, shade: str, shared: bool) -> None:
        """Four ranks, one below the other, with four blocks each."""
        for rank in range(4):
            for block in range(4):
                there = not shared or block == rank
                place = x + 0.3 * block, y + 0.35 - 0.32 * rank
                bar(axes, *place, 0.3, 0.27, shade if there else EMPTY)

    rows = [
        ("DDP", "the all_reduce is both halves; then every rank takes the whole step", 3.35)
        + ("reduce_scatter", GRADIENTS, True, "all_gather", GRADIENTS, False)
        + ("step", PARAMETERS, False),
        ("stage 2", "each rank takes its part of the step between the two halves", 1.2)
        + ("reduce_scatter", GRADIENTS, True, "step", PARAMETERS, True)
        + ("all_gather", PARAMETERS, False),
    ]
    for title, says, y, *moves in rows:
        words(axes, 0.2, y + 0.98, title, 11.5, ha="left", fontweight="bold")
        words(axes, 1.1, y + 0.98, says, ha="left", color=PALE)
        blocks(0.2, y, OWN, False)
        for number in range(3):
            move, shade, shared = moves[3 * number : 3 * number + 3]
            x = 1.5 + 2.87 * number
            travels = move != "step"
            arrow(axes, (x, y), (x + 1.4, y), color=TRAVEL if travels else STEP, linewidth=2.2)
            words(axes, x + 0.7, y + 0.2, move)
            words(axes, x + 0.7, y - 0.22, "Ψ (N − 1) / N" if travels else "", 8.5, color=PALE)
            blocks(x + 1.52, y, shade, shared)
    entries = [(0.2, OWN, "gradients of a rank's own examples")]
    entries += [(3.6, GRADIENTS, "mean gradients"), (6.0, PARAMETERS, "new parameters")]
    keys(axes, 0.15, entries)
    save(figure, "zero2")


def zero3() -> None:
    """What one of four ranks holds of a model of four layers, while it computes."""
    figure, axes = paper(10.4, 3.9)
    moments = [("forward", layer) for layer in range(4)]
    moments += [("backward", layer) for layer in reversed(range(4))]
    words(axes, 0.2, 3.65, "rank 1 of 4, in stage 3", 11.5, ha="left", fontweight="bold")
    for layer in range(4):
        words(axes, 0.2, 1.05 + 0.5 * layer + 0.2, f"layer {layer}", ha="left")
    for number, (what, at) in enumerate(moments):
        x = 1.05 + 1.16 * number
        shade, travels = color(what), []
        following = moments[number + 1][1] if number + 1 < len(moments) else at
        bar(axes, x, 3.12, 0.98, 0.3, shade)
        words(axes, x + 0.49, 3.27, f"{what} {at}", 9, color=ink(shade))
        for layer in range(4):
            y = 1.05 + 0.5 * layer
            bar(axes, x, y, 0.98, 0.4, EMPTY)
            if layer == at:
                bar(axes, x, y, 0.98, 0.4, GATHERED)
            elif layer == following:
                bar(axes, x, y, 0.98, 0.4, EMPTY, **ON_ITS_WAY)
                travels += [f"gathers {layer}"]
            bar(axes, x + 0.98 / 4, y, 0.98 / 4, 0.4, PARAMETERS)
        travels += [f"reduces {at}"] if what == "backward" else []
        words(axes, x + 0.49, 0.98, "\n".join(travels), 8.5, va="top")
    entries = [(1.05, PARAMETERS, "its own shard")]
    entries += [(3.0, GATHERED, "gathered to compute with")]
    keys(axes, 0.2, entries)
    bar(axes, 5.8, 0.11, 0.3, 0.18, EMPTY, **ON_ITS_WAY)
    words(axes, 6.2, 0.2, "in flight, for the next layer", ha="left")
    save(figure, "zero3")


if __name__ == "__main__":
    zero()
    zero1()
    zero2()
    zero3()
