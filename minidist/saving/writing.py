"""A save on its way to the disk, in a thread that talks to no rank (lesson: scaling_out).

Training goes on meanwhile, with its collectives: one of this thread's could meet another one there.
So a rank leaves a note beside its file when the disk holds it, and rank 0's thread looks for all
notes before it makes the folder a checkpoint.
"""

import pickle
import shutil
import threading
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from minidist.saving import commit
from minidist.saving.box_plan import BoxPlan, Copies
from minidist.saving.naive import sync

LOOK = 0.01  # seconds between two looks for notes
AT_EXIT = 30.0  # seconds that a process's end waits for a save


class Writing:
    """One rank's part of one save. `problem` is what went wrong."""

    def __init__(
        self, folder: Path, plan: BoxPlan, copies: Copies, rank: int, about: dict[str, Any]
    ) -> None:
        self.folder, self._plan, self._copies, self._rank = folder, plan, copies, rank
        self._about = about  # for the manifest: step and world_size
        self.problem: Exception | None = None
        self.is_whole = False  # as far as rank 0 knows
        self._written, self._abandoned = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="saving", daemon=True)

    def start(self, then: Callable[[], object]) -> None:
        """Write. Rank 0 does `then` when the checkpoint is whole."""
        self._then = then
        # Not atexit: a process that multiprocessing started ends without it.
        self._at_exit = Finalize(None, self._finish_at_exit, exitpriority=0)
        self._thread.start()

    def wait_written(self) -> None:
        """Until this rank's file is written, or has failed."""
        self._written.wait()

    def wait_whole(self, timeout: float | None = None) -> None:
        """On rank 0 until all ranks' files are a checkpoint; no longer than `timeout` seconds."""
        self._thread.join(timeout)

    def abandon(self) -> None:
        """There will be no such checkpoint. On rank 0, its folder goes."""
        self._at_exit.cancel()
        self._abandoned.set()
        self._thread.join()
        if self._rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self) -> None:
        try:
            self._write()
            self._written.set()
            if self._rank == 0:
                self._finish()
        except Exception as error:
            self.problem = _named(error, self.folder)
        finally:
            self._written.set()
            if self.problem is None:
                self._at_exit.cancel()

    def _finish_at_exit(self) -> None:
        """For a program that ends without `close`, whose threads would end with it."""
        self.wait_whole(AT_EXIT)
        if self.problem is not None:
            raise self.problem
        if self._thread.is_alive():
            raise RuntimeError(
                f"{self.folder} was not whole {AT_EXIT:g} seconds after the program's end, and is "
                "lost: call close() before, which waits"
            )

    def _write(self) -> None:
        results = self._plan.write(self.folder, self._copies)
        names = {result.storage_data.relative_path for result in results}
        written = results, {name: commit.synced_stamp(self.folder / name) for name in names}
        sync(self.folder)
        note = self._note(self._rank)
        unnamed = note.with_suffix(".part")
        unnamed.write_bytes(pickle.dumps(written))
        unnamed.replace(note)  # the last act: rank 0 may rename the folder now

    def _finish(self) -> None:
        notes = [self._note(rank) for rank in range(self._about["world_size"])]
        while not all(note.exists() for note in notes):
            if self._abandoned.wait(LOOK):
                return
        results, stamps = [], dict[str, commit.Stamp]()
        for note in notes:
            written, of_rank = pickle.loads(note.read_bytes())
            results.append(written)
            stamps |= of_rank
            note.unlink()
        self._plan.finish(self.folder, results)
        known = {path.name for path in self.folder.iterdir()} - stamps.keys()
        stamps |= {name: commit.synced_stamp(self.folder / name) for name in known}
        commit.commit(self.folder, self._about, stamps)
        self._then()
        self.is_whole = True

    def _note(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.note"


def _named(error: BaseException, folder: Path) -> RuntimeError:
    """The same with the file, and the disk's own words where torch has others."""
    first: BaseException | None = error
    while first is not None and not isinstance(first, OSError):
        first = first.__cause__ or first.__context__
    cause = first or error
    words = f"{folder} could not be written: {type(cause).__name__}: {cause}. "
    named = RuntimeError(words + "The checkpoints before it are untouched")
    named.__cause__ = error
    return named
