"""Each check accepts every right answer and refuses the wrong ones that people give.

The answers to a lesson's puzzles and exercise stand in `answers/LESSON.py`, as `ANSWERS`: a check,
its right answers, its wrong ones.
"""

import importlib
import os
import re
import sys
import time
from pathlib import Path
from unittest import mock

import cloudpickle
import nbformat
import pytest

import minidist as md
from minidist.checks import Verdict
from minidist.checks.solved import SHARED
from minidist.language import in_korean

ROOT = Path(__file__).resolve().parents[1]
LESSONS = sorted(
    path.stem for path in ROOT.glob("tests/answers/*.py") if not path.stem.startswith("_")
)
MODULES = {lesson: importlib.import_module(f"answers.{lesson}") for lesson in LESSONS}
CHECKS = [(lesson, check) for lesson in LESSONS for check in MODULES[lesson].ANSWERS]
KOREAN = [each for each in LESSONS if [*ROOT.glob(f"notebooks/ko/??_{each}.ipynb")]]
CODE_WORDS = {*("autograd", "gloo", "send", "work", "data", "pipeline", "tensor", "ms"), "eager"}

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True, scope="module")
def answers_by_value():
    for module in MODULES.values():
        cloudpickle.register_pickle_by_value(module)


def said_of(check, answer) -> Verdict:
    """The verdict, which must be a sentence, and soon."""
    start = time.monotonic()
    verdict = check(answer)
    assert time.monotonic() - start < 20
    assert repr(verdict) == "\n".join(filter(None, [verdict.says, verdict.hint]))
    assert verdict.says.startswith("Right: " if verdict.right else "Not yet: ")
    assert verdict.says.endswith(".") and "\n" not in verdict.says and len(verdict.says) < 400
    if check.__module__.rpartition(".")[2] in KOREAN:
        for said in filter(None, verdict[1:]):
            korean = in_korean(said)
            assert korean.startswith(("정답입니다: ", "아직 아닙니다: ", "힌트 ")), korean
            assert korean.endswith((".", "?")), korean
            assert not english_in(korean), korean
    return verdict


def english_in(korean: str) -> set[str]:
    """The English words in it, but for code, and for the text of an error."""
    plain = re.sub(r"Error: .*|`[^`]*`|<[^>]*>|\([^가-힣]*\)", " ", korean)
    return set(re.findall(r"(?<![\w.])[a-z]{2,}(?![\w.(])", plain)) - CODE_WORDS


def cases(which: int) -> list:
    return [
        pytest.param(check, answer, id=f"{lesson}-{check.__name__}-{name(answer)}-{number}")
        for lesson in LESSONS
        for check, answers in MODULES[lesson].ANSWERS.items()
        for number, answer in enumerate(answers[which])
    ]


def name(answer) -> str:
    return getattr(answer, "__name__", re.sub(r"\W+", "_", repr(answer))[:20])


class Kept:
    """Ranks that try one answer to a check after another: to start them takes longest. Those on
    which an answer is wrong try no other one, which might be wrong for what it left behind."""

    def __init__(self):
        self.check, self.last, self.pools = None, None, {}

    def launch(self, function, *args, **options):
        self.last = tuple(sorted(options.items()))
        if self.last not in self.pools:
            self.pools[self.last] = md.ranks(**options)
        return self.pools[self.last](function, *args)

    def verdict(self, check, answer) -> Verdict:
        if check is not self.check:
            self.close()
            self.check = check
        self.last = None
        with mock.patch("minidist.checks.verdict.launch", self.launch):
            verdict = said_of(check, answer)
        if self.last and not verdict.right:
            if pool := self.pools.pop(self.last, None):  # None: it did not start in time
                pool.close()
        return verdict

    def close(self):
        while self.pools:
            self.pools.popitem()[1].close()


@pytest.fixture(scope="module")
def kept():
    kept = Kept()
    yield kept
    kept.close()


@pytest.mark.parametrize(("check", "answer"), cases(0))
def test_a_right_answer_passes(check, answer, kept) -> None:
    verdict = kept.verdict(check, answer)
    assert verdict.right, verdict


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("check", "answer"), cases(1))
def test_a_wrong_answer_gets_a_sentence_and_a_hint(check, answer, kept, monkeypatch) -> None:
    check.forget()
    if not check.__module__.endswith((".rank", ".fully_sharded")):  # they say who waits for what
        monkeypatch.setattr("minidist.checks.verdict.WAIT", 1.5)
    verdict = kept.verdict(check, answer)
    assert not verdict.right
    # A number that is rounded, or a word or a class in the answer's place, is no try.
    no_try = ("rounded", " not '", "give the function itself")
    assert verdict.hint.startswith("Hint 1") or any(words in verdict.says for words in no_try)


def test_a_unit_that_waits_for_the_next_gather_is_told_so(kept) -> None:
    answers = MODULES["fully_sharded"]
    said = kept.verdict(answers.check.prefetch, answers.in_turn).says
    assert "in forward it waits for the gather of the next unit before it computes" in said


class Odd:
    def __repr__(self):
        raise ValueError("no repr")

    def __iter__(self):
        raise ValueError("no iter")

    def __float__(self):
        raise ValueError("no float")


def endless(*_):
    while True:
        pass


def gone(*_):
    os._exit(3)


def left(*_):
    sys.exit(0)


def raises(*_):
    raise ValueError("two\n\nlines")


def none(*_):
    return None


def no_parameters():
    return 0


MALFORMED = [
    *(None, (), (1, 2), "", "x", True, float("nan"), 1j, {}, {1: 2}, [[None]], [[0.5]], object()),
    *(Odd(), int, Exception, endless, raises, none),
]
ENDS = [gone, left, no_parameters]  # of a rank, which are the same for all checks


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("lesson", "check", "malformed"),
    [
        pytest.param(lesson, check, answer, id=f"{lesson}-{check.__name__}-{number}")
        for lesson, check in CHECKS
        for number, answer in enumerate(MALFORMED + (ENDS if lesson == "rank" else []))
    ],
)
def test_a_malformed_answer_gets_a_sentence(lesson, check, malformed, monkeypatch) -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    if malformed is endless and lesson != "rank":  # one waits as long as a learner does
        monkeypatch.setattr("minidist.checks.verdict.DEADLINE", 1.5)
    assert not said_of(check, malformed).right


@pytest.mark.parametrize("rounded", [0.18, 0.179, 0.1795])
def test_a_rounded_number_is_asked_for_exactly(rounded) -> None:
    said = MODULES["layer_splitting"].check.idle_part(rounded)
    assert not said.right and "is rounded" in said.says


# ---- lessons, their checks, and their solutions ---------------------------------------------


def sources(path: Path) -> str:
    return "\n".join(
        cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"
    )


def has_checks(lesson: str) -> list[str]:
    module = importlib.import_module(f"minidist.checks.{lesson}")
    return [
        name
        for name, thing in vars(module).items()
        if hasattr(thing, "__wrapped__") and thing.__module__ == module.__name__
    ]


@pytest.mark.parametrize("lesson", LESSONS)
def test_every_check_is_listed_used_and_solved(lesson) -> None:
    listed = {check.__name__ for check in MODULES[lesson].ANSWERS}
    assert listed == set(has_checks(lesson))
    assert all(right and wrong for right, wrong in MODULES[lesson].ANSWERS.values())
    for folder in ("notebooks", "notebooks/solutions"):
        (path,) = ROOT.glob(f"{folder}/??_{lesson}.ipynb")
        assert set(re.findall(r"\bcheck\.(\w+)\(", sources(path))) == listed


@pytest.mark.parametrize("lesson", LESSONS)
def test_the_lesson_leaves_its_answers_open_and_the_solution_gives_them(lesson) -> None:
    for folder, right in ("notebooks", False), ("notebooks/solutions", True):
        (path,) = ROOT.glob(f"{folder}/??_{lesson}.ipynb")
        said = re.findall(r"^(Right|Not yet): ", shown(path), re.MULTILINE)
        assert said and set(said) == {"Right" if right else "Not yet"}


def shown(path: Path) -> str:
    outputs = [o for cell in nbformat.read(path, 4).cells for o in cell.get("outputs", [])]
    return "\n".join(o.data["text/plain"] for o in outputs if "data" in o)


def test_every_module_of_checks_has_answers() -> None:
    there = {path.stem for path in ROOT.glob("minidist/checks/*.py")}
    assert there - {"__init__", *SHARED} == set(LESSONS)


def test_a_scan_with_one_message_for_each_rank_is_told_so(kept) -> None:
    answers = MODULES["collectives"]
    credit = "one message for each rank."
    assert kept.verdict(answers.check.scan, answers.chain).says.endswith(f"with {credit}")
    for other in answers.doubling, answers.by_a_table, answers.by_broadcasts:
        said = kept.verdict(answers.check.scan, other).says
        assert said.startswith("Right") and not said.endswith(f"with {credit}")
