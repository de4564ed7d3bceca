"""Locks that a build of C++ leaves behind when it is killed. Lesson: real_tools."""

import time
from pathlib import Path


def remove_stale(folder: Path) -> None:
    """Remove each file `lock` within `folder`/* that no process holds: torch would wait for it for
    ever."""
    for lock in stale(folder):
        lock.unlink(missing_ok=True)


def stale(folder: Path) -> list[Path]:
    """The locks that no process holds. Who builds has the file open, and removes it right after
    closing it; so we look twice."""
    found = [lock for lock in folder.glob("*/lock") if not is_open(lock)]
    if found:
        time.sleep(0.2)
    return [lock for lock in found if lock.exists() and not is_open(lock)]


def is_open(file: Path) -> bool:
    """Whether a process has it open. Those of other users are not seen."""
    import psutil  # comes with DeepSpeed

    for process in psutil.process_iter():
        try:
            if any(Path(found.path) == file.resolve() for found in process.open_files()):
                return True
        except (psutil.Error, OSError):
            continue  # it has ended, or is another user's
    return False
