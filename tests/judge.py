"""pytest as `make test` runs it: `python tests/judge.py REPORT [arguments of pytest]`.

REPORT is a file for what ran:
{"passed": [test, ...], "skipped": [...], "busy": [...], "failed": {test: why}}.

What is marked `alone` asserts measured times. A time is judged only if its moment was quiet: where
other processes took more than a twentieth of the machine, a wrong number is skipped as busy, and so
is what depends on it in the same notebook. What hangs or raises another error fails all the same.
"""

import json
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

BUSY = pytest.StashKey[str]()


class Report:
    """Writes down, where the tests are led from, what became of each."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)
        self.found: dict[str, Any] = {"passed": [], "skipped": [], "busy": [], "failed": {}}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.found["failed"].setdefault(report.nodeid, report.longreprtext)
        elif report.skipped or report.when == "call":
            busy = report.skipped and "Skipped: busy: " in report.longreprtext
            self.found["busy" if busy else report.outcome].append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self.file.write_text(json.dumps(self.found))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object, error: object) -> None:
        if error:  # or what it had still to do would count as done
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


def is_wrong_number(error: BaseException) -> bool:
    """Whether it comes of an assertion, here or on a rank, or of nbval's comparison of outputs."""
    said, kind = str(error), type(error).__name__
    if kind == "NbCellError":
        return "outputs differ" in said or "AssertionError" in str(error.inner_traceback)
    return kind == "AssertionError" or (kind == "RankError" and "AssertionError" in said)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    assert item.parent is not None
    already = item.parent.stash.get(BUSY, "")  # in an earlier cell of this notebook
    if not already and not is_timed(item):
        return (yield)
    from minidist.bench import quiet, turns

    moment = quiet.Moment(os.getpid())
    try:
        return (yield)
    except Exception as error:
        share = moment.share()
        undefined = already and "NameError" in str(getattr(error, "inner_traceback", ""))
        if not undefined and not (is_wrong_number(error) and (already or share > turns.LIMIT)):
            raise
        busy = already or f"busy: others took {share:.0%} of the machine"
        if item.path.suffix == ".ipynb":
            item.parent.stash[BUSY] = busy
        pytest.skip(f"{busy}; then {item.name}: {error}")


if __name__ == "__main__":
    sys.exit(pytest.main(["-p", "judge", *sys.argv[2:]], plugins=[Report(sys.argv[1])]))
