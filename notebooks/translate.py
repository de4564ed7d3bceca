"""Keep the Korean lessons, `notebooks/ko/`, beside the English ones of the same names.

    python notebooks/translate.py                      copy what is the same, name what is behind
    python notebooks/translate.py --done CELL ...      the text of these cells is up to date now

Code, outputs and tags are those of the English lesson: `notebooks/execute.py` copies them when it
has run it. Only what a check says is in Korean, as in a learner's kernel (`course.language`). A
text is written in Korean by hand. Its cell keeps a short hash of the English text that it
translates, so that we notice when that has changed. Terms: `notebooks/ko/glossary.md`.
"""

import argparse
import copy
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from minidist.course.language import in_korean

HERE = Path(__file__).resolve().parent
HASH = "translates"  # in the metadata of a Korean text


def digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()[:12]


def in_a_korean_lesson(cell: NotebookNode) -> NotebookNode:
    """A code cell as a Korean lesson has it: what a check says is in Korean."""
    cell = copy.deepcopy(cell)
    for output in cell.outputs:
        said = output.get("data", {}).get("text/plain", "")
        if said.startswith(("Right: ", "Not yet: ")):
            output.data["text/plain"] = "\n".join(map(in_korean, said.splitlines()))
    return cell


def follow(path: Path) -> NotebookNode:
    """Give the Korean notebook at `path` the cells of the English one; only its texts are its own.
    A text that is not there yet is the English one, without a hash. Returns the notebook."""
    english = nbformat.read(HERE / path.name, as_version=4)
    texts = {}
    if path.exists():
        cells = nbformat.read(path, as_version=4).cells
        texts = {cell.id: cell for cell in cells if cell.cell_type == "markdown"}
    english.cells = [
        texts.get(cell.id, cell) if cell.cell_type == "markdown" else in_a_korean_lesson(cell)
        for cell in english.cells
    ]
    nbformat.write(english, path)
    return english


def behind(korean: NotebookNode, english: NotebookNode) -> Iterator[str]:
    """The texts of a Korean notebook that are not translations of the English ones."""
    sources = {cell.id: cell.source for cell in english.cells}
    for cell in korean.cells:
        if cell.cell_type == "markdown" and cell.id in sources:
            said = cell.metadata.get(HASH)
            if said is None:
                yield f"cell {cell.id} is not translated"
            elif said != digest(sources[cell.id]):
                yield f"cell {cell.id} is behind its English text"


def mark(path: Path, done: set[str]) -> None:
    """Say that these cells translate the English text of today."""
    korean, english = (nbformat.read(each, as_version=4) for each in (path, HERE / path.name))
    sources = {cell.id: cell.source for cell in english.cells}
    for cell in korean.cells:
        if cell.id in done and cell.cell_type == "markdown":
            cell.metadata[HASH] = digest(sources[cell.id])
    nbformat.write(korean, path)


def main() -> int:
    parser = argparse.ArgumentParser(description="Keep the Korean lessons beside the English ones.")
    parser.add_argument("--done", nargs="*", default=[], metavar="CELL", help="ids of cells")
    done = set(parser.parse_args().done)
    late = 0
    for path in sorted(HERE.glob("ko/*.ipynb")):
        mark(path, done)
        for complaint in behind(follow(path), nbformat.read(HERE / path.name, as_version=4)):
            late += 1
            print(f"notebooks/ko/{path.name}: {complaint}")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
