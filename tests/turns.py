"""Turns between pytest's workers (`-n 3`): tests run side by side, but beside one that is marked
`alone`, because it measures time, nothing runs."""

import contextlib
import fcntl
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

DOOR, ROOM = Path(__file__), Path(__file__).parent / "conftest.py"  # two files, only to be locked
STAY = pytest.StashKey[contextlib.ExitStack]()


@contextlib.contextmanager
def locked(file: Path, how: int) -> Iterator[None]:
    with file.open() as opened:
        fcntl.flock(opened, how)
        try:
            yield
        finally:
            fcntl.flock(opened, fcntl.LOCK_UN)  # a process forked meanwhile keeps the file open


def enter(alone: bool) -> contextlib.ExitStack:
    """Come into the room, with others or alone. Who waits for the room keeps the door shut."""
    stay = contextlib.ExitStack()
    with locked(DOOR, fcntl.LOCK_EX):
        stay.enter_context(locked(ROOM, fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
    return stay


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """A test runs in the room; one that is alone leaves it to the next of its file, if that is
    alone, too: so a notebook runs in one go.

    This is the first of all wrappers: no time limit and no duration counts the wait.
    """
    stash, alone = item.config.stash, item.get_closest_marker("alone") is not None
    if STAY not in stash:
        stash[STAY] = enter(alone)
    try:
        return (yield)
    finally:
        same = nextitem is not None and nextitem.path == item.path
        if not (alone and same and nextitem.get_closest_marker("alone")):
            stash[STAY].close()
            del stash[STAY]
