"""Code names a lesson by its name, and each of its files stands for one thing."""

import importlib
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "minidist").rglob("*.py"))
LESSONS = {file.stem.partition("_")[2] for file in (ROOT / "notebooks").glob("[0-9]*_*.ipynb")}
# By a number, which another lesson would change; and by name, as in "Lesson: zero".
NUMBERED, NAMED = re.compile(r"lessons?:? \d+", re.I), re.compile(r"lesson:\s+(\w+)", re.I)


def unknown(text: str) -> list[str]:
    """What a text says of lessons that the course does not have."""
    return [*NUMBERED.findall(text), *(name for name in NAMED.findall(text) if name not in LESSONS)]


def test_a_lesson_goes_by_its_name() -> None:
    found = {file: unknown(file.read_text()) for file in FILES}
    assert {file: names for file, names in found.items() if names} == {}


def test_no_two_files_have_one_name() -> None:
    """But for those that begin a room, and its idea. Benchmarks and checks of lessons have the name
    of what they are for."""
    found = Counter(file.name for file in FILES if file.parent.name not in ("bench", "checks"))
    twice = {name for name, count in found.items() if count > 1}
    assert twice <= {"__init__.py", "naive.py"}


def test_the_map_of_the_house_has_each_room(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "img"))
    house = importlib.import_module("house")
    first = {name for names in house.FIRST.values() for name in names}
    assert first | {"common"} | house.BELOW.keys() == house.rooms(ROOT / "minidist")
    for folder, (_, within) in house.BELOW.items():
        assert within.keys() == house.rooms(ROOT / "minidist" / folder), folder


def test_the_library_in_an_evening_is_as_long_as_it_says() -> None:
    """About 17 lines a minute: a file that grows must say so, and the evening ends."""
    rows = re.findall(r"\]\((\S+\.py)\) \| (\d+) \|", (ROOT / "minidist/README.md").read_text())
    lines = {name: len((ROOT / "minidist" / name).read_text().splitlines()) for name, _ in rows}
    assert sum(lines.values()) <= 3200
    late = {name: lines[name] for name, said in rows if abs(lines[name] / 17 - int(said)) > 2.5}
    assert len(rows) > 15 and not late
