"""The idea (lesson: surviving_failures): a file is whole, or it has another name.

`open(path, "wb")` empties the old checkpoint before the new one is there: a kill in between leaves
neither. So we write beside it. `fsync` has the disk hold the bytes, a rename takes the old one's
place at once, and `fsync` of the folder has the disk hold the name.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch


def save(state: Any, path: str | Path) -> None:
    """As torch.save. At any moment, `path` is the old checkpoint or the new one, whole.
    Lesson: surviving_failures."""
    write_whole(Path(path), lambda file: torch.save(state, file))


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Let `write` fill a file, which then gets its name. Lesson: surviving_failures."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(folder: Path) -> None:
    """Until the disk holds the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
