"""The chart of the lesson long_sequences: which rank computes which pairs of tokens, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minidist.plot.frame import chart, legend, ticks
from minidist.plot.palette import RANKS, ink, paler, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def pairs(cuts: Mapping[str, Sequence[Sequence[int]]]) -> Figure:
    """Causal attention in a ring, a column for each cut: {its name: the positions of each rank}.

    Above, a square for each query and each key that it sees, with the step in which it is
    computed. Below, how many each rank computes in each step: the highest bar is the step's time.
    Lesson: long_sequences.
    """
    with style() as plt:
        options: dict[str, Any] = {"height_ratios": (2.1, 1), "sharey": "row"}
        size = (3.4 * len(cuts) + 1.2, 5.6)
        figure, panels = plt.subplots(2, len(cuts), figsize=size, layout="constrained", **options)
        from matplotlib.patches import Patch

        look: dict[str, Any]
        for number, (name, positions) in enumerate(cuts.items()):
            ranks, above, below = len(positions), panels[0, number], panels[1, number]
            owner = {int(at): rank for rank, own in enumerate(positions) for at in own}
            counts = [[0] * ranks for _ in range(ranks)]  # [step][rank]
            with chart(above, name, 0, 0):
                for query in range(len(owner)):
                    for key in range(query + 1):
                        rank, step = owner[query], (owner[query] - owner[key]) % ranks
                        counts[step][rank] += 1
                        shade = paler(RANKS[rank], step)
                        above.add_patch(plt.Rectangle((key, query), 1, 1, fc=shade, ec="white"))
                        look = {"ha": "center", "va": "center", "size": 6.5}
                        above.text(key + 0.5, query + 0.5, str(step), color=ink(shade), **look)
                marks = range(0, len(owner) + 1, ranks)
                above.set(xlim=(0, len(owner)), ylim=(len(owner), 0), aspect="equal")
                above.set(xticks=marks, yticks=marks, xlabel="key (position)")
            longest = sum(map(max, counts))
            with chart(below, f"highest bars together: {longest}", 0, 0, 6):
                for step, row in enumerate(counts):
                    for rank, count in enumerate(row):
                        at = step + (rank - (ranks - 1) / 2) * 0.8 / ranks
                        look = {"fc": paler(RANKS[rank], step), "ec": RANKS[rank], "lw": 0.6}
                        below.bar(at, count, 0.8 / ranks, **look)
                below.set_xticks(range(ranks))
                below.set_xlabel("step of the ring")
                ticks(below.yaxis, lambda value: f"{value:g}")
        panels[0, 0].set_ylabel("query (position)")
        panels[1, 0].set_ylabel("pairs of tokens")
        legend(panels[0, -1], [Patch(color=RANKS[r], label=f"rank {r}") for r in range(ranks)])
        return figure
