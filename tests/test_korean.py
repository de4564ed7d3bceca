"""The Korean lessons are the English ones in another language: the same cells, code and outputs,
and a text for each text. `notebooks/translate.py` copies what is the same."""

import copy
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from minidist.language import CATALOGUE

ROOT = Path(__file__).resolve().parents[1]
ENGLISH = ROOT / "notebooks"
KOREAN = ENGLISH / "ko"
LESSONS = sorted(path.name for path in KOREAN.glob("*.ipynb"))
TRANSLATE = runpy.run_path(str(ENGLISH / "translate.py"))

Check = Callable[[NotebookNode, NotebookNode], Iterator[str]]


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def texts(korean: NotebookNode, english: NotebookNode) -> Iterator[tuple[str, str, str]]:
    """The id, the Korean text and the English one of each text that both have."""
    sources = {cell.id: cell.source for cell in english.cells}
    for cell in korean.cells:
        if cell.cell_type == "markdown" and cell.id in sources:
            yield cell.id, cell.source, sources[cell.id]


def plain(text: str) -> str:
    """A text without code, formulas, and where its links lead: what is left are words."""
    text = re.sub(r"```.*?```|`[^`]*`|\$\$.*?\$\$|\$[^$]*\$", " ", text, flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", text)


# ---- what must hold ------------------------------------------------------------------------


def same_cells(korean: NotebookNode, english: NotebookNode) -> Iterator[str]:
    ours, theirs = ([(c.id, c.cell_type) for c in each.cells] for each in (korean, english))
    if ours != theirs or korean.metadata != english.metadata:
        places = (a for a, b in zip([*ours, None], [*theirs, None], strict=False) if a != b)
        yield f"other cells than in English, from {next(places, None)} on"


def same_code(korean: NotebookNode, english: NotebookNode) -> Iterator[str]:
    cells = {cell.id: cell for cell in english.cells}
    for cell in korean.cells:
        if cell.cell_type == "code" and cell.id in cells:
            wanted = TRANSLATE["in_a_korean_lesson"](cells[cell.id])
            for what in cell.keys() | wanted.keys():
                if cell.get(what) != wanted.get(what):
                    yield f"cell {cell.id}: {what} differs from English"


def up_to_date(korean: NotebookNode, english: NotebookNode) -> Iterator[str]:
    yield from TRANSLATE["behind"](korean, english)


def no_english(korean: NotebookNode, english: NotebookNode) -> Iterator[str]:
    for name, text, _ in texts(korean, english):
        words = plain(text)
        if not re.search("[가-힣]", words) and re.search(r"\b[a-z]{3}", words):
            yield f"cell {name} has no Korean"
        for found in re.findall(r"(?:\b[A-Za-z'’]+[,;:]? ){5,}[A-Za-z'’]+", words):
            yield f"cell {name} is English: {found}"


def same_links(korean: NotebookNode, english: NotebookNode) -> Iterator[str]:
    """To the Korean form of a lesson or a picture, where there is one. A Korean text may lead to
    more Korean pages."""
    for name, ours, theirs in texts(korean, english):
        found, wanted = (set(re.findall(r"\]\(([^)\s]+)\)", text)) for text in (ours, theirs))
        wanted = {link_in_korean(link) for link in wanted}
        if wanted - found or any("/" in link for link in found - wanted):
            yield f"cell {name} leads to {sorted(found)}, not {sorted(wanted)}"


def link_in_korean(link: str) -> str:
    if link.startswith(("http", "#")):
        return link
    place = (ENGLISH / link).resolve()
    other = place.parent / "ko" / place.name  # of a lesson, a picture
    return Path(os.path.relpath(other if other.exists() else place, KOREAN)).as_posix()


IN_ENGLISH = "`MINIDIST_LANGUAGE=en make lab`"  # has no place in an English text


def same_names(korean: NotebookNode, english: NotebookNode) -> Iterator[str]:
    """What is code in an English text is code in the Korean one; formulas differ in words only."""
    for name, ours, theirs in texts(korean, english):
        for pattern in r"`[^`\n]+`", r"\$\$.*?\$\$":
            found, wanted = (
                {
                    re.sub(r"\\text\{[^}]*\}", "", each)
                    for each in re.findall(pattern, text, re.DOTALL)
                }
                for text in (ours, theirs)
            )
            if found - {IN_ENGLISH} != wanted:
                yield f"cell {name}: {sorted(found ^ wanted)} in one language only"


def same_headings(korean: NotebookNode, english: NotebookNode) -> Iterator[str]:
    """As many headings of each level, rows of tables, items and pictures."""
    kinds = r"^(#+ |\||[-*] |\d+\. |> |!\[)"
    for name, *both in texts(korean, english):
        ours, theirs = (re.findall(kinds, text, re.MULTILINE) for text in both)
        if ours != theirs:
            yield f"cell {name} has {ours}, in English {theirs}"


def emphasis_is_seen(korean: NotebookNode, english: NotebookNode) -> Iterator[str]:
    """Markdown takes `**` between a sign and a letter for the start of an emphasis, never its end,
    and Korean puts its particles just there: `**말.**은`."""
    for name, text, _ in texts(korean, english):
        for found in re.findall(r"[.,:?!)\]%”\"]\*+[가-힣]+", plain(text)):
            yield f"cell {name}: the stars in {found} will be shown"


CHECKS: list[Check] = [
    same_cells,
    same_code,
    up_to_date,
    no_english,
    same_links,
    same_names,
    same_headings,
    emphasis_is_seen,
]


@pytest.mark.parametrize("lesson", LESSONS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_korean_lesson_is_the_english_one(lesson: str, check: Check) -> None:
    found = check(read(KOREAN / lesson), read(ENGLISH / lesson))
    assert [f"notebooks/ko/{lesson}: {each}" for each in found] == []


def test_the_five_lessons_of_model_parallelism_and_a_start_page_are_there() -> None:
    part = [path.name for path in sorted(ENGLISH.glob("*.ipynb")) if "07" <= path.name[:2] <= "11"]
    assert LESSONS == ["00_start.ipynb", *part]


@pytest.mark.parametrize("lesson", LESSONS)
def test_the_text_is_polite_throughout(lesson: str) -> None:
    """합니다체: no sentence of a paragraph ends in the plain form, or in 해요체."""
    for cell in read(KOREAN / lesson).cells:
        if cell.cell_type == "markdown":
            assert not re.findall(r"(?<![니시])다\.|[가-힣]요[.?!]", plain(cell.source)), cell.id


def test_terms_are_those_of_the_glossary() -> None:
    """What the glossary says not to write is written nowhere."""
    table = (KOREAN / "glossary.md").read_text()
    refused = re.findall(r"^\|[^|]*\|[^|]*\| 쓰지 않음: ([^|;]*)", table, re.MULTILINE)
    words = {word.strip() for each in refused for word in each.split(",")}
    assert len(words) > 10
    texts = {"korean.json": "\n".join(json.loads(CATALOGUE.read_text()).values())}
    for lesson in LESSONS:
        cells = read(KOREAN / lesson).cells
        texts[lesson] = "\n".join(c.source for c in cells if c.cell_type == "markdown")
    for name, text in texts.items():
        assert [word for word in words if word in text] == [], name


# ---- each check finds what it is for --------------------------------------------------------


def pair() -> tuple[NotebookNode, NotebookNode]:
    """A small lesson in both languages; they agree."""
    text = "# A `Copy` of all\n\nSee [Rank](01_rank.ipynb), and $$a \\text{ of all}$$"
    code = nbformat.v4.new_code_cell("print(1)", metadata={"tags": ["alone"]}, execution_count=1)
    code.outputs = [nbformat.v4.new_output("stream", text="1\n")]
    english = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text), code])
    korean = copy.deepcopy(english)
    korean.cells[0].source = "# `Copy` 하나\n\n[랭크](../01_rank.ipynb)와 $$a \\text{ 전체}$$"
    korean.cells[0].metadata["translates"] = TRANSLATE["digest"](text)
    return korean, english


def test_a_good_pair_passes_every_check() -> None:
    assert [each for check in CHECKS for each in check(*pair())] == []


def change(language: int, place: int, **new: object) -> Callable[[], tuple]:
    def changed() -> tuple[NotebookNode, NotebookNode]:
        both = pair()
        both[language].cells[place].update(new)
        return both

    return changed


def swapped() -> tuple[NotebookNode, NotebookNode]:
    korean, english = pair()
    korean.cells.reverse()
    return korean, english


def one_more() -> tuple[NotebookNode, NotebookNode]:
    korean, english = pair()
    english.cells.append(nbformat.v4.new_code_cell("2"))
    return korean, english


LINK, FORMULA = "[랭크](../01_rank.ipynb)", "$$a \\text{ 전체}$$"
FAULTS = [
    (same_cells, swapped),
    (same_cells, one_more),
    (same_cells, change(0, 0, id="another")),
    (same_code, change(1, 1, source="print(2)")),
    (same_code, change(0, 1, outputs=[])),
    (same_code, change(0, 1, metadata={})),
    (same_code, change(0, 1, execution_count=2)),
    (up_to_date, change(1, 0, source="# Another text")),
    (up_to_date, change(0, 0, metadata={})),
    (no_english, change(0, 0, source="# A copy of all")),
    (no_english, change(0, 0, source="# 하나\n\nThis paragraph is still in English")),
    (same_links, change(0, 0, source="# `Copy` 하나")),
    (same_links, change(0, 0, source="# `Copy`, [랭크](01_rank.ipynb)")),
    (same_names, change(0, 0, source=f"# 사본 하나\n\n{LINK}와 {FORMULA}")),
    (same_names, change(0, 0, source=f"# `Copy` 하나\n\n{LINK}와 $$b \\text{{ 전체}}$$")),
    (same_headings, change(0, 0, source="`Copy` 하나")),
    (same_headings, change(0, 0, source="# `Copy` 하나\n\n- 하나 더")),
    (emphasis_is_seen, change(0, 0, source="# **사본(copy)**은 하나")),
]


@pytest.mark.parametrize(("check", "both"), FAULTS)
def test_a_check_finds_its_fault(check: Check, both: Callable[[], tuple]) -> None:
    assert list(check(*both()))


def test_a_text_that_is_behind_is_named() -> None:
    korean, english = change(1, 0, source="# Another text")()
    name = english.cells[0].id
    assert list(up_to_date(korean, english)) == [f"cell {name} is behind its English text"]


# ---- what is the same is copied -------------------------------------------------------------


def test_the_korean_lesson_follows_the_english_one(tmp_path: Path, monkeypatch) -> None:
    korean, english = pair()
    follow, mark = TRANSLATE["follow"], TRANSLATE["mark"]
    monkeypatch.setitem(follow.__globals__, "HERE", tmp_path)
    path = tmp_path / "ko" / "lesson.ipynb"
    path.parent.mkdir()
    nbformat.write(korean, path)

    english.cells[1].source, english.cells[1].outputs = "print()", []
    new = nbformat.v4.new_markdown_cell("A new text")
    english.cells.insert(0, new)
    nbformat.write(english, tmp_path / "lesson.ipynb")
    follow(path)
    assert list(same_cells(read(path), english)) == list(same_code(read(path), english)) == []
    assert read(path).cells[1] == korean.cells[0]  # its text is its own
    assert list(up_to_date(read(path), english)) == [f"cell {new.id} is not translated"]

    mark(path, {new.id})
    assert list(up_to_date(read(path), english)) == []


def test_execute_hands_outputs_on_to_the_korean_lesson(tmp_path: Path) -> None:
    for script in "execute.py", "translate.py":
        shutil.copy(ENGLISH / script, tmp_path)
    korean, english = pair()
    korean.cells[1].outputs = english.cells[1].outputs = []
    english.cells[1].metadata = {}
    paths = tmp_path / "lesson.ipynb", tmp_path / "ko" / "lesson.ipynb"
    paths[1].parent.mkdir()
    for path, notebook in zip(paths, (english, korean), strict=True):
        nbformat.write(notebook, path)

    def execute(path: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(tmp_path / "execute.py"), str(path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=100)

    assert execute(paths[0]).returncode == 0
    done, english = read(paths[1]), read(paths[0])
    assert done.cells[1].outputs[0].text == "1\n" and done.cells[0] == korean.cells[0]
    assert [each for check in CHECKS for each in check(done, english) if check != same_links] == []

    before = paths[1].read_text()
    refused = execute(paths[1])
    assert refused.returncode == 2 and "run that" in refused.stderr
    assert paths[1].read_text() == before
