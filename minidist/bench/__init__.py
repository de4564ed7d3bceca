"""`python -m minidist bench`: our figures beside torch's, taken in turns in one run.

A laptop's speed drifts, so a time alone says little. Here A, B, A, B, … are timed in turns, and
the *ratio* of each pair is what counts: its median, and its spread from the smallest to the
largest. Each benchmark is a module of this room with `run(rounds, folder)`.
"""

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
    low, middle, high = (f"{scale * v:.3g}" for v in (min(values), median(values), max(values)))
    return f"{middle}{unit} ({low}–{high})"


def run(names: list[str], rounds: int, folder: Path) -> None:
    """Run benchmarks by name, and leave a PNG of each in `folder`."""
    from minidist.bench import collectives, launch

    benchmarks = {"launch": launch.run, "collectives": collectives.run}
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads in this process")
    for name in names:
        picture = folder / f"bench_{name}.png"
        benchmarks[name](rounds, picture)
        print(f"drawn: {picture}")


NAMES = ["launch", "collectives"]
