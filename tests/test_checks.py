"""Hints that lead on step by step, numbers that are rounded, and what a learner has solved."""

import inspect
import itertools
import json
import linecache
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import torch
import torch.distributed as dist
from test_exercises import CHECKS, LESSONS, MODULES, sources
from torch import nn

import minidist as md
from minidist.course.checks import Verdict, league, progress, solved
from minidist.course.checks.distributed_data_parallel import step_ms
from minidist.course.checks.pipeline_schedules import LEAGUE
from minidist.course.checks.verdict import Check, NotYet, number
from minidist.pipeline import simulate
from minidist.pipeline.schedules import zero_bubble

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def new_session(tmp_path, monkeypatch):
    """No check remembers another test, and no test is in the folder of the course."""
    monkeypatch.chdir(tmp_path)
    for _, each in CHECKS:
        each.forget()


CHECK_OF = {each.__name__: each for _, each in CHECKS}
(_, FARTHER) = LEAGUE
NOTEBOOKS, SOLUTIONS = "notebooks", "notebooks/solutions"


def notebook(lesson: str, folder: str = NOTEBOOKS) -> Path:
    (path,) = ROOT.glob(f"{folder}/??_{lesson}.ipynb")
    return path


def answers(lesson: str, each: Check) -> tuple[list, list]:
    return MODULES[lesson].ANSWERS[each]


def is_number(answer: object) -> bool:
    return isinstance(answer, int | float) and not isinstance(answer, bool)


# ---- what the hints say ---------------------------------------------------------------------


def test_a_check_has_three_hints() -> None:
    for lesson, each in CHECKS:
        assert len(set(each.hints)) == 3, (lesson, each.__name__)
        for hint in each.hints:
            assert 20 < len(hint) <= 240 and hint.endswith((".", "?")) and "\n" not in hint, hint


def gives_away(hint: str, answer: object) -> bool:
    numbers = [float(each.replace(",", "")) for each in re.findall(r"\d[\d,]*(?:\.\d+)?", hint)]
    if is_number(answer):
        return any(math.isclose(each, answer, rel_tol=1e-3) for each in numbers)
    if isinstance(answer, str):
        word = re.escape(answer.strip("`() ").rpartition(".")[2])
        return bool(re.search(rf"(?<!\w){word}(?!\w)", hint))
    parts = [each for each in answer if not is_number(each)] if isinstance(answer, list) else []
    words = [each if isinstance(each, str) else str(each).strip("[]") for each in parts]
    return any(word in hint for word in words)


def test_no_hint_gives_the_answer_away() -> None:
    """Neither the answer, nor a line of the solution that the lesson has not."""
    for lesson in LESSONS:
        given, solution = (sources(notebook(lesson, f)) for f in (NOTEBOOKS, SOLUTIONS))
        code = {line.strip() for line in solution.splitlines()}
        code = [line for line in code if len(line) > 15 and line not in given]
        for each, (right, _) in MODULES[lesson].ANSWERS.items():
            for hint in each.hints:
                assert not any(gives_away(hint, answer) for answer in right), hint
                assert not any(line in hint for line in code), hint


def test_what_a_hint_quotes_is_in_the_lesson() -> None:
    for lesson in LESSONS:
        cells = nbformat.read(notebook(lesson), 4).cells
        texts = [cell.source for cell in cells if cell.cell_type == "markdown"]
        lines = "\n".join(texts).splitlines()
        titles = {line.lstrip("# ") for line in lines if line[:1] == "#"}
        hints = " ".join(itertools.chain(*(each.hints for each in MODULES[lesson].ANSWERS)))
        for quoted in re.findall(r'"([A-Z][^"]+)"', hints):
            assert any(quoted in title for title in titles), (lesson, quoted)
        for strong in re.findall(r"\*\*[^*]+\*\*", hints):
            assert any(strong.strip("*") in text for text in texts), (lesson, strong)


# ---- when they come -------------------------------------------------------------------------


def test_each_wrong_answer_gets_the_next_hint(monkeypatch) -> None:
    for lesson, each in CHECKS:
        right, (wrong, *_) = answers(lesson, each)
        if callable(right[0]):  # what ranks make of it, test_exercises knows
            monkeypatch.setattr(each, "judge", judge_of_ones)
        said = [each(wrong) for _ in range(4)]
        assert not any(verdict.right for verdict in said), (lesson, each.__name__)
        wanted = [f"Hint {n} of 3: {hint}" for n, hint in enumerate(each.hints, start=1)]
        assert [verdict.hint for verdict in said] == [*wanted, wanted[-1]]
        assert [repr(verdict) for verdict in said] == [f"{v.says}\n{v.hint}" for v in said]


def judge_of_ones(answer: object) -> None:
    if answer != 1:
        raise NotYet("it is not 1.")


def made() -> Check:
    return Check(judge_of_ones, {"right": "it is 1.", "hints": ["first.", "second.", "third."]})


def test_a_right_answer_ends_the_hints_and_a_new_session_begins_them_anew() -> None:
    one, other = made(), made()
    assert one(2).hint == "Hint 1 of 3: first."
    assert other(2).hint == "Hint 1 of 3: first."  # each counts for itself
    assert one(2).hint == "Hint 2 of 3: second."
    assert repr(one(1)) == "Right: it is 1." and one.wrong == 0
    assert repr(one(2)) == "Not yet: it is not 1."  # without a hint, which nobody needs any more
    one.forget()
    assert one(2).hint == "Hint 1 of 3: first."


def test_what_is_no_try_gets_no_hint_and_does_not_count() -> None:
    idle_part = MODULES["layer_splitting"].check.idle_part
    assert idle_part(8 / 39).hint.startswith("Hint 1")
    for no_try in None, ..., "7/39", 0.18, 0.17:
        assert not idle_part(no_try).right and idle_part(no_try).hint == "", no_try
    assert idle_part(8 / 39).hint.startswith("Hint 2")


def answer_of(cell: str, file: str) -> object:
    """What a cell of a notebook gives to its check."""
    linecache.cache[file] = len(cell), None, cell.splitlines(keepends=True), file  # as IPython does
    given = []
    names = {"torch": torch, "nn": nn, "dist": dist, "md": md, "F": torch.nn.functional}
    name = re.search(r"\bcheck\.(\w+)\(", cell)[1]
    exec(compile(cell, file, "exec"), names | {"check": SimpleNamespace(**{name: given.append})})
    return given[0]


def test_the_exercise_as_the_lesson_has_it_is_no_try() -> None:
    for lesson in LESSONS:
        unwritten = [cell for cell in sources_of_cells(lesson) if "Your lines" in cell]
        assert unwritten, lesson
        for cell in unwritten:
            exercise = made()
            for _ in range(2):
                assert exercise(answer_of(cell, f"<{lesson}>")).hint == "", lesson
            below = cell.replace("Your lines", "pass  # mine. Your lines")  # the comment is there
            for n in 1, 2:
                assert exercise(answer_of(below, f"<{lesson}, {n}>")).hint.startswith(f"Hint {n}")
            exercise.forget()
            without = cell.replace("Your lines", "My lines")
            assert exercise(answer_of(without, f"<{lesson}, without>")).hint.startswith("Hint 1")


# ---- rounded numbers ------------------------------------------------------------------------

RIGHT = [(each, answers(*each)[0][0]) for each in CHECKS]
NUMERIC = [each for each, right in RIGHT if is_number(right) and right]  # 0 has no digits to lose


def roundings(right: float) -> set[float]:
    """All that it becomes when it is rounded, or cut, to some digits; two at least."""
    whole, _, power = f"{right:.15e}".partition("e")
    digits = whole.replace(".", "")
    found = {float(f"{right:.{n}g}") for n in range(2, 7)}
    found |= {float(f"{digits[0]}.{digits[1:n]}e{power}") for n in range(2, 7)}
    return {each for each in found if not math.isclose(each, right, rel_tol=1e-6)}


def test_a_number_is_exact_close_or_far() -> None:
    assert len(NUMERIC) > 30
    for lesson, each in NUMERIC:
        right, wrong = answers(lesson, each)
        assert each(right[0]).right
        for value in roundings(right[0]):
            said = each(value)
            assert not said.right
            # Some are also what a mistake gives: then the sentence speaks of the mistake.
            if not any(is_number(one) and math.isclose(one, value) for one in wrong):
                assert "is close, but it is rounded" in said.says and not said.hint, said
        for value in right[0] * 1.37, -right[0], 0, float("nan"), float("inf"):
            said = each(value)
            assert not said.right and "close" not in said.says, (lesson, value)


def test_a_hint_fits_what_is_wrong() -> None:
    def judge(answer):
        raise NotYet(answer)

    hints = ["Where to look.", "The step.", "The shape."]
    check = Check(judge, {"right": "it is.", "hints": hints, "when": {"a sum": 2}})
    check.__module__ = "a.lesson"
    given = [check(reason).hint for reason in ("it is a sum", "it is a sum", "it is empty")]
    assert given == ["Hint 2 of 3: The step.", "Hint 3 of 3: The shape.", "Hint 3 of 3: The shape."]
    check.forget()
    assert check("it is empty").hint == "Hint 1 of 3: Where to look."


def test_a_hint_that_fits_is_one_that_there_is() -> None:
    for _, each in CHECKS:
        reasons = "".join(Path(inspect.getsourcefile(each.judge)).read_text().split())
        for words, hint in each.says.get("when", {}).items():
            assert hint in (1, 2, 3) and "".join(words.split())[:6] in reasons, words


def test_close_is_the_right_number_with_fewer_digits() -> None:
    for value, right, close in [
        *((0.67, 2 / 3, True), (0.66, 2 / 3, True), (0.66667, 2 / 3, True), (0.7, 2 / 3, False)),
        *((1.5e6, 1_498_576, True), (1.49e6, 1_498_576, True), (1.6e6, 1_498_576, False)),
        *((511, 512, False), (510, 512, True), (500, 512, False), (513, 512, False)),
        *((24.0, 24.5, True), (25.0, 24.5, True), (24.6, 24.5, False), (1.4, 4 / 3, False)),
    ]:
        with pytest.raises(NotYet) as raised:
            number(value, right)
        assert ("is close" in str(raised.value)) is close, value


# ---- what is solved -------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A learner's copy, and in it the learner."""
    (tmp_path / solved.COPIED).write_text("{}")
    for path in ROOT.glob("notebooks/*.ipynb"):
        (tmp_path / path.name).write_text("")
    return tmp_path


def line_of(lesson: str) -> list[str]:
    (line,) = [line for line in repr(progress()).splitlines() if line[3:].startswith(lesson)]
    return line.split(maxsplit=4)


def test_what_is_solved_is_kept_in_the_copy(copy) -> None:
    rank = MODULES["rank"].check
    assert line_of("rank")[1:] == ["0", "of", "3", "two_tokens, twins, shift"]
    rank.two_tokens(80)
    assert not (copy / solved.SOLVED).exists()
    for _ in range(2):
        assert rank.twins([[0, 4], [1, 5], [2, 6], [3, 7]]).right
    MODULES["zero"].check.largest_in_stage_1(10)
    assert line_of("rank")[1:] == ["1", "of", "3", "two_tokens, shift"]
    rank.two_tokens(120)
    rank.two_tokens(80)  # solved is solved
    assert line_of("rank")[1:] == ["2", "of", "3", "shift"]
    known = {"rank": ["twins", "two_tokens"], "zero": ["largest_in_stage_1"]}
    assert json.loads((copy / solved.SOLVED).read_text()) == known
    assert {path.name for path in copy.iterdir() if path.suffix != ".ipynb"} == {
        solved.COPIED,
        solved.SOLVED,
    }


def test_notebooks_that_solve_something_at_once_lose_nothing(copy) -> None:
    with md.ranks(3) as r:
        r(solve_many, copy)
    assert {*solved.read(copy)} == {f"{rank} {each}" for rank in range(3) for each in range(20)}


def solve_many(copy: Path) -> None:
    os.chdir(copy)
    for each in range(20):
        solved.remember(f"{dist.get_rank()} {each}", "a")


def test_a_broken_or_foreign_file_is_none(copy) -> None:
    for content in "", "{", "[1, 2]", '{"rank": [1, null]}', "\x00\xff":
        (copy / solved.SOLVED).write_bytes(content.encode("latin1"))
        assert line_of("rank")[1] == "0", content
        assert MODULES["rank"].check.two_tokens(120).right
        assert json.loads((copy / solved.SOLVED).read_text()) == {"rank": ["two_tokens"]}


def test_a_folder_that_cannot_be_written_stops_no_check(copy, monkeypatch) -> None:
    (copy / solved.SOLVED).write_text('{"rank": ["twins"]}')

    def full(path, *_):
        raise PermissionError("read-only")

    monkeypatch.setattr(Path, "write_text", full)
    assert MODULES["rank"].check.two_tokens(120).right
    assert line_of("rank")[1:] == ["1", "of", "3", "two_tokens, shift"]


def test_the_table_has_all_lessons_in_their_order(copy) -> None:
    title, *lines, total = repr(progress()).splitlines()
    stems = sorted(path.stem for path in ROOT.glob("notebooks/??_*.ipynb"))
    assert [line.split()[0] for line in lines] == [s for s in stems if s != "00_start"]
    assert total.split() == [
        *("all 0 of " + str(len(CHECKS)) + ", next: two_tokens in 01_rank").split()
    ]
    assert all(len(line) <= 100 and line == line.rstrip() for line in [title, *lines, total])


def test_the_next_step_follows_the_last_lesson_in_which_something_is_solved(copy) -> None:
    def then(**found: list[str]) -> str:
        (copy / solved.SOLVED).write_text(json.dumps(found))
        return repr(progress()).rpartition(", ")[2]

    zero = [each.__name__ for lesson, each in CHECKS if lesson == "zero"]
    assert then(rank=["two_tokens"]) == "next: twins in 01_rank"
    assert then(rank=["two_tokens"], zero=zero[:1]).endswith("in 15_zero")
    assert then(rank=["two_tokens"], zero=zero).endswith("in 16_fully_sharded")
    everything = {
        lesson: [c.__name__ for name, c in CHECKS if name == lesson] for lesson in LESSONS
    }
    assert then(**{**everything, "rank": []}) == "next: two_tokens in 01_rank"
    assert then(**everything) == "all are solved"


def test_a_copy_shows_colour_and_links_and_the_originals_the_text(copy, monkeypatch) -> None:
    rank = MODULES["rank"].check
    right, wrong = (
        rank.two_tokens(120),
        Verdict(False, "Not yet: `<b>` is not it.", "Hint 1 of 3: a"),
    )
    assert "<b>Right:</b>" in right._repr_html_() != wrong._repr_html_()
    assert "<b>Not yet:</b> <code>&lt;b&gt;</code> is not it.<br><b>Hint" in wrong._repr_html_()
    assert '<a href="01_rank.ipynb">01_rank</a>' in progress()._repr_html_()
    (copy / "ko").mkdir()
    monkeypatch.chdir(copy / "ko")
    assert '<a href="../01_rank.ipynb">01_rank</a>' in progress()._repr_html_()
    monkeypatch.chdir(ROOT / "notebooks")
    assert right._repr_html_() is progress()._repr_html_() is None


def test_the_originals_and_the_start_page_show_the_table_of_a_fresh_copy(copy, monkeypatch) -> None:
    fresh = repr(progress())
    for folder in "notebooks", "notebooks/ko":
        monkeypatch.chdir(ROOT / folder)
        assert repr(progress()) == fresh, folder
    cells = nbformat.read(ROOT / "notebooks/00_start.ipynb", 4).cells
    (cell,) = [c for c in cells if c.cell_type == "code" and "progress()" in c.source]
    assert [output.data["text/plain"] for output in cell.outputs] == [fresh]


# ---- the league -----------------------------------------------------------------------------


def test_a_score_is_said_and_the_least_is_kept(copy) -> None:
    for score, best in (5.0, 5.0), (3.5, 3.5), (4.0, 3.5):
        solved.remember("pipeline_schedules", "far_away", score)
        assert solved.scores(copy) == {"far_away": best}
    solved.remember("rank", "twins")
    assert solved.scores(copy) == {"far_away": 3.5}
    assert solved.read(copy) == {"pipeline_schedules": ["far_away"], "rank": ["twins"]}
    (row,) = [line for line in repr(league()).splitlines() if "far_away" in line]
    assert row.split()[2:5] == ["3.5", "136.2", "97.8"]
    mine = Check(lambda answer: float(answer), CHECK_OF["far_away"].says)
    mine.__module__, mine.__name__ = "a.pipeline_schedules", "far_away"
    said = " Score: 120 units of time of a step on 8 ranks, 20 micro-batches, where a message "
    assert f"{said}takes 1.7. The library: 136.2. The bound: 97.8." in mine(120).says


def test_the_library_and_the_bound_are_what_the_league_says() -> None:
    goals = {name: each.says["league"] for name, each in CHECK_OF.items() if "league" in each.says}
    found = {
        "far_away": (simulate(zero_bubble(8, 20), link=FARTHER).time, 3 * 20 + 2 * 7 * (1 + 1.7)),
        "overlaps": (step_ms([(n, 2 * 16640) for n in (2, 4, 6)]), min(map(step_ms, all_cuts()))),
        "prepare": (26400 + 52800 - 4 * 12608 + 12608, 26400 + 4096),
    }
    for name, (library, bound) in found.items():
        said = goals.pop(name)
        assert [said["library"], said["bound"]] == pytest.approx([library, bound]), name
    assert not goals


def all_cuts() -> Iterator[list[tuple[int, int]]]:
    """Messages of a step, for all ways to cut the gradients of weights and biases."""
    for order in itertools.permutations((256, 16384)):
        for cut in itertools.product((False, True), repeat=11):
            messages, size = [], 0
            for place, (nbytes, end) in enumerate(zip(order * 6, (*cut, True), strict=True)):
                size += nbytes
                if end:
                    messages.append((place // 2 + 1, size))
                    size = 0
            yield messages


def sources_of_cells(lesson: str) -> list[str]:
    cells = nbformat.read(notebook(lesson), 4).cells
    return [cell.source for cell in cells if cell.cell_type == "code"]
