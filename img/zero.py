"""The pictures of the lesson zero: zero, zero1, zero2, zero3."""

from style import EMPTY, INK, PALE, RANKS, Axes, arrow, bar, box, ink, paper, save, words

from minidist.plot import color

KINDS = {"parameters": 2, "gradients": 2, "optimizer states": 12}  # bytes: mixed precision, Adam
PARAMETERS, GRADIENTS, _ = (color(kind) for kind in KINDS)
TRAVEL, STEP = color("communication"), color("step")
ON_ITS_WAY = {"hatch": "////", "edgecolor": color("parameters"), "linewidth": 0}


def keys(axes: Axes, y: float, entries: list[tuple[float, str, str, float]]) -> None:
    """A legend: where, its colour and how strong, what it means."""
    for x, shade, text, strength in entries:
        bar(axes, x, y - 0.09, 0.3, 0.18, shade, alpha=strength)
        words(axes, x + 0.4, y, text, ha="left")


def zero() -> None:
    """What each of four ranks holds, with DDP and in three stages."""
    figure, axes = paper(10.4, 5.0)
    scale, width, pitch = 0.2, 0.42, 0.5  # inches: of a byte, of a rank, from rank to rank
    stages = {
        "DDP": "16 Ψ",
        "stage 1": "4 Ψ + 12 Ψ / N",
        "stage 2": "2 Ψ + 14 Ψ / N",
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
    keys(axes, 0.2, [(x, color(kind), kind, 1.0) for x, kind in entries])
    says = "2 + 2 + 12 bytes a parameter: Adam in mixed precision"
    words(axes, 9.88, 0.2, says, color=PALE, ha="right")
    save(figure, "zero")


def zero1() -> None:
    """Parameters end to end, cut into four shards; what becomes of them in a step."""
    figure, axes = paper(10.2, 4.3)
    tensors = [("embedding", 3.3), ("weight", 1.5), ("bias", 0.35), ("weight", 2.4), ("bias", 0.35)]
    left, whole = 1.4, 8.4
    x = left
    for title, width in tensors:
        bar(axes, x, 3.45, width, 0.45, PARAMETERS, linewidth=1.5)
        if width > 0.5:
            words(axes, x + 0.12, 3.67, title, color=ink(PARAMETERS), ha="left")
        else:
            words(axes, x + width / 2, 4.05, title, 8.5)
        x += width
    bar(axes, x, 3.45, left + whole - x, 0.45, EMPTY)
    words(axes, (x + left + whole) / 2, 4.05, "zeros", 8.5, color=PALE)
    for y, title in (
        (3.67, "parameters"),
        (2.61, "their owners"),
        (1.65, "a step"),
        (0.41, "all ranks"),
    ):
        words(axes, 0.15, y, title, 10, ha="left")
    width = whole / 4
    for rank, shade in enumerate(RANKS[:4]):
        x = left + rank * width
        middle = x + width / 2
        if rank:
            axes.plot([x, x], [2.35, 4.0], color=INK, lw=1.3, ls=(0, (4, 3)), zorder=4)
        bar(axes, x + 0.04, 2.4, width - 0.08, 0.42, shade)
        words(axes, middle, 2.61, f"rank {rank}", 10, color=ink(shade), fontweight="bold")
        arrow(axes, (middle, 2.37), (middle, 2.03), color=STEP, linewidth=2)
        box(axes, x + 0.2, 1.3, width - 0.4, 0.7, edgecolor=shade, linewidth=1.8)
        words(axes, middle, 1.65, "optimizer states\nof this shard", 9)
        arrow(axes, (middle, 1.27), (middle, 0.67), color=TRAVEL, linewidth=2)
        bar(axes, x, 0.2, width, 0.42, PARAMETERS)
        words(axes, middle, 0.41, f"from rank {rank}", 9, color=ink(PARAMETERS))
    words(axes, left + whole / 2, 0.95, "all_gather", 10)
    save(figure, "zero1")


def zero2() -> None:
    """An all_reduce is a reduce_scatter and an all_gather; stage 2 takes the step in between."""
    figure, axes = paper(10.2, 4.65)

    def blocks(x: float, y: float, shade: str, shared: bool, strength: float = 1.0) -> None:
        """Four ranks, one below the other, with four blocks each."""
        for rank in range(4):
            for block in range(4):
                there = not shared or block == rank
                looks = {"alpha": strength} if there else {}
                place = x + 0.3 * block, y + 0.35 - 0.32 * rank
                bar(axes, *place, 0.3, 0.27, shade if there else EMPTY, **looks)

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
        blocks(0.2, y, GRADIENTS, False, 0.4)
        for number in range(3):
            move, shade, shared = moves[3 * number : 3 * number + 3]
            x = 1.5 + 2.87 * number
            travels = move != "step"
            arrow(axes, (x, y), (x + 1.4, y), color=TRAVEL if travels else STEP, linewidth=2.2)
            words(axes, x + 0.7, y + 0.2, move)
            words(axes, x + 0.7, y - 0.22, "Ψ (N − 1) / N" if travels else "", 8.5, color=PALE)
            blocks(x + 1.52, y, shade, shared)
    entries = [(0.2, GRADIENTS, "gradients of a rank's own rows", 0.4)]
    entries += [(3.6, GRADIENTS, "mean gradients", 1.0), (6.0, PARAMETERS, "new parameters", 1.0)]
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
                bar(axes, x, y, 0.98, 0.4, PARAMETERS, alpha=0.4)
            elif layer == following:
                bar(axes, x, y, 0.98, 0.4, EMPTY, **ON_ITS_WAY)
                travels += [f"gathers {layer}"]
            bar(axes, x + 0.98 / 4, y, 0.98 / 4, 0.4, PARAMETERS)
        travels += [f"reduces {at}"] if what == "backward" else []
        words(axes, x + 0.49, 0.98, "\n".join(travels), 8.5, va="top")
    entries = [(1.05, PARAMETERS, "its own shard", 1.0)]
    entries += [(3.0, PARAMETERS, "gathered to compute with", 0.4)]
    keys(axes, 0.2, entries)
    bar(axes, 5.8, 0.11, 0.3, 0.18, EMPTY, **ON_ITS_WAY)
    words(axes, 6.2, 0.2, "in flight, for the next layer", ha="left")
    save(figure, "zero3")


if __name__ == "__main__":
    zero()
    zero1()
    zero2()
    zero3()
