"""What a text names exists: links, lessons, files. The lessons stand in one order everywhere."""

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import nbformat

from minidist.course.checks.solved import SHORT_WAY

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
SOLUTIONS = sorted(ROOT.glob("notebooks/solutions/*.ipynb"))
LESSONS = {path.stem[3:]: int(path.stem[:2]) for path in NOTEBOOKS}  # name: number
KOREAN = sorted(path for kind in ("ipynb", "md") for path in ROOT.glob(f"notebooks/ko/*.{kind}"))
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *NOTEBOOKS, *SOLUTIONS, *KOREAN]
TEXTS += [ROOT / "notebooks/museum/museum.ipynb", ROOT / "notebooks/traces/ten_traces.ipynb"]
SOURCES = [*ROOT.glob("minidist/**/*.py"), *ROOT.glob("tests/*.py"), *ROOT.glob("img/*.py")]


def text_of(path: Path) -> str:
    """The words of a text: of a notebook its markdown cells."""
    if path.suffix != ".ipynb":
        return path.read_text()
    cells = nbformat.read(path, as_version=4).cells
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def wrong_links(text: str, folder: Path) -> Iterator[str]:
    """Links and pictures that lead nowhere, and numbers that are not those of the lesson."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for said, target in re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", text):
        hosting = "../../actions/", "../../deployments/"  # pages of the project's hosting
        if target.startswith(("http", "#", *hosting)):
            continue
        if not (folder / target.partition("#")[0]).exists():
            yield f"[{said}]({target}) leads nowhere"
        number = re.match(r"(?:[Ll]esson )?(\d+)( ·|$)", said)
        stem = Path(target).stem
        if number and stem[:2].isdigit() and int(number[1]) != int(stem[:2]):
            yield f"[{said}]({target}) has another number"


def unknown_lessons(text: str) -> Iterator[str]:
    for name in re.findall(r"\bLesson: (\w+)", text):
        if name not in LESSONS and not name.isupper():
            yield f"Lesson: {name}"


def missing_files(text: str) -> Iterator[str]:
    """Files in quotes that name a folder of this project, and do not exist."""
    folders = "minidist|notebooks|tests|img|scripts|solutions"
    for name in re.findall(rf"`((?:{folders})/[\w./]*\.(?:py|ipynb|md|png|cfg))`", text):
        places = (ROOT / name, ROOT / "notebooks" / name)
        if not Path(name).stem.isupper() and not any(place.exists() for place in places):
            yield name


def test_links_and_files_and_lessons_that_are_named_exist() -> None:
    found = []
    for path in [*TEXTS, *SOURCES]:
        if path.name in ("test_links.py", "test_names.py"):  # examples
            continue
        text = text_of(path)
        faults = [*unknown_lessons(text), *missing_files(text)]
        faults += wrong_links(text, path.parent) if path in TEXTS else []
        found += [f"{path.relative_to(ROOT)}: {each}" for each in faults]
    assert found == []


def test_a_fault_is_found() -> None:
    for text in "[a](nowhere.ipynb)", "[7 · Rank](notebooks/01_rank.ipynb)", "Lesson: nowhere.":
        assert [*wrong_links(text, ROOT), *unknown_lessons(text)], text
    assert [*missing_files("as `minidist/nowhere.py` says, and `minidist/rank.py`, `img/NAME.png`")]
    assert [*wrong_links("[1 · Rank](notebooks/01_rank.ipynb#a), ![](img/rank.png)", ROOT)] == []


# ---- one order ------------------------------------------------------------------------------


def test_numbers_follow_each_other_from_the_start_page() -> None:
    assert list(LESSONS.values()) == list(range(len(LESSONS)))
    assert [path.stem for path in SOLUTIONS] == [path.stem for path in NOTEBOOKS[1:]]


def test_a_title_has_the_number_of_its_file_and_a_lesson_leads_to_the_next() -> None:
    for path in [*NOTEBOOKS[1:], *SOLUTIONS]:
        assert re.match(rf"# {int(path.stem[:2])} · ", text_of(path)), path
    for path, following in zip(NOTEBOOKS[1:], NOTEBOOKS[2:], strict=False):
        assert re.search(rf"\bNext: .*\({following.name}\)", text_of(path)), path


def test_every_table_has_all_lessons_in_order() -> None:
    names = [path.name for path in NOTEBOOKS[1:]]
    table = re.findall(r"^\|.*\(notebooks/(\d\d_\w+\.ipynb)\)", text_of(TEXTS[0]), re.MULTILINE)
    assert table == names
    rows = re.findall(r"^\|.*\((\d\d_\w+\.ipynb)\)", text_of(NOTEBOOKS[0]), re.MULTILINE)
    assert rows == names


def test_the_map_and_the_start_page_say_the_same_of_each_lesson(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "img"))
    parts = runpy.run_path(str(ROOT / "img/start.py"))["PARTS"]
    drawn = [(name, minutes) for _, lessons in parts for name, _, minutes in lessons]
    row = r"^\|[IV ✦]*\| \[.*\(\d\d_(\w+)\.ipynb\) \| (\d+) \|"
    said = re.findall(row, text_of(NOTEBOOKS[0]), re.MULTILINE)
    assert drawn == [(name, int(minutes)) for name, minutes in said]
    assert [name for name, _ in drawn] == list(LESSONS)[1:]


def test_the_start_page_marks_the_short_way() -> None:
    starred = re.findall(r"^\|[IV ]*✦ \| \[.*\(\d\d_(\w+)\.ipynb\)", text_of(NOTEBOOKS[0]), re.M)
    assert {*starred} == {*SHORT_WAY} and len(starred) == 10


def test_the_start_page_tells_about_as_many_minutes_as_a_lesson_takes() -> None:
    minutes = runpy.run_path(str(ROOT / "notebooks/minutes.py"))["minutes"]
    for path in NOTEBOOKS[1:]:
        said = re.search(rf"\({path.name}\) \| (\d+) \|", text_of(NOTEBOOKS[0]))
        assert said and abs(int(said[1]) - minutes(path)) < 10, path.name


def test_the_readme_tells_as_many_hours_as_the_start_page() -> None:
    said = re.findall(r"\(\d\d_\w+\.ipynb\) \| (\d+) \|", text_of(NOTEBOOKS[0]))
    minutes, readme = [0, *map(int, said)], text_of(TEXTS[0])
    ways = re.findall(r"^\| .* \| ([\d, ]+) \| (\d+) \|$", readme, re.MULTILINE)
    assert len(ways) > 2
    for lessons, hours in ways:
        taken = sum(minutes[int(number)] for number in lessons.split(","))
        assert abs(int(hours) - taken / 60) <= 0.6, lessons
    for hours in re.findall(r"1 to \d+ \| (\d+)|about (\d+) hours", readme):
        assert abs(int("".join(hours)) - sum(minutes) / 60) < 1
