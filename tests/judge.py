"""pytest as `make test` runs it: `python tests/judge.py REPORT [arguments of pytest]`.

REPORT is a file for what ran, and what did not come to its end ("left"):
{"passed": [test, ...], "skipped": [...], "busy": [...], "failed": {test: why}, "left": [...],
"seconds": {file: how long its tests took}}.

What is marked `alone` asserts measured times. Such a number may be wrong because the machine was
busy: if other processes took more than a twentieth of it meanwhile, the test is skipped as busy.
A cell of a notebook may assert what another has measured: so each timed cell counts that has made a
name which it uses, or a name from which that one was made. Skipped is also a later cell that lacks
a name which a skipped one defines. What hangs or raises another error fails all the same. Where the
system does not say what others took (macOS), a wrong number always fails.
"""

import ast
import dis
import importlib.util
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Generator, Iterable
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

# By its file: with the package would come torch, which takes seconds too.
_spec = importlib.util.spec_from_file_location(
    "quiet", Path(__file__).parents[1] / "minidist" / "bench" / "quiet.py"
)
assert _spec is not None and _spec.loader is not None
quiet = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(quiet)

NOT_JUDGED = pytest.StashKey[set[str]]()  # the names that a notebook's skipped cells define
# For each name of a notebook, what others took of the machine in the cells that made it: the most.
TAKEN = pytest.StashKey[dict[str, float]]()
ADD = {"append", "extend", "update", "add"}  # to what was there


class Report:
    """Writes down, where the tests are led from, what became of each."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)
        self.found: dict[str, Any] = {"passed": [], "skipped": [], "busy": [], "failed": {}}
        self.left: set[str] = set()  # what was found and has not come to its end
        self.told: set[str] = set()  # those known to have passed or not, not only to be set up
        self.seconds = Counter[str]()  # of each file

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.expect(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: list[str]) -> None:
        self.expect(ids)

    def expect(self, ids: Iterable[str]) -> None:
        for test, times in Counter(ids).items():  # xdist runs only one of two with the same name
            self.left.add(test if times == 1 else f"{test} ({times} have this name)")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:  # nobody knows which tests it holds
            self.left.add(report.nodeid)

    def pytest_internalerror(self, excrepr: object) -> None:
        self.left.add("what had an internal error")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.split("::")[0]] += report.duration
        if report.failed or report.skipped or report.when == "call":
            self.told.add(report.nodeid)
        if report.failed:
            self.found["failed"].setdefault(report.nodeid, report.longreprtext)
        elif report.skipped or report.when == "call":
            busy = report.skipped and "Skipped: busy: " in report.longreprtext
            self.found["busy" if busy else report.outcome].append(report.nodeid)
        if report.when == "teardown" and report.nodeid in self.told:
            self.left.discard(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        found = self.found | {"left": sorted(self.left), "seconds": self.seconds}
        self.file.write_text(json.dumps(found))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object, error: object) -> None:
        if error:  # perhaps before it has said what it found
            pytest.exit(f"a worker died: {error}", returncode=3)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of a notebook is `alone` if a cell has that tag: cells need those before them."""
    cells = [item for item in items if item.path.suffix == ".ipynb"]
    notebooks = {item.path for item in cells if is_timed(item)}
    for item in cells:
        if item.path in notebooks:
            item.add_marker("alone")


def is_timed(item: pytest.Item) -> bool:
    """Whether it measures, and not only runs in a notebook with a cell that does."""
    if item.path.suffix == ".ipynb":
        return "alone" in item.cell.metadata.get("tags", [])
    marker = item.get_closest_marker("alone")
    return marker is not None and not marker.kwargs.get("always_judged")


def what_failed(item: pytest.Item, error: Exception) -> tuple[str, str]:
    """The kind of error, and what it says; of a cell, the one that was raised in the notebook."""
    kind, said = type(error).__name__, str(error)
    if kind == "NbCellError" and "outputs differ" not in said:
        for output in item.test_outputs:
            if output.output_type == "error":
                return output.ename, output.evalue
    return kind, said


def is_wrong_number(kind: str, said: str) -> bool:
    """Whether it comes of an assertion, here or on a rank, or of nbval's comparison of outputs."""
    return (
        kind == "AssertionError"
        or (kind == "NbCellError" and "outputs differ" in said)
        or (
            kind == "RankError"
            and bool(re.match(r"(rank \d+|every rank) raised AssertionError", said))
        )
    )


def names_of(cell: str) -> tuple[set[str], set[str]]:
    """The names that a cell reads from earlier ones, and those that it defines or changes in place.
    What it imports does not count: that is not measured, and most cells read it."""
    from IPython.core.inputtransformer2 import TransformerManager

    on_ranks = re.sub(r"\A%%ranks.*\n", "", cell)
    tree = ast.parse(TransformerManager().transform_cell(on_ranks))
    tree.body = [each for each in tree.body if not isinstance(each, ast.Import | ast.ImportFrom)]
    read: set[str] = set()
    made: set[str] = set()

    def look(code: CodeType, outermost: bool) -> None:
        for step in dis.get_instructions(code):  # in the order in which it runs
            if isinstance(step.argval, CodeType):
                look(step.argval, outermost=False)
            elif step.opname in ("LOAD_NAME", "LOAD_GLOBAL") and step.argval not in made:
                read.add(step.argval)
            elif step.opname == "STORE_GLOBAL" or (step.opname == "STORE_NAME" and outermost):
                made.add(step.argval)

    look(compile(tree, "a cell", "exec"), outermost=True)
    own = read | made  # and no names of a function's own
    for node in ast.walk(tree):
        changes = isinstance(node, ast.Subscript | ast.Attribute) and (
            isinstance(node.ctx, ast.Store) or getattr(node, "attr", "") in ADD
        )
        if changes:
            made |= own & {each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "get":
            # r.get("x"), from ranks
            read |= {str(each.value) for each in node.args if isinstance(each, ast.Constant)}
    return read, made


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    assert item.parent is not None
    read, made = names_of(item.cell.source) if item.path.suffix == ".ipynb" else (set(), set())
    taken = item.parent.stash.setdefault(TAKEN, {})
    share = max((taken.get(name, 0.0) for name in read), default=0.0)
    timed, hung = is_timed(item), getattr(item.parent, "timed_out", False)
    not_judged = item.parent.stash.setdefault(NOT_JUDGED, set())
    if timed:
        moment = quiet.Moment(os.getpid())
    try:
        result = yield
        if made and timed and moment.lasted() >= quiet.MOMENT:
            share = max(moment.share(), share)
    except Exception as error:
        kind, said = what_failed(item, error)
        if getattr(item.parent, "timed_out", False):
            raise  # whatever else it says: an interrupted cell may go on
        undefined = re.match(r"name '(\w+)' is not defined", said) if kind == "NameError" else None
        wrong = timed and is_wrong_number(kind, said)
        if wrong and (share := max(moment.share(), share)) > quiet.LIMIT:
            why = f"others took {share:.0%} of the machine"
        elif undefined and undefined[1] in not_judged:
            why = "a cell before it was not judged"
        else:
            raise
        not_judged |= made
        pytest.skip(f"busy: {why}; then {item.name}: {kind}: {said}")
    finally:
        taken |= dict.fromkeys(made, share)
    if getattr(item.parent, "timed_out", False) and not hung:
        pytest.fail("the cell took too long, and was interrupted")
    return result


if __name__ == "__main__":
    sys.exit(pytest.main(["-p", "judge", *sys.argv[2:]], plugins=[Report(sys.argv[1])]))
