"""The chart of the lesson long_sequences: which rank computes which pairs of tokens, and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minidist.instruments.plot.frame import chart, legend, ticks
from minidist.instruments.plot.palette import RANKS, ink, paler

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
        from matplotlib.patches import Patch, Rectangle

        for query in range(len(owner)):
            for key in range(query + 1):
                rank, step = owner[query], (owner[query] - owner[key]) % ranks
                counts[step][rank] += 1
                shade = paler(RANKS[rank], step)
                ax.add_patch(Rectangle((key, query), 1, 1, fc=shade, ec="white"))
                ax.text(key + 0.5, query + 0.5, str(step), color=ink(shade), **look)
        marks = range(0, len(owner) + 1, ranks)
        ax.set(xlim=(0, len(owner)), ylim=(len(owner), 0), aspect="equal")
        ax.set(xticks=marks, yticks=marks, xlabel="key (position)", ylabel="query (position)")
        with chart(ax.inset_axes((0.58, 0.62, 0.42, 0.36)), "", 0, 0) as bars:
            for step, row in enumerate(counts):
                for rank, count in enumerate(row):
                    at = step + (rank - (ranks - 1) / 2) * 0.8 / ranks
                    shades = dict[str, Any](fc=paler(RANKS[rank], step), ec=RANKS[rank], lw=0.6)
                    bars.bar(at, count, 0.8 / ranks, **shades)
            bars.set(xticks=range(ranks), ylim=(0, (len(owner) / ranks) ** 2))  # a whole block
            bars.tick_params(labelsize=8)
            bars.set_xlabel("step", size=8, labelpad=1)
            bars.set_ylabel("pairs", size=8, labelpad=1)
            ticks(bars.yaxis, lambda value: f"{value:g}", whole=True)
        legend(ax, [Patch(color=RANKS[rank], label=f"rank {rank}") for rank in range(ranks)])
        return ax
