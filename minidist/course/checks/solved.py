"""What a learner has solved: kept in the learner's own folder, shown on the start page.

    from minidist.course.checks import progress

    progress()

`make lab` copies the lessons to `my/` and leaves a list there of what it copied (see
notebooks/my_copy.py). By that list a check knows that it runs in a learner's copy, or in a folder
of it, and writes down beside the list what is solved. What the solutions solve does not count. Nor
is anything kept among the originals, where the course is tested.
"""

import contextlib
import fcntl
import html
import importlib
import json
import os
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

COPIED, SOLVED, SCORES = ".copied.json", ".solved.json", "league"
SHARED = {"kept", "solved", "units_in_a_row", "verdict"}  # what is no lesson
SHORT_WAY = (  # ten lessons, each complete without the others
    *("rank", "collectives", "communication", "distributed_data_parallel", "layer_splitting"),
    *("feature_splitting", "mixed_parallelism", "zero", "fully_sharded", "real_tools"),
)


def remember(name: str, check: str, score: float | None = None) -> None:
    """Write down, if this is a learner's copy, that a check of the lesson of this name is solved,
    and with which score: the least counts. Where it cannot be written, nothing is kept: the check
    has answered all the same."""
    if not (folder := copy()):
        return
    with contextlib.suppress(OSError), _alone_in(folder):
        before, best = read(folder), scores(folder)
        found = before | {name: sorted({*before.get(name, []), check})}
        if score is not None:
            best = best | {check: min(score, best.get(check, score))}
        if (found, best) != (before, scores(folder)):
            written = json.dumps({**found, SCORES: best} if best else found, indent=1)
            (folder / SOLVED).write_text(written)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Two notebooks may solve something at the same moment: one waits."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def read(folder: Path) -> dict[str, list[str]]:
    """What is solved, {lesson: [check, …]}. Of a broken or foreign file, what can be read of it."""
    lists = {name: each for name, each in _read(folder).items() if isinstance(each, list)}
    return {
        name: [check for check in each if isinstance(check, str)] for name, each in lists.items()
    }


def scores(folder: Path) -> dict[str, float]:
    """The best score of each check of the league that is solved."""
    found = _read(folder).get(SCORES)
    pairs = found.items() if isinstance(found, dict) else ()
    return {check: float(score) for check, score in pairs if isinstance(score, int | float)}


def _read(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / SOLVED).read_text())
    except (OSError, ValueError):  # there is none, or it is broken
        return {}
    return found if isinstance(found, dict) else {}


class Step(NamedTuple):
    """A lesson in a learner's list: its notebook, how many checks it has, which are still open."""

    notebook: str
    checks: int
    still: list[str]

    def __repr__(self) -> str:
        solved = f"{self.checks - len(self.still)} of {self.checks}"
        return f"{self.notebook:30}{solved:10}{', '.join(self.still)}".rstrip()


class Progress(NamedTuple):
    """What is solved in each lesson, what is open, and what comes next: as text, and in a learner's
    copy with links."""

    steps: list[Step]
    in_copy: bool

    def next(self) -> Step | None:
        """The first lesson with something open, from the last one on in which a check is solved."""
        begun = [i for i, step in enumerate(self.steps) if len(step.still) < step.checks]
        turned = self.steps[max(begun, default=0) :] + self.steps
        return next((step for step in turned if step.still), None)

    def __repr__(self) -> str:
        still = sum(len(step.still) for step in self.steps)
        checks, step = sum(step.checks for step in self.steps), self.next()
        after = f"next: {step.still[0]} in {step.notebook}" if step else "all are solved"
        total = f"{'all':30}{checks - still} of {checks}, {after}"
        return "\n".join([f"{'lesson':30}{'solved':10}still open", *map(repr, self.steps), total])

    def _repr_html_(self) -> str | None:
        if not self.in_copy:  # what a lesson stores is the text
            return None
        text = html.escape(repr(self))
        for name in (step.notebook for step in self.steps):
            at = (
                "" if Path(f"{name}.ipynb").exists() else "../"
            )  # in another language: a folder below
            text = re.sub(rf"\b{name}\b", f'<a href="{at}{name}.ipynb">{name}</a>', text)
        return f"<pre>{text}</pre>"


def progress() -> Progress:
    """How many puzzles and exercises are solved in each lesson, which of them are open, by the
    names of their checks, and which comes next. Call it in the folder of the lessons."""
    folder = copy()
    done = read(folder) if folder else {}
    around = [folder] if folder else [Path(), Path("..")]  # in another language: a folder below
    stems = {p.stem[3:]: p.stem for at in around for p in at.glob("[0-9][0-9]_*.ipynb")}
    steps = []
    for lesson in sorted(_lessons(), key=lambda name: stems.get(name, name)):
        checks = _checks(lesson)
        still = [check for check in checks if check not in done.get(lesson, [])]
        steps.append(Step(stems.get(lesson, lesson), len(checks), still))
    return Progress(steps, folder is not None)


class League(NamedTuple):
    """Scores: (lesson and exercise, the learner's or None, the library's, the bound, of what), the
    less the better."""

    rows: list[tuple[str, float | None, float, float, str]]

    def __repr__(self) -> str:
        lines = [f"{'exercise':36}{'yours':>8}{'library':>10}{'bound':>8}   of what"]
        for name, own, library, bound, what in self.rows:
            yours = "" if own is None else f"{own:,g}"
            lines.append(f"{name:36}{yours:>8}{library:10,g}{bound:8,g}   {what}")
        return "\n".join(lines)


def league() -> League:
    """The exercises that have a score, the same on any machine: yours, the library's, and a bound
    that nothing can beat. Call it in the folder of the lessons."""
    folder = copy()
    best = scores(folder) if folder else {}
    rows = []
    for lesson in _lessons():
        for name, check in _found(lesson).items():
            if goals := check.says.get("league"):
                numbers = best.get(name), goals["library"], goals["bound"]
                rows.append((f"{lesson}: {name}", *numbers, goals["what"]))
    return League(rows)


def copy() -> Path | None:
    """The learner's copy in which this notebook runs, if it is one."""
    here = Path.cwd()
    around = () if here.name == "solutions" else (here, here.parent)
    return next((folder for folder in around if (folder / COPIED).exists()), None)


def _lessons() -> list[str]:
    package = importlib.import_module(__package__)
    return [each.name for each in pkgutil.iter_modules(package.__path__) if each.name not in SHARED]


def _checks(name: str) -> list[str]:
    """The names of a lesson's checks, in its order."""
    return [*_found(name)]


def _found(name: str) -> dict[str, Any]:
    verdict = importlib.import_module(f"{__package__}.verdict")
    module = importlib.import_module(f"{__package__}.{name}")
    return {each: thing for each, thing in vars(module).items() if isinstance(thing, verdict.Check)}
