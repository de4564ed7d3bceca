"""What a learner has solved: kept in the learner's own folder, shown on the start page.

    from minidist.course.checks import progress

    progress()

`make lab` copies the lessons to `my/` and leaves a list there of what it copied (see
notebooks/my_copy.py). By that list a check knows that it runs in a learner's copy, or in a folder
of it, and writes down beside the list what is solved. What the solutions solve does not count. Nor
is anything kept among the originals, where the course is tested.
"""

import contextlib
import importlib
import json
import pkgutil
from pathlib import Path

COPIED, SOLVED = ".copied.json", ".solved.json"
SHARED = {"solved", "units_in_a_row", "verdict"}  # what is no lesson


def remember(name: str, check: str) -> None:
    """Write down, if this is a learner's copy, that a check of the lesson of this name is solved.
    Where it cannot be written, nothing is kept: the check has answered all the same."""
    with contextlib.suppress(OSError):
        folder = _copy()
        found = read(folder) if folder else {}
        if folder and check not in found.get(name, []):
            found[name] = sorted([*found.get(name, []), check])
            (folder / SOLVED).write_text(json.dumps(found, indent=1, sort_keys=True))


def read(folder: Path) -> dict[str, list[str]]:
    """What is solved, {lesson: [check, …]}. Of a broken or foreign file, what can be read of it."""
    try:
        found = json.loads((folder / SOLVED).read_text())
        pairs = [(lesson, checks) for lesson, checks in found.items() if isinstance(checks, list)]
    except Exception:  # there is none, or it holds whatever it holds
        return {}
    return {lesson: [each for each in checks if isinstance(each, str)] for lesson, checks in pairs}


def progress() -> None:
    """Print how many puzzles and exercises are solved in each lesson, and which of them are
    open, by the names of their checks. Call it in the folder of the lessons."""
    folder = _copy()
    done = read(folder) if folder else {}
    around = [folder] if folder else [Path(), Path("..")]  # in another language: a folder below
    of_lessons = {p.stem[3:]: p.stem for at in around for p in at.glob("[0-9][0-9]_*.ipynb")}
    lines, known, solved = [], 0, 0
    for lesson in sorted(_lessons(), key=lambda name: of_lessons.get(name, name)):
        checks = _checks(lesson)
        still = [check for check in checks if check not in done.get(lesson, [])]
        known, solved = known + len(checks), solved + len(checks) - len(still)
        count = f"{len(checks) - len(still)} of {len(checks)}"
        lines.append(f"{of_lessons.get(lesson, lesson):30}{count:10}{', '.join(still)}".rstrip())
    print(f"{'lesson':30}{'solved':10}still open", *lines, sep="\n")
    print(f"{'all':30}{solved} of {known}")


def _copy() -> Path | None:
    """The learner's copy in which this notebook runs, if it is one."""
    here = Path.cwd()
    around = () if here.name == "solutions" else (here, here.parent)
    return next((folder for folder in around if (folder / COPIED).exists()), None)


def _lessons() -> list[str]:
    package = importlib.import_module(__package__)
    return [each.name for each in pkgutil.iter_modules(package.__path__) if each.name not in SHARED]


def _checks(name: str) -> list[str]:
    """The names of a lesson's checks, in its order."""
    verdict = importlib.import_module(f"{__package__}.verdict")
    module = importlib.import_module(f"{__package__}.{name}")
    return [each for each, thing in vars(module).items() if isinstance(thing, verdict.Check)]
