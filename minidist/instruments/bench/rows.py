"""What was timed: rows of a table; and how each target stands."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Row:
    """Something timed, beside what it is compared with: seconds of each round. In so many rounds
    that are `disturbed`, other processes took part of the machine."""

    what: str
    seconds: Sequence[float]
    against: str = ""
    theirs: Sequence[float] = ()
    disturbed: int = 0

    @property
    def ratios(self) -> list[float]:
        """How many times faster than the other, round by round."""
        return [t / s for s, t in zip(self.seconds, self.theirs, strict=bool(self.theirs))]


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
    if most := max(row.disturbed for row in rows):
        print(f"other processes took part of the machine, in up to {most} rounds of a row")


def _spread(values: Sequence[float], scale: float = 1, unit: str = "") -> str:
    low, middle, high = (_number(scale * v) for v in (min(values), median(values), max(values)))
    return f"{middle}{unit} ({low}–{high})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
