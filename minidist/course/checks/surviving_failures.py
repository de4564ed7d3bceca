"""The puzzles and the exercise of the lesson surviving_failures."""

import os
import resource
import signal
import sys
import tempfile
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from minidist.course.checks.verdict import check, function, puzzle, require_right

Save = Callable[[Any, str], Any]


lost_share = puzzle(__name__, "lost_share")
suspect = puzzle(__name__, "suspect")


# ---- a save that survives -----------------------------------------------------------------------

_die: Callable[[], None] = partial(signal.raise_signal, signal.SIGKILL)
SYNCS = (os.fsync, getattr(os, "fdatasync", os.fsync), os.sync)
# Of Python's audit: what changes files.
CHANGES = {"os.rename", "open", "os.remove", "os.truncate", "shutil.copyfile"}


@check
def save(answer: object) -> None:
    """`save(state, path)`: a kill at any moment leaves the old checkpoint or the new one."""
    require_right(_trial, function(answer), world_size=1, of_rank="")


def _trial(given: Save) -> str:
    """What is wrong with it, if anything."""
    with tempfile.TemporaryDirectory() as folder:
        watch = _Watch(os.path.realpath(folder))
        path = os.path.join(watch.folder, "checkpoint.pt")
        for step, which in (1, "first"), (2, "second"):
            watch.done.clear()
            _Pickled.times = 0
            with watch.syncs():
                given(_state(step), path)
            if _step_in(path) != step:
                return f"after the {which} save, {_found(path)}"
        if said := watch.unsynced(path):
            return said
        half, pickled = os.path.getsize(path) // 2, _Pickled.times
        kills = [(f"after {n:,} bytes", partial(_die_after, n)) for n in (0, 1, half, 2 * half - 1)]
        for n, change in enumerate(each for each in watch.done if isinstance(each, str)):
            kills.append((f"before {change}", partial(watch.at, n, _die)))
            if change in ("open", "shutil.copyfile"):
                halved = partial(_die_after, half)
                kills.append((f"within {change}", partial(watch.at, n, halved)))
        kills += [("while the state is written", partial(_die_pickled, n)) for n in range(pickled)]
        for when, arm in kills:
            if not _survives(given, path, arm):
                return f"killed {when}, {_found(path)}"
    return ""


class _Watch:
    """What is done to the files of a folder. It stays until the process ends."""

    def __init__(self, folder: str) -> None:
        self.folder = folder + os.sep
        self.done = list[Any]()  # names of changes; {inode: bytes} at a sync
        self._at, self._do = -1, _die
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        reads = event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR)
        if event not in CHANGES or reads:
            return
        paths = [each for each in args[:2] if isinstance(each, str | bytes | os.PathLike)]
        inside = [os.path.realpath(os.fsdecode(path)).startswith(self.folder) for path in paths]
        if any(inside):
            if len(self.done) == self._at:
                self._do()
            self.done.append(event)

    def at(self, change: int, do: Callable[[], None]) -> None:
        """Do something when this process comes to the change of this number."""
        self.done.clear()
        self._at, self._do = change, do

    @contextmanager
    def syncs(self) -> Iterator[None]:
        """Note the sizes of all files at each sync, however it is called."""

        def note(frame: Any, event: str, called: Any) -> None:
            if event == "c_call" and called in SYNCS:
                files = map(os.stat, Path(self.folder).rglob("*"))
                self.done.append({each.st_ino: each.st_size for each in files})

        sys.setprofile(note)
        threading.setprofile(note)  # of threads that the answer starts
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def unsynced(self, path: str) -> str:
        """What is wrong with a save that got its name by a rename."""
        namings = [n for n, each in enumerate(self.done) if each == "os.rename"]
        found = os.stat(path)
        before = self.done[: max(namings, default=0)]
        sizes = [each.get(found.st_ino) for each in before if isinstance(each, dict)]
        if not namings or found.st_size in sizes:
            return ""
        if any(size is not None for size in sizes):
            return "it is synced while the last bytes are in Python's buffer: flush that first"
        return "a power cut may leave the new name without its bytes: sync before you rename"


def _survives(given: Save, path: str, arm: Callable[[], None]) -> bool:
    """Whether the path has a whole checkpoint after a kill in a save."""
    given(_state(2), path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads that a fork leaves behind
        child = os.fork()
    if child == 0:
        try:
            signal.alarm(5)  # what hangs ends, too
            arm()
            given(_state(3), path)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return _step_in(path) in (2, 3)


def _die_after(nbytes: int) -> None:
    """Let the system kill this process when it makes a file longer."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))
    write = os.write

    def write_or_die(file: int, data: Any) -> int:
        """Up to the limit the system writes a part, and kills only at the next call."""
        written = write(file, data)
        if written < memoryview(data).nbytes:
            _die()
        return written

    os.write = write_or_die


class _Pickled:
    """Counts how often it is pickled, and kills this process the time after `dies_after`."""

    times, dies_after = 0, -1

    def __reduce__(self) -> tuple[Any, ...]:
        if _Pickled.times == _Pickled.dies_after:
            _die()
        _Pickled.times += 1
        return OrderedDict, ()  # torch.load takes this


def _die_pickled(times: int) -> None:
    _Pickled.times, _Pickled.dies_after = 0, times


def _state(step: int) -> dict[str, Any]:
    return {"step": step, "weights": torch.full((20_000,), float(step)), "last": _Pickled()}


def _step_in(path: str) -> int | None:
    """Of a whole checkpoint."""
    try:
        state = torch.load(path)
        return state["step"] if (state["weights"] == state["step"]).all() else None
    except Exception:
        return None


def _found(path: str) -> str:
    if not os.path.exists(path):
        return "there is no file at the path"
    step = _step_in(path)
    return f"the path has {f'the checkpoint of save {step}' if step else 'no whole checkpoint'}"
