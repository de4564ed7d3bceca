"""Charts of tokens: which pairs of them a rank computes, and to which experts they go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minidist.instruments.plot.frame import chart, legend, swatches, ticks
from minidist.instruments.plot.palette import INK, PALE, RANKS, area, darker, ink, paler

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def pairs(positions: Sequence[Sequence[int]], ax: Axes | None = None, title: str = "Pairs") -> Axes:
    """Causal attention in a ring: a square for each query and each key that it sees, in the colour
    of the query's rank, paler for later steps of the ring, whose number is written in it. The bars
    say how many pairs each rank computes in each step.

    positions: of each rank's tokens in the sequence. Lesson: long_sequences.
    """
    owner = {int(at): rank for rank, own in enumerate(positions) for at in own}
    if not owner:
        raise ValueError("pairs: no tokens to draw")
    ranks, look = len(positions), dict[str, Any](ha="center", va="center", size=6.5)
    counts = [[0] * ranks for _ in positions]  # [step][rank]
    with chart(ax, title, 5.6, 4.4) as ax:
        from matplotlib.patches import Rectangle

        for query in range(len(owner)):
            for key in range(query + 1):
                rank, step = owner[query], (owner[query] - owner[key]) % ranks
                counts[step][rank] += 1
                shade = paler(RANKS[rank], step)
                ax.add_patch(Rectangle((key, query), 1, 1, **area(shade)))
                ax.text(key + 0.5, query + 0.5, str(step), color=ink(shade), **look)
        marks = range(0, len(owner) + 1, ranks)
        ax.set(xlim=(0, len(owner)), ylim=(len(owner), 0), aspect="equal")
        ax.set(xticks=marks, yticks=marks, xlabel="key (position)", ylabel="query (position)")
        with chart(ax.inset_axes((0.58, 0.62, 0.42, 0.36)), "", 0, 0) as bars:
            for step, row in enumerate(counts):
                for rank, count in enumerate(row):
                    at = step + (rank - (ranks - 1) / 2) * 0.8 / ranks
                    shade = paler(RANKS[rank], step)
                    bars.bar(at, count, 0.8 / ranks, **area(shade))
            bars.set(xticks=range(ranks), ylim=(0, (len(owner) / ranks) ** 2))  # a whole block
            bars.tick_params(labelsize=8)
            bars.set_xlabel("step", size=8, labelpad=1)
            bars.set_ylabel("pairs", size=8, labelpad=1)
            ticks(bars.yaxis, lambda value: f"{value:g}", whole=True)
        legend(ax, swatches({f"rank {rank}": RANKS[rank] for rank in range(ranks)}))
        return ax


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
                    ax.plot((0, 1), ends, style, color=darker(RANKS[rank]), lw=1.5)
        for rank, tokens in enumerate(chosen):
            for x, count in ((0, len(tokens)), (1, n)):
                ys = [rank * tall + i for i in range(count)]
                shade = RANKS[rank]
                ax.plot([x] * count, ys, "os"[x], color=shade, mec=darker(shade), ms=9, lw=0)
            ax.text(-0.06, rank * tall, f"rank {rank}, tokens: {len(tokens)}", ha="right", **look)
            for i in range(n):
                ax.text(1.04, rank * tall + i, f"expert {rank * n + i}", **look)
            ax.text(1.34, rank * tall, f"rank {rank}, rows: {rows[rank]}", **look)
        ax.set(xlim=(-0.4, 1.75), ylim=(ranks * tall - 1, -0.8), xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
        kinds = (("-", "to another rank"), (":", "stays"))
        legend(ax, [ax.plot([], [], how, color=PALE, label=said)[0] for how, said in kinds])
        return ax
