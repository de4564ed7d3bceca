"""What is marked `alone` asserts measured times. A plugin of pytest, which tests/gate.py loads.

A time is judged only if its moment was quiet: what fails while other processes took more than a
twentieth of the machine is skipped as busy, and so is what fails after it in the same notebook. On
a quiet machine it fails. What hangs, and any error but a wrong number, fails on both.
"""

import os
from collections.abc import Generator

import pytest

BUSY = pytest.StashKey[str]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of a notebook is `alone` if a cell has that tag: cells need those before them."""
    cells = [item for item in items if item.path.suffix == ".ipynb"]
    notebooks = {item.path for item in cells if "alone" in item.cell.metadata.get("tags", [])}
    for item in cells:
        if item.path in notebooks:
            item.add_marker("alone")


def is_judgement(error: BaseException) -> bool:
    """Whether a number was found wrong, by an assertion here or on a rank, or by nbval."""
    said, kind = str(error), type(error).__name__
    if kind == "NbCellError":
        return "Timeout" not in said and "Kernel dead" not in said
    return kind == "AssertionError" or (kind == "RankError" and "AssertionError" in said)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    if item.get_closest_marker("alone") is None:
        return (yield)
    from minidist.bench import quiet, turns

    moment, around = quiet.Moment(os.getpid()), item.parent.stash
    try:
        return (yield)
    except Exception as error:
        share = moment.share()
        if not is_judgement(error) or (share <= turns.LIMIT and BUSY not in around):
            raise
        busy = f"busy: others took {share:.0%} of the machine"
        if item.path.suffix == ".ipynb":
            busy = around.setdefault(BUSY, busy)
        pytest.skip(f"{busy}; then {item.name}: {error}")
