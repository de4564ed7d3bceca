"""`python -m minidist bench`: our figures beside torch's, taken in turns in one run.

A laptop's speed drifts, so a time alone says little. Here A, B, A, B, … are timed in turns, and
the *ratio* of each pair is what counts: its median, and its spread from the smallest to the
largest. Each benchmark is a module of this room with `run(rounds, folder)`.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch


@dataclass(frozen=True)
class Row:
    """Something timed, beside what it is compared with: seconds of each round."""

    what: str
    seconds: list[float]
    against: str = ""
    theirs: tuple[float, ...] = ()

    @property
    def ratios(self) -> list[float]:
        """How many times faster than the other, round by round."""
        return [t / s for s, t in zip(self.seconds, self.theirs, strict=bool(self.theirs))]


def in_turns(subjects: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Call each subject once a round: the seconds that each one reports."""
    taken: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, subject in subjects.items():
            taken[name].append(subject())
    return taken


def show(title: str, rows: list[Row]) -> None:
    """Print a table: times in milliseconds, median (smallest to largest)."""
    print(f"\n{title}")
    table = [("", "ms", "against", "ms", "times faster")]
    for row in rows:
        ours, theirs, ratio = _spread(row.seconds, 1e3), "", ""
        if row.theirs:
            theirs, ratio = _spread(row.theirs, 1e3), _spread(row.ratios, unit="×")
        table.append((row.what, ours, row.against, theirs, ratio))
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    for line in table:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        print("  ".join([line[0].ljust(widths[0]), *cells[1:]]).rstrip())


def _spread(values: Sequence[float], scale: float = 1, unit: str = "") -> str:
    ordered = (scale * value for value in (min(values), median(values), max(values)))
    low, middle, high = (f"{v:,.0f}" if v >= 100 else f"{v:.3g}" for v in ordered)
    return f"{middle}{unit} ({low}–{high})"


def draw(title: str, rows: list[Row], picture: Path) -> None:
    """The same as a picture: dots are medians, lines reach from the smallest to the largest."""
    from minidist.plot import human_time, palette

    with palette.style() as plt:
        figure, axes = plt.subplots(figsize=(8, 1.2 + 0.5 * len(rows)), layout="constrained")
        for y, row in enumerate(rows):
            sides = [("minidist", row.seconds, -0.12, palette.RANKS[0])]
            if row.theirs:
                sides.append((row.against, list(row.theirs), 0.12, palette.INK))
            for name, seconds, shift, shade in sides:
                middle = median(seconds)
                axes.plot([min(seconds), max(seconds)], [y + shift] * 2, color=shade, linewidth=2)
                axes.plot(middle, y + shift, "o", color=shade)
                text = f"  {name} {human_time(middle)}"
                axes.annotate(text, (max(seconds), y + shift), va="center", color=shade)
        axes.set_xscale("log")
        axes.set_xlim(right=10 * axes.get_xlim()[1])  # room for the names
        axes.set_yticks(range(len(rows)), [row.what for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlabel("seconds")
        axes.set_title(title, loc="left", fontweight="bold")
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(picture)
        plt.close(figure)


def run(names: list[str], rounds: int, folder: Path) -> None:
    """Run benchmarks by name, and leave a PNG of each in `folder`."""
    benchmarks = {name: importlib.import_module(f"minidist.bench.{name}").run for name in names}
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads in this process")
    for name in names:
        picture = folder / f"bench_{name}.png"
        benchmarks[name](rounds, picture)
        print(f"drawn: {picture}")


NAMES = ["launch", "collectives", "ddp", "pipeline", "tensor", "zero", "fsdp"]
