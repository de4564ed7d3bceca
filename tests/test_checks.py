"""Hints that lead on step by step, numbers that are rounded, and what a learner has solved."""

import importlib
import itertools
import json
import linecache
import math
import re
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import torch
import torch.distributed as dist
from nbclient import NotebookClient
from test_exercises import CHECKS, LESSONS, MODULES, sources
from torch import nn

import minidist as md
from minidist.checks import progress, solved
from minidist.checks.verdict import Check, NotYet, check, hints, number

ROOT = Path(__file__).resolve().parents[1]
EACH = pytest.mark.parametrize(
    ("lesson", "check"),
    [pytest.param(*each, id=f"{each[0]}-{each[1].__name__}") for each in CHECKS],
)


@pytest.fixture(autouse=True)
def new_session(tmp_path, monkeypatch):
    """No check remembers another test, and no test is in the folder of the course."""
    monkeypatch.chdir(tmp_path)
    for _, each in CHECKS:
        each.forget()


def notebook(lesson: str, folder: str = "notebooks") -> Path:
    (path,) = ROOT.glob(f"{folder}/??_{lesson}.ipynb")
    return path


def answers(lesson: str, each: Check) -> tuple[list, list]:
    return MODULES[lesson].ANSWERS[each]


def is_number(answer: object) -> bool:
    return isinstance(answer, int | float) and not isinstance(answer, bool)


# ---- what the hints say ---------------------------------------------------------------------


@EACH
def test_a_check_has_three_hints(lesson, check) -> None:
    assert len(set(check.hints)) == 3
    for hint in check.hints:
        assert 20 < len(hint) <= 240 and hint.endswith((".", "?")) and "\n" not in hint, hint


@EACH
def test_no_hint_gives_the_answer_away(lesson, check) -> None:
    right, _ = answers(lesson, check)
    for hint in check.hints:
        numbers = [float(each.replace(",", "")) for each in re.findall(r"\d[\d,]*(?:\.\d+)?", hint)]
        for answer in right:
            if is_number(answer):
                assert not any(math.isclose(each, answer, rel_tol=1e-3) for each in numbers), hint
            if isinstance(answer, str):
                assert answer.strip("`()").rpartition(".")[2] not in hint
            for part in answer if isinstance(answer, list) else []:
                words = part if isinstance(part, str) else str(part).strip("[]")
                assert is_number(part) or words not in hint, hint
    code = [line.strip() for line in sources(notebook(lesson, "notebooks/solutions")).splitlines()]
    given = sources(notebook(lesson))
    for line in code:
        if len(line) > 15 and line not in given:
            assert not any(line in hint for hint in check.hints), line


@pytest.mark.parametrize("lesson", LESSONS)
def test_what_a_hint_quotes_is_in_the_lesson(lesson) -> None:
    cells = nbformat.read(notebook(lesson), 4).cells
    texts = [cell.source for cell in cells if cell.cell_type == "markdown"]
    titles = {line.lstrip("# ") for text in texts for line in text.splitlines() if line[:1] == "#"}
    for quoted in re.findall(r'"([A-Z][^"]+)"', " ".join(itertools.chain(*hints_of(lesson)))):
        assert any(quoted in title for title in titles), quoted
    for strong in re.findall(r"\*\*[^*]+\*\*", " ".join(itertools.chain(*hints_of(lesson)))):
        assert any(strong.strip("*") in text for text in texts), strong


def hints_of(lesson: str) -> list[tuple[str, ...]]:
    return [check.hints for check in MODULES[lesson].ANSWERS]


# ---- when they come -------------------------------------------------------------------------


@EACH
def test_each_wrong_answer_gets_the_next_hint(lesson, check, monkeypatch) -> None:
    right, (wrong, *_) = answers(lesson, check)
    if callable(right[0]):  # what ranks make of it, test_exercises knows
        monkeypatch.setattr(check, "judge", judge_of_ones)
    said = [check(wrong) for _ in range(4)]
    assert not any(verdict.right for verdict in said)
    wanted = [f"Hint {n} of 3: {hint}" for n, hint in enumerate(check.hints, start=1)]
    assert [verdict.hint for verdict in said] == [*wanted, wanted[-1]]
    assert [repr(verdict) for verdict in said] == [f"{v.says}\n{v.hint}" for v in said]


def judge_of_ones(answer: object) -> str:
    if answer != 1:
        raise NotYet("it is not 1.")
    return "it is 1."


def made() -> Check:
    return check(hints("first.", "second.", "third.")(lambda answer: judge_of_ones(answer)))


def test_a_right_answer_ends_the_hints_and_a_new_session_begins_them_anew() -> None:
    one, other = made(), made()
    assert one(2).hint == "Hint 1 of 3: first."
    assert other(2).hint == "Hint 1 of 3: first."  # each counts for itself
    assert one(2).hint == "Hint 2 of 3: second."
    assert repr(one(1)) == "Right: it is 1." and one.wrong == 0
    assert repr(one(2)) == "Not yet: it is not 1."  # without a hint, which nobody needs any more
    one.forget()
    assert one(2).hint == "Hint 1 of 3: first."


@pytest.mark.parametrize("no_try", [None, ..., "7/39", 0.18, 0.17])
def test_what_is_no_try_gets_no_hint_and_does_not_count(no_try) -> None:
    idle_part = MODULES["layer_splitting"].check.idle_part
    assert idle_part(8 / 39).hint.startswith("Hint 1")
    for _ in range(3):
        assert not idle_part(no_try).right and idle_part(no_try).hint == ""
    assert idle_part(8 / 39).hint.startswith("Hint 2")


def test_a_check_without_hints_is_a_check() -> None:
    assert repr(check(judge_of_ones)(2)) == "Not yet: it is not 1."


def answer_of(cell: str, file: str) -> object:
    """What a cell of a notebook gives to its check."""
    linecache.cache[file] = len(cell), None, cell.splitlines(keepends=True), file  # as IPython does
    given = []
    names = {"torch": torch, "nn": nn, "dist": dist, "md": md, "F": torch.nn.functional}
    name = re.search(r"\bcheck\.(\w+)\(", cell)[1]
    exec(compile(cell, file, "exec"), names | {"check": SimpleNamespace(**{name: given.append})})
    return given[0]


@pytest.mark.parametrize("lesson", LESSONS)
def test_the_exercise_as_the_lesson_has_it_is_no_try(lesson) -> None:
    cells = [c.source for c in nbformat.read(notebook(lesson), 4).cells if c.cell_type == "code"]
    unwritten = [cell for cell in cells if "Your lines" in cell]
    assert unwritten
    for cell in unwritten:
        exercise = made()
        for _ in range(2):
            assert exercise(answer_of(cell, f"<{lesson}>")).hint == ""
        below = cell.replace("Your lines", "pass  # mine. Your lines")  # the comment is there still
        for n in 1, 2:
            assert exercise(answer_of(below, f"<{lesson}, {n}>")).hint.startswith(f"Hint {n}")
        exercise.forget()
        without = cell.replace("Your lines", "My lines")
        assert exercise(answer_of(without, f"<{lesson}, without>")).hint.startswith("Hint 1")


# ---- rounded numbers ------------------------------------------------------------------------

NUMERIC = [
    pytest.param(lesson, each, id=f"{lesson}-{each.__name__}")
    for lesson, each in CHECKS
    if is_number(answers(lesson, each)[0][0])
]


def roundings(right: float) -> set[float]:
    """All that it becomes when it is rounded, or cut, to some digits; two at least."""
    whole, _, power = f"{right:.15e}".partition("e")
    digits = whole.replace(".", "")
    found = {float(f"{right:.{n}g}") for n in range(2, 7)}
    found |= {float(f"{digits[0]}.{digits[1:n]}e{power}") for n in range(2, 7)}
    return {each for each in found if not math.isclose(each, right, rel_tol=1e-6)}


@pytest.mark.parametrize(("lesson", "check"), NUMERIC)
def test_a_number_is_exact_close_or_far(lesson, check) -> None:
    right, wrong = answers(lesson, check)
    assert check(right[0]).right
    for value in roundings(right[0]):
        said = check(value)
        assert not said.right
        # Some are also what a mistake gives: then the sentence speaks of the mistake.
        if not any(is_number(each) and math.isclose(each, value) for each in wrong):
            assert "is close, but it is rounded" in said.says and not said.hint, said
    for value in right[0] * 1.37, -right[0], 0, float("nan"), float("inf"):
        said = check(value)
        assert not said.right and "close" not in said.says


def test_what_a_mistake_gives_may_be_rounded() -> None:
    check = MODULES["layer_splitting"].check.idle_part
    for value in (100 * 7 / 39, 17.95, 17.9):
        assert "give a part of 1, not per cent" in check(value).says


def test_there_are_numbers_to_round() -> None:
    can_be = [each for each in NUMERIC if roundings(answers(*each.values)[0][0])]
    assert len(NUMERIC) > 30 and len(can_be) > 10


@pytest.mark.parametrize(
    ("value", "right", "close"),
    [
        *((0.67, 2 / 3, True), (0.66, 2 / 3, True), (0.66667, 2 / 3, True), (0.7, 2 / 3, False)),
        *((1.5e6, 1_498_576, True), (1.49e6, 1_498_576, True), (1.6e6, 1_498_576, False)),
        *((511, 512, False), (510, 512, True), (500, 512, False), (513, 512, False)),
        *((24.0, 24.5, True), (25.0, 24.5, True), (24.6, 24.5, False), (1.4, 4 / 3, False)),
    ],
)
def test_close_is_the_right_number_with_fewer_digits(value, right, close) -> None:
    with pytest.raises(NotYet) as raised:
        number(value, right)
    assert ("is close" in str(raised.value)) is close


# ---- what is solved -------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A learner's copy, and in it the learner."""
    (tmp_path / solved.COPIED).write_text("{}")
    for path in ROOT.glob("notebooks/*.ipynb"):
        (tmp_path / path.name).write_text("")
    return tmp_path


def line_of(lesson: str, capsys) -> list[str]:
    progress()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line[3:].startswith(lesson)]
    return line.split(maxsplit=4)


def test_what_is_solved_is_kept_in_the_copy(copy, capsys) -> None:
    rank = MODULES["rank"].check
    assert line_of("rank", capsys)[1:] == ["0", "of", "3", "two_tokens, twins, shift"]
    rank.two_tokens(80)
    assert not (copy / solved.SOLVED).exists()
    for _ in range(2):
        assert rank.twins([[0, 4], [1, 5], [2, 6], [3, 7]]).right
    MODULES["zero"].check.stage_1_of_a_billion(7)
    assert line_of("rank", capsys)[1:] == ["1", "of", "3", "two_tokens, shift"]
    rank.two_tokens(120)
    rank.two_tokens(80)  # solved is solved
    assert line_of("rank", capsys)[1:] == ["2", "of", "3", "shift"]
    known = {"rank": ["twins", "two_tokens"], "zero": ["stage_1_of_a_billion"]}
    assert json.loads((copy / solved.SOLVED).read_text()) == known
    assert {path.name for path in copy.iterdir() if path.suffix != ".ipynb"} == {
        solved.COPIED,
        solved.SOLVED,
    }


def test_elsewhere_nothing_is_kept(tmp_path, monkeypatch, capsys) -> None:
    """Not among the originals, which have no list; nor in the solutions of a copy."""
    assert MODULES["rank"].check.two_tokens(120).right
    (tmp_path / solved.COPIED).write_text("{}")
    for name, kept in ("solutions", False), ("ko", True):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        assert MODULES["rank"].check.two_tokens(120).right
        found = [path.relative_to(tmp_path) for path in tmp_path.rglob(f"{solved.SOLVED}*")]
        assert found == ([Path(solved.SOLVED)] if kept else [])


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[1, 2]", "null", '"rank"', '{"rank": 3}', '{"rank": [1, null]}', "\x00\xff"),
        '{"rank": {"two_tokens": true}}',
    ],
)
def test_a_broken_or_foreign_file_is_none(copy, capsys, content) -> None:
    (copy / solved.SOLVED).write_bytes(content.encode("latin1"))
    assert line_of("rank", capsys)[1] == "0"
    assert MODULES["rank"].check.two_tokens(120).right
    assert json.loads((copy / solved.SOLVED).read_text()) == {"rank": ["two_tokens"]}


def test_what_another_edition_of_the_course_knows_is_kept(copy, capsys) -> None:
    (copy / solved.SOLVED).write_text('{"later": ["puzzle"], "rank": ["old", "twins"]}')
    assert line_of("rank", capsys)[1:] == ["1", "of", "3", "two_tokens, shift"]
    MODULES["rank"].check.two_tokens(120)
    known = {"later": ["puzzle"], "rank": ["old", "twins", "two_tokens"]}
    assert json.loads((copy / solved.SOLVED).read_text()) == known


@pytest.mark.parametrize("fault", ["write_text", "replace", "full"])
def test_a_folder_that_cannot_be_written_stops_no_check(copy, monkeypatch, capsys, fault) -> None:
    (copy / solved.SOLVED).write_text('{"rank": ["twins"]}')

    def forbidden(path, *_):
        if fault == "full":  # half of it is there already
            path.write_bytes(b'{"ra')
        raise PermissionError("read-only")

    monkeypatch.setattr(Path, "write_text" if fault == "full" else fault, forbidden)
    assert MODULES["rank"].check.two_tokens(120).right
    assert line_of("rank", capsys)[1:] == ["1", "of", "3", "two_tokens, shift"]
    assert [path.name for path in copy.glob(f"{solved.SOLVED}*")] == [solved.SOLVED]


def test_a_folder_in_its_place_stops_no_check(copy, capsys) -> None:
    (copy / solved.SOLVED).mkdir()
    assert MODULES["rank"].check.two_tokens(120).right
    assert line_of("rank", capsys)[1] == "0"
    assert [path.name for path in copy.glob(f"{solved.SOLVED}*")] == [solved.SOLVED]


def test_a_folder_that_is_gone_stops_no_check(copy, monkeypatch) -> None:
    gone = copy / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert MODULES["rank"].check.two_tokens(120).right


def test_the_table_has_all_lessons_in_their_order(copy, capsys) -> None:
    progress()
    title, *lines, total = capsys.readouterr().out.splitlines()
    stems = sorted(path.stem for path in ROOT.glob("notebooks/??_*.ipynb"))
    assert [line.split()[0] for line in lines] == [s for s in stems if s != "00_start"]
    assert total.split() == ["all", "0", "of", str(len(CHECKS))]
    assert all(len(line) <= 100 and line == line.rstrip() for line in [title, *lines, total])


@pytest.mark.parametrize("folder", ["notebooks", "notebooks/ko"])
def test_the_table_among_the_originals_is_that_of_a_fresh_copy(
    folder, copy, capsys, monkeypatch
) -> None:
    progress()
    fresh = capsys.readouterr().out
    monkeypatch.chdir(ROOT / folder)
    progress()
    assert capsys.readouterr().out == fresh


def test_the_start_page_shows_the_table_of_a_fresh_copy(copy, capsys) -> None:
    progress()
    fresh = capsys.readouterr().out
    cells = nbformat.read(ROOT / "notebooks/00_start.ipynb", 4).cells
    (cell,) = [c for c in cells if c.cell_type == "code" and "progress()" in c.source]
    assert "".join(output.text for output in cell.outputs) == fresh


def test_a_notebook_in_a_copy(copy) -> None:
    """The stored cells in a real kernel."""
    cells = [
        "import torch\nimport torch.distributed as dist\nfrom minidist.checks import rank as check",
        "check.two_tokens(90)",
        *[next(c for c in sources_of_cells("rank") if "check.shift(" in c)] * 2,
        "def shift(x):\n    return x + 1\n\ncheck.shift(shift)",
        "check.two_tokens(40)",
        "check.two_tokens(120)",
        "from minidist.checks import progress\nprogress()",
    ]
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(made, resources={"metadata": {"path": str(copy)}}, timeout=60).execute()
    _, first, unwritten, again, shift, second, right, table = (
        "".join(o.get("text") or o.data["text/plain"] for o in cell.outputs) for cell in made.cells
    )
    two_tokens = MODULES["rank"].check.two_tokens
    assert first == f"Not yet: it is not 90 ms.\nHint 1 of 3: {two_tokens.hints[0]}"
    assert unwritten == again and re.fullmatch("Not yet: .*", unwritten)
    assert shift.endswith(f"\nHint 1 of 3: {MODULES['rank'].check.shift.hints[0]}")
    assert second.endswith(f"\nHint 2 of 3: {two_tokens.hints[1]}")
    assert right.startswith("Right: ") and "\n" not in right
    assert "01_rank                       1 of 3    twins, shift\n" in table


def sources_of_cells(lesson: str) -> list[str]:
    cells = nbformat.read(notebook(lesson), 4).cells
    return [cell.source for cell in cells if cell.cell_type == "code"]


def test_lessons_are_modules_of_checks() -> None:
    package = importlib.import_module("minidist.checks")
    there = {path.stem for path in Path(package.__file__).parent.glob("*.py")}
    assert there - solved.SHARED - {"__init__"} == set(LESSONS)
