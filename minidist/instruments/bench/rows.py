"""What was timed: rows of a table, of a picture and of a file; and how each target stands."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any


@dataclass(eq=False)
class Noise:
    """Rounds in which other processes took part of the machine, of one measurement."""

    thrown: int = 0  # away, and taken again
    kept: int = 0  # all the same, for too many had been thrown away
    watched: bool = True  # whether the machine says what others take

    def add(self, other: "Noise") -> None:
        """Count another's as well."""
        self.thrown, self.kept = self.thrown + other.thrown, self.kept + other.kept
        self.watched = self.watched and other.watched

    def __str__(self) -> str:
        if not self.watched:
            return "nothing was thrown away: this machine does not say what other processes take"
        said = f"rounds thrown away because other processes took part of the machine: {self.thrown}"
        return said + (f"; kept all the same: {self.kept}" if self.kept else "")


@dataclass(frozen=True)
class Row:
    """Something timed, beside what it is compared with: seconds of each round."""

    what: str
    seconds: list[float]
    against: str = ""
    theirs: tuple[float, ...] = ()
    noise: Noise = field(default_factory=Noise)

    @property
    def ratios(self) -> list[float]:
        """How many times faster than the other, round by round."""
        return [t / s for s, t in zip(self.seconds, self.theirs, strict=bool(self.theirs))]

    def record(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        found: dict[str, Any] = {"what": self.what, "seconds": _summary(self.seconds)}
        if self.theirs:
            found["against"] = {"what": self.against, "seconds": _summary(self.theirs)}
            found["times faster"] = _summary(self.ratios)
        thrown = self.noise.thrown if self.noise.watched else None
        return found | {"rounds thrown away": thrown, "noisy rounds kept": self.noise.kept}


@dataclass(frozen=True)
class Target:
    """What the rows shall say, case by case: how many times faster `(what, against)` is to be."""

    name: str
    reach: dict[tuple[str, str], float]

    def measured(self, rows: Iterable[Row]) -> list[float | None]:
        """The median ratio of each case; None where it was not measured."""
        found = {(row.what, row.against): median(row.ratios) for row in rows if row.theirs}
        return [found.get(case) for case in self.reach]

    def stands(self, rows: Iterable[Row]) -> str:
        """met, missed, or not measured (in part)."""
        pairs = list(zip(self.measured(rows), self.reach.values(), strict=True))
        if any(ratio is not None and ratio < reach for ratio, reach in pairs):
            return "missed"
        return "not measured" if any(ratio is None for ratio, _ in pairs) else "met"

    def line(self, rows: Sequence[Row]) -> str:
        """All of it."""
        measured = " / ".join("–" if r is None else _number(r) for r in self.measured(rows))
        reach = " / ".join(map(_number, dict.fromkeys(self.reach.values())))
        return f"{self.stands(rows):12} {self.name}: {measured} × (reach {reach} ×)"


def noise(rows: Iterable[Row]) -> Noise:
    """Of all the measurements together that the rows are from."""
    total = Noise()
    for each in {row.noise for row in rows}:
        total.add(each)
    return total


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
    print(noise(rows))


def _spread(values: Sequence[float], scale: float = 1, unit: str = "") -> str:
    low, middle, high = (_number(scale * v) for v in (min(values), median(values), max(values)))
    return f"{middle}{unit} ({low}–{high})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _summary(values: Sequence[float]) -> dict[str, Any]:
    return {"median": median(values), "min": min(values), "max": max(values), "all": list(values)}


def draw(title: str, rows: list[Row], picture: Path) -> None:
    """The same as a picture: dots are medians, lines reach from the smallest to the largest."""
    from minidist.instruments.plot import human_time, palette

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
