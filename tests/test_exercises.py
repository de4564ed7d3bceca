"""Each check accepts every right answer and refuses the wrong ones that people give.

The answers to a lesson's puzzles and exercise stand in `answers/LESSON.py`, as `ANSWERS`: a check,
its right answers, its wrong ones. By day ranks try those to the exercises of lessons that have
changed, and of each other lesson a right and a wrong one; at night the others.
"""

import importlib
import os
import re
import sys
from pathlib import Path
from unittest import mock

import changed
import cloudpickle
import nbformat
import pytest

import minidist as md
from minidist.course.checks import Verdict
from minidist.course.checks.solved import SHARED
from minidist.course.language import in_korean

ROOT = Path(__file__).resolve().parents[1]
LESSONS = sorted(
    path.stem for path in ROOT.glob("tests/answers/*.py") if not path.stem.startswith("_")
)
MODULES = {lesson: importlib.import_module(f"answers.{lesson}") for lesson in LESSONS}
CHECKS = [(lesson, check) for lesson in LESSONS for check in MODULES[lesson].ANSWERS]
KOREAN = [each for each in LESSONS if [*ROOT.glob(f"notebooks/ko/??_{each}.ipynb")]]
CODE_WORDS = {*("autograd", "gloo", "send", "work", "data", "pipeline", "tensor", "ms"), "eager"}

WHO_WAITS = {"rank", "fully_sharded", "hiding_gathers"}  # their checks say who waits for what

CHANGED = changed.lessons()

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True, scope="module")
def answers_by_value():
    for module in MODULES.values():
        cloudpickle.register_pickle_by_value(module)


def said_of(check, answer) -> Verdict:
    """The verdict, which must be a sentence."""
    verdict = check(answer)
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


def cases() -> list:
    """Puzzles need no ranks: all of their answers are tried by day."""
    made = []
    for lesson in LESSONS:
        of_lesson = MODULES[lesson].ANSWERS
        exercises = [check for check, (right, _) in of_lesson.items() if callable(right[0])]
        for check, answers in of_lesson.items():
            for right, (number, answer) in [
                (right, each)
                for right, several in zip((True, False), answers, strict=True)
                for each in enumerate(several)
            ]:
                one = check is exercises[0] and number == 0
                by_day = lesson in CHANGED or check not in exercises or one
                said = f"{lesson}-{check.__name__}-{'right' if right else 'wrong'}"
                case_id = f"{said}-{name(answer)}-{number}"
                marks = () if by_day else pytest.mark.soak
                made.append(pytest.param(check, answer, right, id=case_id, marks=marks))
    return made


def name(answer) -> str:
    shown = sorted(map(str, answer)) if isinstance(answer, set | frozenset) else answer
    return getattr(answer, "__name__", re.sub(r"\W+", "_", repr(shown))[:20])


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
        with mock.patch("minidist.course.checks.verdict.launch", self.launch):
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


@pytest.mark.parametrize(("check", "answer", "right"), cases())
def test_an_answer_gets_its_verdict(check, answer, right, kept, monkeypatch) -> None:
    check.forget()
    if right:  # a busy machine takes longer
        monkeypatch.setattr("minidist.course.checks.verdict.WAIT", 20)
        monkeypatch.setattr("minidist.course.checks.verdict.DEADLINE", 40)
    elif not check.__module__.endswith(
        (".rank", ".fully_sharded", ".hiding_gathers")
    ):  # they say who waits for what
        monkeypatch.setattr("minidist.course.checks.verdict.WAIT", 1.5)
    verdict = kept.verdict(check, answer)
    assert verdict.right == right, verdict
    # A number that is rounded, or a word or a class in the answer's place, is no try.
    no_try = ("rounded", " not '", "give the function itself")
    hinted = verdict.hint.startswith("Hint ") or any(words in verdict.says for words in no_try)
    assert right or hinted, verdict


NAMED = [lesson for lesson in LESSONS if hasattr(MODULES[lesson], "NAMED")]


@pytest.mark.parametrize(
    "lesson",
    [pytest.param(each, marks=() if each in CHANGED else pytest.mark.soak) for each in NAMED],
)
def test_the_common_faults_in_an_exercise_are_named(lesson, kept) -> None:
    for check, named in MODULES[lesson].NAMED.items():
        for answer, told in named.items():
            assert kept.verdict(check, answer).says.endswith(told), answer


def test_a_rounded_number_is_asked_for_exactly() -> None:
    for rounded in 0.18, 0.179, 0.1795:
        said = MODULES["layer_splitting"].check.idle_part(rounded)
        assert not said.right and "is rounded" in said.says, said


# ---- malformed answers ----------------------------------------------------------------------


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


FEW = [None, (), "x", float("nan"), [[0.5]], Odd(), Exception, raises, none]
MALFORMED = [
    *FEW,
    *((1, 2), "", True, 1j, {}, {1: 2}, [[None]], object(), int, endless),
]
ENDS = [gone, left, no_parameters]  # of a rank, which are the same for all checks


def refuse(lesson, check, answers, monkeypatch) -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    if lesson != "rank":  # one waits as long as a learner does
        monkeypatch.setattr("minidist.course.checks.verdict.DEADLINE", 1.5)
    for answer in answers:
        by_chance = check.__name__ == "stages" and answer == (1, 2)
        assert said_of(check, answer).right == by_chance, (check.__name__, name(answer))


@pytest.mark.parametrize("lesson", sorted(CHANGED & set(LESSONS)) or ["mixed_parallelism"])
def test_a_malformed_answer_gets_a_sentence(lesson, monkeypatch) -> None:
    for check in MODULES[lesson].ANSWERS:
        refuse(lesson, check, FEW, monkeypatch)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("lesson", "check"),
    [pytest.param(*each, id=f"{each[0]}-{each[1].__name__}") for each in CHECKS],
)
def test_every_malformed_answer_gets_a_sentence(lesson, check, monkeypatch) -> None:
    refuse(lesson, check, MALFORMED + (ENDS if lesson == "rank" else []), monkeypatch)


# ---- lessons, their checks, and their solutions ---------------------------------------------


def sources(path: Path) -> str:
    return "\n".join(
        cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"
    )


def has_checks(lesson: str) -> list[str]:
    module = importlib.import_module(f"minidist.course.checks.{lesson}")
    return [
        name
        for name, thing in vars(module).items()
        if hasattr(thing, "__wrapped__") and thing.__module__ == module.__name__
    ]


def test_every_check_is_listed_used_and_solved() -> None:
    """And every solution is shown as right, every lesson's answers as open."""
    wrong = []
    for lesson, module in MODULES.items():
        listed = {check.__name__ for check in module.ANSWERS}
        if listed != set(has_checks(lesson)):
            wrong.append(f"{lesson}: the checks with answers are {sorted(listed)}")
        if not all(right and wrong_ones for right, wrong_ones in module.ANSWERS.values()):
            wrong.append(f"{lesson}: a check lacks right or wrong answers")
        for folder, verdict in ("notebooks", "Not yet"), ("notebooks/solutions", "Right"):
            (path,) = ROOT.glob(f"{folder}/??_{lesson}.ipynb")
            if set(re.findall(r"\bcheck\.(\w+)\(", sources(path))) != listed:
                wrong.append(f"{folder}/{lesson} calls other checks")
            if set(re.findall(r"^(Right|Not yet): ", shown(path), re.MULTILINE)) != {verdict}:
                wrong.append(f"{folder}/{lesson} does not show {verdict!r} throughout")
    assert wrong == []
    there = {path.stem for path in ROOT.glob("minidist/course/checks/*.py")}
    assert there - {"__init__", *SHARED} == set(LESSONS)


def shown(path: Path) -> str:
    outputs = [o for cell in nbformat.read(path, 4).cells for o in cell.get("outputs", [])]
    return "\n".join(o.data["text/plain"] for o in outputs if "data" in o)


# ---- which lessons have changed -------------------------------------------------------------


def test_the_parts_of_every_lesson_are_known_and_exist() -> None:
    parts = changed.parts((ROOT / "README.md").read_text())
    assert sorted(parts) == LESSONS
    rooms = {
        lesson: [each for each in of if each.startswith("minidist/")]
        for lesson, of in parts.items()
    }
    assert {lesson: len(of) for lesson, of in rooms.items() if len(of) < 2} == {}
    named = [part for of in parts.values() for part in of]
    assert [part for part in named if not (ROOT / part).exists()] == []


def test_a_room_that_has_changed_is_told_from_one_that_has_not() -> None:
    wanted = ["minidist/zero", "notebooks/15_zero.ipynb"]
    for file in "minidist/zero/shards.py", "notebooks/15_zero.ipynb":
        assert changed.among({"README.md", file}, wanted), file
    for file in "minidist/zeros.py", "minidist/zero.py", "notebooks/15_zero.ipynb.bak":
        assert not changed.among({"README.md", file}, wanted), file
