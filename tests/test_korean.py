"""The Korean lessons are the English ones in another language: the same cells, code and outputs,
and a text for each text. `notebooks/translate.py` copies what is the same."""

import copy
import os
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from minidist.course.language import catalogue

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


def test_a_korean_lesson_is_the_english_one() -> None:
    found = []
    for lesson in LESSONS:
        both = read(KOREAN / lesson), read(ENGLISH / lesson)
        found += [f"notebooks/ko/{lesson}: {each}" for check in CHECKS for each in check(*both)]
    assert found == []


def test_the_five_lessons_of_model_parallelism_and_a_start_page_are_there() -> None:
    names = [path.name for path in sorted(ENGLISH.glob("*.ipynb")) if "08" <= path.name[:2] <= "14"]
    part = [name for name in names if name[:2] not in ("12", "13")]
    assert LESSONS == ["00_start.ipynb", *part]


def test_the_text_is_polite_throughout() -> None:
    """합니다체: no sentence of a paragraph ends in the plain form, or in 해요체."""
    for lesson in LESSONS:
        for cell in read(KOREAN / lesson).cells:
            if cell.cell_type == "markdown":
                found = re.findall(r"(?<![니시])다\.|[가-힣]요[.?!]", plain(cell.source))
                assert not found, (lesson, cell.id)


def test_terms_are_those_of_the_glossary() -> None:
    """What the glossary says not to write is written nowhere."""
    table = (KOREAN / "glossary.md").read_text()
    refused = re.findall(r"^\|[^|]*\|[^|]*\| 쓰지 않음: ([^|;]*)", table, re.MULTILINE)
    words = {word.strip() for each in refused for word in each.split(",")}
    assert len(words) > 10
    texts = {"the catalogue": "\n".join(catalogue().values())}
    for lesson in LESSONS:
        cells = read(KOREAN / lesson).cells
        texts[lesson] = "\n".join(c.source for c in cells if c.cell_type == "markdown")
    for name, text in texts.items():
        assert [word for word in words if word in text] == [], name


# ---- a small lesson in both languages ---------------------------------------------------------


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


def test_what_differs_is_found() -> None:
    assert [each for check in CHECKS for each in check(*pair())] == []
    korean, english = pair()
    korean.cells[0].source += "\n\nThis paragraph is still in English"
    korean.cells[1].source = "print(2)"
    english.cells[0].source += "\n\n## A new part"
    complaints = {check for check in CHECKS if list(check(korean, english))}
    assert complaints == {same_code, up_to_date, no_english, same_headings}
    assert list(up_to_date(korean, english)) == [
        f"cell {english.cells[0].id} is behind its English text"
    ]


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
