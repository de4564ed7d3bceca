"""The charts of the lesson experts: which token goes to which expert, and how full each one is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minidist.instruments.plot.frame import chart, legend
from minidist.instruments.plot.palette import INK, PALE, RANKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def routing(
    chosen: Sequence[Sequence[Sequence[int]]],
    experts: int = 8,
    ax: Axes | None = None,
    title: str = "Tokens and their experts",
) -> Axes:
    """Tokens at the left, experts at the right, in the colours of the ranks that have them, and a
    line from each token to each expert that it has chosen. A line is dotted if its row stays on its
    rank. Behind the experts of a rank stand the rows that they get.

    chosen[rank][token]: its experts. Each rank has experts / ranks of them. Lesson: experts.
    """
    ranks = len(chosen)
    if not ranks or experts % ranks or not any(map(len, chosen)):
        raise ValueError(f"routing: no tokens to draw, or {experts} experts on {ranks} ranks")
    n, rows = experts // ranks, [0] * ranks
    tall = max(n, *map(len, chosen)) + 0.7  # what a rank takes
    look: dict[str, Any] = {"va": "center", "size": 9, "color": INK}
    with chart(ax, title, 7, 0.9 + 0.24 * tall * ranks) as ax:
        for rank, tokens in enumerate(chosen):
            for token, own in enumerate(tokens):
                for expert in own:
                    there, style = expert // n, ":" if expert // n == rank else "-"
                    rows[there] += 1
                    ends = rank * tall + token, there * tall + expert % n
                    ax.plot((0, 1), ends, style, color=RANKS[rank], lw=1.5, alpha=0.85)
        for rank, tokens in enumerate(chosen):
            for x, count in ((0, len(tokens)), (1, n)):
                ys = [rank * tall + i for i in range(count)]
                ax.plot([x] * count, ys, "os"[x], color=RANKS[rank], ms=9, lw=0)
            ax.text(-0.06, rank * tall, f"rank {rank}, tokens: {len(tokens)}", ha="right", **look)
            for i in range(n):
                ax.text(1.04, rank * tall + i, f"expert {rank * n + i}", **look)
            ax.text(1.34, rank * tall, f"rank {rank}, rows: {rows[rank]}", **look)
        ax.set(xlim=(-0.4, 1.75), ylim=(ranks * tall - 1, -0.8), xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
        lines = [ax.plot([], [], style, color=PALE, lw=1.5)[0] for style in "-:"]
        for line, words in zip(lines, ("to another rank", "stays"), strict=True):
            line.set_label(words)
        legend(ax, lines)
        return ax


def load(
    counts: Sequence[Sequence[float]],
    ax: Axes | None = None,
    title: str = "Load",
    every: int = 10,
) -> Axes:
    """A heat map: how many rows each expert gets in each step, over an even share. White is even,
    orange too many, blue too few.

    counts[step][expert]. Each column is the mean of `every` steps. Lesson: experts.
    """
    if not len(counts) or not len(counts[0]):
        raise ValueError("load: no rows to draw")
    means = []  # [column][expert]
    for start in range(0, len(counts), every):
        sums = [sum(column) for column in zip(*counts[start : start + every], strict=True)]
        means.append([len(sums) * one / max(1, sum(sums)) for one in sums])
    with chart(ax, title, 9, 2.6) as ax:
        from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm

        shades = LinearSegmentedColormap.from_list("load", [RANKS[0], "white", RANKS[5]])
        image = ax.imshow(
            list(zip(*means, strict=True)),
            cmap=shades,
            norm=TwoSlopeNorm(1, 0, 4),
            aspect="auto",
            interpolation="nearest",
            extent=(0, len(counts), len(counts[0]) - 0.5, -0.5),
        )
        ax.set(xlabel="steps", ylabel="expert", yticks=range(0, len(counts[0]), 5))
        bar = ax.figure.colorbar(image, ax=ax, extend="max", ticks=[0, 1, 2, 3, 4], pad=0.02)
        bar.set_label("rows / even share", size=9.5)
        bar.outline.set_visible(False)
        return ax
