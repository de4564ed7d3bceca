"""Checks and predictions speak Korean where a Korean lesson runs."""

import ast
import re
import string
import tomllib
from collections.abc import Iterator, Set
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from test_exercises import KOREAN, MODULES, english_in
from test_prediction import SAYS, WRONG

import minidist as md
from minidist.course import language
from minidist.course.checks.verdict import BOX
from minidist.course.language import in_korean, spoken

ROOT = Path(__file__).resolve().parents[1]
CATALOGUE = language.catalogue()

# Where sentences stand; of some files only in these functions.
SOURCES: dict[str, Set[str]] = {
    **{f"course/checks/{each}.py": set() for each in (*KOREAN, "verdict")},
    "course/prediction.py": set(),
    "pipeline/instructions.py": set(),
    "pipeline/schedules.py": {"simulate"},
    "machine/runtime/report.py": {"where", "_ending", "_blame"},
}
# Strings that look like sentences: two are looked for in what others say.
NOT_SAID = {"Your lines", "Pair is not connected", "{0} is no message", BOX}
# What the code puts together, so that no string of it has the whole.
ASSEMBLED = {
    *("on {0}, rank {1} {2}.", "on {0}, rank {1}: {2}.", "{0}, with {1} heads"),
    "{0} ranks, {1} × {2} × {3}",
    "on {0}, rank {1} has {2}, one process {3}: {4}.",
    *("{0}, rank {1} at {2}", "{0}; rank {1} at {2}"),
    *("rank {0} {1}", "every rank {0}", "raised {0}: {1}", "was in {0}, {1}", "was at {0}"),
    *("{0} times too low", "{0} times too high", "{0} of shape {1}"),
    "was killed by SIGKILL (kill -9, or the system had no memory left)",
}


def templates(source: str, functions: Set[str] = frozenset()) -> Iterator[str]:
    """The strings of a module, without its docstrings. An f-string has numbers in place of its
    values; values side by side have one."""
    tree = ast.parse(source)
    parts: set[ast.AST] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Expr():
                parts.add(node.value)
            case ast.JoinedStr():
                parts.update(node.values)
            case ast.FormattedValue(format_spec=ast.JoinedStr() as spec):
                parts.add(spec)
    named = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name in functions]
    for node in [each for root in named or [tree] for each in ast.walk(root)]:
        match node:
            case ast.Constant(value=str() as text) if node not in parts:
                yield text
            case ast.JoinedStr(values=values) if node not in parts:
                text = "".join(
                    each.value if isinstance(each, ast.Constant) else "\0" for each in values
                )
                numbers = iter(range(10))
                yield re.sub("\0+", lambda _, numbers=numbers: f"{{{next(numbers)}}}", text)


def is_said(template: str) -> bool:
    """Whether it has words for a reader, more than one, and is no part of a line."""
    whole = template == template.strip() and "\n" not in template and template[:1] != ","
    return whole and " " in template and bool(re.search("[A-Za-z]{2}", template))


def texts(file: Path) -> Iterator[str]:
    """The English sentences in the text file of a lesson's checks."""
    for name, says in tomllib.loads(file.read_text()).items():
        if name != "korean":
            yield from [says["right"], *says["hints"], *says.get("wrong", {}).values()]
            yield from [says["unit"]] if "unit" in says else []
            yield from [says["league"]["what"]] if "league" in says else []


def all_templates() -> set[str]:
    of_code = {
        each
        for name, functions in SOURCES.items()
        for each in templates((ROOT / "minidist" / name).read_text(), functions)
    }
    files = (ROOT / f"minidist/course/checks/{lesson}.toml" for lesson in KOREAN)
    return of_code.union(*map(texts, files))


# ---- the catalogue is complete --------------------------------------------------------------


def test_every_sentence_has_a_korean_form() -> None:
    said = {each for each in all_templates() if is_said(each)}
    assert sorted(said - CATALOGUE.keys() - NOT_SAID) == []


def test_no_form_is_left_of_a_sentence_that_is_gone() -> None:
    assert sorted(CATALOGUE.keys() - all_templates() - ASSEMBLED) == []
    assert ASSEMBLED <= CATALOGUE.keys() and NOT_SAID <= all_templates()


def values(template: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}


def faults(key: str, korean: str) -> Iterator[str]:
    if not values(korean) == values(key) == set(map(str, range(len(values(key))))):
        yield "other values"
    if words := english_in(korean):
        yield f"English: {words}"
    if re.search(r"(?<![니시])다(\.|$)|[가-힣]요([.?!]|$)", korean):
        yield "not polite"
    if set(re.findall("`[^`{]+`", key)) - set(re.findall("`[^`{]+`", korean)):
        yield "lacks code"
    if (key[-1] in ".?") != (korean[-1] in ".?") and key[-1] != ":":
        yield "ends otherwise"
    given = [str(number) for number in range(11, 11 + len(values(key)))]
    if in_korean(key.format(*given)) != korean.format(*given):
        yield "another form is taken for it"


def test_a_korean_form_says_the_same_in_korean() -> None:
    found = {key: list(faults(key, korean)) for key, korean in CATALOGUE.items()}
    assert {key: each for key, each in found.items() if each} == {}


def test_what_a_korean_hint_quotes_is_in_the_korean_lesson() -> None:
    for lesson in KOREAN:
        (path,) = ROOT.glob(f"notebooks/ko/??_{lesson}.ipynb")
        cells = nbformat.read(path, 4).cells
        texts = [cell.source for cell in cells if cell.cell_type == "markdown"]
        titles = re.findall("^#+ (.*)", "\n".join(texts), re.MULTILINE)
        hints = " ".join(in_korean(h) for check in MODULES[lesson].ANSWERS for h in check.hints)
        quoted, strong = (re.findall(how, hints) for how in (r'"([^"]+)"', r"\*\*[^*]+\*\*"))
        assert quoted or strong, lesson
        assert [each for each in quoted if not any(each in title for title in titles)] == [], lesson
        missing = [each for each in strong if not any(each.strip("*") in text for text in texts)]
        assert missing == [], lesson


# ---- who hears it ---------------------------------------------------------------------------


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    """Go to a folder of this name."""
    monkeypatch.delenv("MINIDIST_LANGUAGE", raising=False)

    def go(name: str) -> Path:
        (tmp_path / name).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / name)
        return tmp_path / name

    return go


def test_the_language_comes_from_outside(in_folder, monkeypatch) -> None:
    said = "the answer is None. Put yours in its place."
    for folder, variable, korean in [
        *(("ko", "", True), ("my", "", False), ("solutions", "", False)),
        *(("ko", "en", False), ("my", "ko", True), ("my", "fr", False)),
    ]:
        in_folder(folder)
        monkeypatch.setenv("MINIDIST_LANGUAGE", variable)
        assert spoken(said) == (CATALOGUE[said] if korean else said), (folder, variable)
    monkeypatch.delenv("MINIDIST_LANGUAGE")
    in_folder("ko").rmdir()  # a folder that is gone speaks English
    assert spoken("exactly") == "exactly"


def test_what_the_catalogue_does_not_have_stays(in_folder) -> None:
    in_folder("ko")
    assert spoken("shapes {0} and {1} do not match") == "shapes {0} and {1} do not match"
    mixed = "Not yet: on 2 ranks: rank 1 raised ValueError: a: b {0}, in the line `x = {1}`."
    assert "오류가 났습니다. ValueError: a: b {0} (코드: `x = {1}`)." in spoken(mixed)


def test_a_prediction_in_korean(in_folder, capsys) -> None:
    in_folder("ko")
    for number, measured, _ in SAYS:
        md.predict(number, "bytes sent").against(measured)
        said = capsys.readouterr().out.rstrip()
        assert said.startswith("bytes sent: 예측 ") and said.endswith("니다."), said
        verdict = said.partition(", 측정 ")[2].partition(": ")[2]
        assert not english_in(verdict) and "said" not in said, said
    for wrong, kind in WRONG:
        md.predict(wrong)
        said = capsys.readouterr().out
        assert not english_in(said.replace(kind.split()[0], "")) and said.endswith("칩니다.\n")


@pytest.mark.soak
def test_a_learners_copy_of_a_korean_lesson(in_folder) -> None:
    """The cells of a lesson in a real kernel: a puzzle, and a guess on a rank."""
    folder = in_folder("ko")
    cells = [
        "import torch\nimport minidist as md\n%load_ext minidist\n"
        "from minidist.course.checks import layer_splitting as check",
        "check.idle_part(None)",
        "check.idle_part(7 / 32)",
        "check.idle_part(7 / 39)",
        "%%ranks -n 2\nimport minidist as md\nmd.predict(2).against(4)",
    ]
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(made, resources={"metadata": {"path": str(folder)}}, timeout=60).execute()
    none, wrong, right, guess = (
        "".join(o.get("text") or o.data["text/plain"] for o in cell.outputs)
        for cell in made.cells[1:]
    )
    assert none == "아직 아닙니다: 답이 None입니다. 그 자리에 여러분의 답을 적으십시오."
    assert wrong.startswith("아직 아닙니다: `0.21875`: 답이 아닙니다. 전체 시간이 아니라 ")
    assert '\n힌트 1/3: "버블" 절의 그림에서 마지막 랭크를 보십시오.' in wrong
    assert right.startswith("정답입니다: 7 / (32 + 7)입니다.")
    assert "예측 2, 측정 4: 예측이 측정값보다 2배 작습니다." in guess
    for said in none, wrong, right:
        assert not english_in(said)
