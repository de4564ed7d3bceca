"""Code names a lesson by its name, and each of its files stands for one thing."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "minidist").rglob("*.py"))
LESSONS = {file.stem.partition("_")[2] for file in (ROOT / "notebooks").glob("[0-9]*_*.ipynb")}
# By a number, which another lesson would change; and by name, as in "Lesson: zero".
NUMBERED, NAMED = re.compile(r"lessons?:? \d+", re.I), re.compile(r"lesson:\s+(\w+)", re.I)


def unknown(text: str) -> list[str]:
    """What a text says of lessons that the course does not have."""
    return [*NUMBERED.findall(text), *(name for name in NAMED.findall(text) if name not in LESSONS)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_lesson_goes_by_its_name(file: Path) -> None:
    assert unknown(file.read_text()) == []


def test_what_is_no_name_is_found() -> None:
    assert unknown("(lesson 4) Lessons 3 to 9 Lesson: zero Lesson: 8 lesson:\n    nine") == [
        *("lesson 4", "Lessons 3", "Lesson: 8"),
        *("8", "nine"),
    ]


def test_no_two_files_have_one_name() -> None:
    """But for those that begin a room, and its idea. Benchmarks and checks of lessons have the name
    of what they are for."""
    found = Counter(file.name for file in FILES if file.parent.name not in ("bench", "checks"))
    twice = {name for name, count in found.items() if count > 1}
    assert twice <= {"__init__.py", "naive.py"}
