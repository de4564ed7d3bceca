"""Heat maps: a number for each pair of things."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from minidist.instruments.plot.frame import chart
from minidist.instruments.plot.palette import FAINT, GROUND, PALE, RANKS, color, human_bytes, ink

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from minidist.instruments.measure import TrafficCounter


def traffic(
    counters: Iterable[TrafficCounter], ax: Axes | None = None, title: str = "Bytes sent"
) -> Axes:
    """Lesson: networks. A heat map of bytes sent, a row a sender and a column a receiver.

    `counters` are those of all ranks, in any order. Behind each row stands what that rank sent
    in all, under each column what that rank received.
    """
    counters = list(counters)
    sent = {counter.rank: list(counter.sent_to) for counter in counters}
    if not sent:
        raise ValueError("traffic: no counters to draw")
    world = max(counter.world_size for counter in counters)
    if absent := [str(rank) for rank in range(world) if rank not in sent]:
        raise ValueError(f"traffic: the counter of rank {', '.join(absent)} is missing")
    rows = [sent[rank] for rank in range(world)]
    side = min(0.8 * world, 6.5)  # inches
    font, gap = (9.5, " ") if world <= 8 else (6.5, "\n")

    def words(nbytes: int) -> str:
        return human_bytes(nbytes).replace(" ", gap)

    with chart(ax, title, max(side + 2.2, 4), max(side + 1.2, 2.6)) as ax:
        from matplotlib.colors import LinearSegmentedColormap, to_hex

        shades = LinearSegmentedColormap.from_list("bytes", [GROUND, color("communication")])
        most = max(1, *map(max, rows))
        ax.imshow(rows, cmap=shades, vmin=0, vmax=most)
        for i, row in enumerate(rows):
            for j, nbytes in enumerate(row):
                said = words(nbytes) if nbytes or i != j else "–"
                tone = ink(to_hex(shades(nbytes / most))) if nbytes else PALE
                ax.text(j, i, said, ha="center", va="center", size=font, color=tone, gid="cell")
            received = sum(other[i] for other in rows)
            ax.text(world - 0.35, i, words(sum(row)), va="center", size=font, gid="sent")
            ax.text(i, world - 0.35, words(received), ha="center", va="top", size=font)
        ax.text(world - 0.35, -0.65, "sent in all", va="bottom", size=9.5, color=PALE)
        ax.text(-0.65, world - 0.35, "received\nin all", ha="right", va="top", size=9.5, color=PALE)
        ax.set_xticks([edge - 0.5 for edge in range(world + 1)], minor=True)
        ax.set_yticks([edge - 0.5 for edge in range(world + 1)], minor=True)
        ax.grid(which="minor", color=FAINT)
        ax.set_xticks(range(world))
        ax.set_yticks(range(world))
        ax.set_xlabel("receiver (rank)")
        ax.set_ylabel("sender (rank)")
        ax.xaxis.tick_top()
        ax.xaxis.set_label_position("top")
        ax.tick_params(which="both", length=0)
        ax.spines[:].set_visible(False)
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


def weights(
    found: Mapping[str, Mapping[str, tuple[float, float]]],
    title: str = "Whose gradients?",
    ax: Axes | None = None,
) -> Axes:
    """A row for each run, a column for each micro-batch, and in it the weight of its gradient.

    found: {run: {micro-batch: (its weight, the right weight)}}, of the same micro-batches in each
    run. What weighs too little is blue, too much red, and what is right is white. Lesson:
    wrong_in_silence.
    """
    if not found:
        raise ValueError("weights: no run to draw")
    with chart(ax, title, 4, 0.9 + 0.32 * len(found)) as ax:
        from matplotlib import colormaps
        from matplotlib.colors import to_hex

        shades, low, high = colormaps["RdBu_r"], -0.4, 2.4
        times = [[weight / right for weight, right in row.values()] for row in found.values()]
        ax.imshow(times, cmap=shades, vmin=low, vmax=high, aspect="auto")
        for y, (row, ratios) in enumerate(zip(found.values(), times, strict=True)):
            for x, ((weight, _), ratio) in enumerate(zip(row.values(), ratios, strict=True)):
                shade = ink(to_hex(shades((ratio - low) / (high - low))))
                shown = weight if abs(ratio) > 1e-9 else 0
                ax.text(x, y, f"{shown:.3g}", ha="center", va="center", size=9, color=shade)
        columns = list(next(iter(found.values())))
        ax.set_xticks(range(len(columns)), columns)
        ax.set_yticks(range(len(found)), list(found))
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
        return ax
