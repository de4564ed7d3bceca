"""What must hold for every notebook before nbval even runs it.

nbval compares a notebook with its stored outputs, and can be made to compare nothing: by a cell
that was never run, by a tag, by a picture. These checks keep the comparison meaningful.
"""

import re
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
NOTEBOOKS += sorted(ROOT.glob("notebooks/[mst]*/*.ipynb"))  # the museum, solutions, traces

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
    """`alone` says that a cell measures time: with MINIDIST_TIMING=soft it only prints a miss."""
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


@dataclass(frozen=True)
class Sitting:
    """What a lesson may have: cells, words, lines of code in all and in one cell, minutes."""

    cells: int
    words: int
    lines: int
    lines_of_cell: int
    minutes: float


AN_HOUR = Sitting(40, 1_300, 280, 20, 77.5)  # the minutes are told to five: 75
MINUTES = runpy.run_path(str(ROOT / "notebooks/minutes.py"))["minutes"]


def one_sitting(path: Path) -> Iterator[str]:
    """A lesson is an honest hour, and a cell fits a screen."""
    notebook = nbformat.read(path, as_version=4)
    sources = [cell.source for cell in code_cells(notebook)]
    lines = [[line for line in source.splitlines() if line.strip()] for source in sources]
    found = Sitting(
        len(notebook.cells),
        sum(len(cell.source.split()) for cell in notebook.cells if cell.cell_type == "markdown"),
        sum(map(len, lines)),
        max(len(source.splitlines()) for source in sources),
        MINUTES(path),
    )
    for what, limit in vars(AN_HOUR).items():
        if (value := getattr(found, what)) > limit:
            yield f"{value:.4g} {what}, at most {limit}"


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


def test_every_notebook() -> None:
    found = []
    for path in NOTEBOOKS:
        read = nbformat.read(path, as_version=4)
        for check in [*CHECKS, predictions] if path in LESSONS else CHECKS:
            name = f"{path.relative_to(ROOT)}: {check.__name__}"
            found += [f"{name}: {each}" for each in check(read)]
        if path in LESSONS:
            found += [f"{path.name}: {each}" for each in one_sitting(path)]
    assert found == []


def test_a_notebook_that_compares_nothing_is_found() -> None:
    def faults(source: str, *tags: str, count: int | None = 1) -> set[str]:
        made = nbformat.v4.new_code_cell(source, execution_count=count, metadata={"tags": [*tags]})
        book = nbformat.v4.new_notebook(cells=[made])
        return {check.__name__ for check in CHECKS if list(check(book))}

    assert faults("1") == set() == faults("assert 1", "nbval-ignore-output", "alone")
    assert faults("1", count=None) == {"ran_in_order"}
    assert faults("1", "nbval-skip") == {"nothing_is_skipped"}
    assert faults("1", "nbval-ignore-output") == {"outputs_are_compared", "timed_alone"}
    assert faults("1", "raises-exception") == {"errors_are_meant"}
