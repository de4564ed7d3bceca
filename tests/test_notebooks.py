"""What must hold for every notebook before nbval even runs it.

nbval compares a notebook with its stored outputs, and can be made to compare nothing: by a cell
that was never run, by a tag, by a picture. These checks keep the comparison meaningful.
"""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb")) + sorted(
    ROOT.glob("notebooks/solutions/*.ipynb")
)

MACHINE_PATHS = ["/tmp/ipykernel_", "/home/", "/root/", "/Users/"]
THIS_MACHINE = [str(ROOT), sys.prefix, sys.base_prefix, str(Path.home())]

Check = Callable[[NotebookNode], Iterator[str]]


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tags(cell: NotebookNode) -> set[str]:
    return set(cell.metadata.get("tags", []))


def texts(cell: NotebookNode) -> Iterator[str]:
    """A cell's source and everything that its outputs say."""
    yield cell.source
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            yield output.text
        elif output.output_type == "error":
            yield "\n".join([output.ename, output.evalue, *output.traceback])
        else:
            yield from (data for data in output.data.values() if isinstance(data, str))


def ran_in_order(notebook: NotebookNode) -> Iterator[str]:
    """nbval silently compares nothing in a cell without an execution count."""
    counts = [cell.execution_count for cell in code_cells(notebook)]
    if counts != list(range(1, len(counts) + 1)):
        yield f"execution counts {counts} are not 1..{len(counts)}: run `make notebooks`"


def errors_are_meant(notebook: NotebookNode) -> Iterator[str]:
    """A cell that breaks something on purpose says so, and does break it."""
    for cell in code_cells(notebook):
        raised = any(output.output_type == "error" for output in cell.outputs)
        if raised != ("raises-exception" in tags(cell)):
            said = "has" if raised else "is tagged raises-exception and lacks"
            yield f"cell {cell.execution_count} {said} an error"


def outputs_are_compared(notebook: NotebookNode) -> Iterator[str]:
    """Timings differ from run to run, so their cells are tagged; but each such cell asserts what
    must hold of them, and a tenth of the cells at most is tagged. (One always may be: a notebook
    of nine cells may also hold a timing.)
    """
    ignored = [cell for cell in code_cells(notebook) if "nbval-ignore-output" in tags(cell)]
    allowed = max(1, len(code_cells(notebook)) // 10)
    if len(ignored) > allowed:
        yield f"{len(ignored)} cells are tagged nbval-ignore-output, of {allowed} allowed"
    for cell in ignored:
        if not re.search(r"^\s*assert\b", cell.source, re.MULTILINE):
            yield f"cell {cell.execution_count} ignores its output and asserts nothing"


def timed_alone(notebook: NotebookNode) -> Iterator[str]:
    """Where other tests run beside it, a cell measures them, too."""
    for cell in code_cells(notebook):
        if "nbval-ignore-output" in tags(cell) and "alone" not in tags(cell):
            yield f"cell {cell.execution_count} ignores its output and is not tagged alone"


def nothing_is_skipped(notebook: NotebookNode) -> Iterator[str]:
    """The two tags of nbval above are the only ones; its others, and its comments, hide more."""
    for cell in code_cells(notebook):
        others = {tag for tag in tags(cell) if tag.startswith("nbval-")} - {"nbval-ignore-output"}
        if others or re.search(r"^\s*#\s*(NBVAL_|PYTEST_VALIDATE_)", cell.source, re.MULTILINE):
            yield f"cell {cell.execution_count} hides from nbval"


def pictures_are_png(notebook: NotebookNode) -> Iterator[str]:
    """SVG carries a date, widgets carry random names, and neither is drawn everywhere."""
    for cell in code_cells(notebook):
        for output in cell.outputs:
            kinds = set(output.get("data", {}))
            if refused := kinds & {"image/svg+xml", "application/vnd.jupyter.widget-view+json"}:
                yield f"cell {cell.execution_count} stores {sorted(refused)}"
            if "<Figure size" in output.get("data", {}).get("text/plain", ""):
                if "image/png" not in kinds:
                    yield f"cell {cell.execution_count} shows a figure without its PNG"


def pictures_have_words(notebook: NotebookNode) -> Iterator[str]:
    """Who does not see a picture is told what it shows."""
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown" and re.search(
            r"!\[\s*\]\(|<img(?![^>]*\balt=)", cell.source
        ):
            yield f"the picture in cell at {number} has no alternative text"
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    plots = [output for output in outputs if "image/png" in output.get("data", {})]
    silent = [plot for plot in plots if not plot.metadata.get("image/png", {}).get("alt")]
    if silent:
        yield f"{len(silent)} of {len(plots)} plots have no alternative text"


def no_machine_paths(notebook: NotebookNode) -> Iterator[str]:
    """A lesson reads the same everywhere."""
    places = [*MACHINE_PATHS, *(place for place in THIS_MACHINE if len(place) > 1)]
    for number, cell in enumerate(notebook.cells):
        for text in texts(cell):
            yield from (f"cell at {number} holds {place}" for place in places if place in text)


MOST_CELLS, MOST_WORDS, MOST_LINES = 55, 1_800, 30


def one_sitting(notebook: NotebookNode) -> Iterator[str]:
    """A lesson does not grow beyond one sitting, and a cell fits a screen."""
    words = sum(len(c.source.split()) for c in notebook.cells if c.cell_type == "markdown")
    if len(notebook.cells) > MOST_CELLS or words > MOST_WORDS:
        yield f"{len(notebook.cells)} cells and {words} words"
    for cell in code_cells(notebook):
        if (lines := len(cell.source.splitlines())) > MOST_LINES:
            yield f"cell {cell.execution_count} has {lines} lines"


def predictions(notebook: NotebookNode) -> Iterator[str]:
    """A lesson asks for guesses, which nobody has made yet, and each meets its measurement in a
    later cell. (Under another name, or too early, it would end "run all" in an error.)
    """
    cells = [cell.source for cell in code_cells(notebook)]
    made = [
        (number, name, guess)
        for number, source in enumerate(cells)
        for name, guess in re.findall(r"^(\w+) = md\.predict\(\s*(\w*)", source, re.MULTILINE)
    ]
    if len(made) < 2 or len(made) < sum(source.count("md.predict(") for source in cells):
        yield f"{len(made)} predictions, each to be written as `guess = md.predict(None, …)`"
    for number, name, guess in made:
        if guess != "None":
            yield f"{name} is stored with a guess, {guess or 'not with None'}"
        again = [later for later, other, _ in made if other == name and later > number]
        until = min(again, default=len(cells) - 1)
        if not any(f"{name}.against(" in source for source in cells[number + 1 : until + 1]):
            yield f"{name} does not meet its measurement in a later cell"


LESSONS = [path for path in NOTEBOOKS if path.parent.name == "notebooks"][1:]  # no start page


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_asks_for_predictions(path: Path) -> None:
    assert list(predictions(nbformat.read(path, as_version=4))) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_lesson_is_one_sitting(path: Path) -> None:
    assert list(one_sitting(nbformat.read(path, as_version=4))) == []


CHECKS: list[Check] = [
    ran_in_order,
    errors_are_meant,
    outputs_are_compared,
    timed_alone,
    nothing_is_skipped,
    pictures_are_png,
    pictures_have_words,
    no_machine_paths,
]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.relative_to(ROOT).as_posix())
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_notebook(path: Path, check: Check) -> None:
    assert list(check(nbformat.read(path, as_version=4))) == []


# ---- each check finds what it is for ------------------------------------------------------


def cell(source: str = "1", count: int | None = 1, tag: str = "", output: object = None):
    return nbformat.v4.new_code_cell(
        source,
        execution_count=count,
        metadata={"tags": tag.split()} if tag else {},
        outputs=[output] if output else [],
    )


def notebook(*cells: NotebookNode) -> NotebookNode:
    return nbformat.v4.new_notebook(cells=list(cells))


def timings(tagged: int, plain: int) -> list[NotebookNode]:
    return [cell("assert 1", tag="nbval-ignore-output alone") for _ in range(tagged)] + [
        cell() for _ in range(plain)
    ]


def guess(*names: str, number: str = "None") -> str:
    return "".join(f"{name} = md.predict({number}, 'MB')\n" for name in names)


ERROR = nbformat.v4.new_output("error", ename="ValueError", evalue="no", traceback=["at /home/me"])
WARNING = nbformat.v4.new_output("stream", name="stderr", text="/tmp/ipykernel_12/3.py:1: Warning")
SVG = nbformat.v4.new_output("display_data", {"image/svg+xml": "<svg/>"})
FIGURE = nbformat.v4.new_output("display_data", {"text/plain": "<Figure size 640x480 with 1 Axes>"})
PLOT = nbformat.v4.new_output("display_data", {"image/png": "iVBOR"})
TOLD = nbformat.v4.new_output("display_data", PLOT.data, metadata={"image/png": {"alt": "Lines"}})

FAULTS = [
    (ran_in_order, [cell(count=None)]),
    (ran_in_order, [cell(count=2), cell(count=1)]),
    (errors_are_meant, [cell(output=ERROR)]),
    (errors_are_meant, [cell(tag="raises-exception")]),
    (outputs_are_compared, [cell("# assert", tag="nbval-ignore-output")]),
    (outputs_are_compared, timings(2, 17)),
    (timed_alone, [cell("assert 1", tag="nbval-ignore-output")]),
    (nothing_is_skipped, [cell(tag="nbval-skip")]),
    (nothing_is_skipped, [cell("#NBVAL_IGNORE_OUTPUT\n1")]),
    (pictures_are_png, [cell(output=SVG)]),
    (pictures_are_png, [cell(output=FIGURE)]),
    (pictures_have_words, [nbformat.v4.new_markdown_cell("![](img.png)")]),
    (pictures_have_words, [nbformat.v4.new_markdown_cell('<img src="img.png">')]),
    (pictures_have_words, [cell(output=PLOT)]),
    (pictures_have_words, [cell(output=TOLD), cell(output=PLOT)]),
    (one_sitting, [cell() for _ in range(MOST_CELLS + 1)]),
    (one_sitting, [nbformat.v4.new_markdown_cell("a " * (MOST_WORDS + 1))]),
    (one_sitting, [cell("1\n" * (MOST_LINES + 1))]),
    (predictions, [cell(guess("a")), cell("a.against(1)")]),  # one
    (predictions, [cell(guess("a", "b")), cell("a.against(1)")]),
    (predictions, [cell("b.against(1)"), cell(guess("a", "b")), cell("a.against(1)")]),
    (predictions, [cell(guess("a", "b") + "a.against(1)"), cell("b.against(1)")]),
    (predictions, [cell(guess("a")), cell(guess("a")), cell("a.against(1)")]),
    (predictions, [cell(guess("a", "b", number="4")), cell("a.against(1)\nb.against(1)")]),
    (predictions, [cell(guess("a", "b", number="")), cell("a.against(1)\nb.against(1)")]),
    (predictions, [cell(guess("a", "b") + "md.predict()"), cell("a.against(1)\nb.against(1)")]),
    (no_machine_paths, [cell(output=ERROR)]),
    (no_machine_paths, [cell(output=WARNING)]),
    (no_machine_paths, [nbformat.v4.new_markdown_cell(f"see {ROOT}")]),
]


@pytest.mark.parametrize(("check", "cells"), FAULTS)
def test_a_check_finds_its_fault(check: Check, cells: list[NotebookNode]) -> None:
    assert list(check(notebook(*cells)))


def test_a_good_notebook_passes_every_check() -> None:
    meant = nbformat.v4.new_output("error", ename="ZeroDivisionError", evalue="division by zero")
    good = notebook(*timings(2, 17), cell("1/0", tag="raises-exception", output=meant))
    good.cells[-2].outputs = [TOLD]
    good.cells.append(
        nbformat.v4.new_markdown_cell('![Ranks](a.png) <img src="a.png" alt="Ranks">')
    )
    for count, each in enumerate(code_cells(good), start=1):
        each.execution_count = count
    assert [complaint for check in CHECKS for complaint in check(good)] == []
    asked = notebook(cell(guess("a", "b")), cell("a.against(1)"), cell("if 1:\n    b.against(2)"))
    assert list(predictions(asked)) == []
