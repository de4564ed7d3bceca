"""What makes a folder a checkpoint (lesson: surviving_failures).

    step-00000100.5f0c.partial      being written: no run ever loads it
    step-00000100                   whole, with a manifest of the size and the hash of every file

Every file is synced before the manifest is written, and that before the folder gets its name. A
rename is done or not done, so a folder with the name of a step is whole, whatever was killed when.
If one of its files is not what the manifest says, then something else has changed it: an error.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from minidist.saving.naive import sync, write_whole

FORMAT = 2
MANIFEST = "manifest.json"
PARTIAL = ".partial"
Stamp = tuple[int, str]  # of a file: its bytes, and their hash


def steps_in(folder: Path) -> dict[int, Path]:
    """The whole checkpoints in a folder, the oldest first."""
    names = [re.fullmatch(r"step-(\d{8,})", path.name) for path in folder.iterdir()]
    return dict(sorted((int(name[1]), folder / name[0]) for name in names if name))


def commit(partial: Path, about: Mapping[str, Any], stamps: Mapping[str, Stamp]) -> None:
    """Make a checkpoint of it: its files are written and synced. Raises FileNotFoundError for one
    that is not here, as where ranks do not share the folder."""
    for name in stamps:
        (partial / name).stat()
    content = {"format": FORMAT, **about, "files": dict(sorted(stamps.items()))}
    page = {"manifest": content, "hash": _digest(content)}
    write_whole(partial / MANIFEST, lambda file: file.write(json.dumps(page, indent=1).encode()))
    whole = partial.with_name(partial.name.split(".")[0])
    partial.rename(whole)
    sync(whole.parent)


def clear(folder: Path, keep: int) -> None:
    """Delete what is older than the `keep` newest checkpoints."""
    for path in list(steps_in(folder).values())[:-keep]:
        # Not where it is: a kill would leave a part of it under the name of a whole one.
        shutil.rmtree(path.rename(path.with_name(path.name + PARTIAL)), ignore_errors=True)


def clear_partial(folder: Path) -> None:
    """Delete what killed runs have not finished."""
    for path in folder.glob(f"step-*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


def lock(folder: Path) -> IO[str]:
    """One run at a time has a folder: until the file is closed, or the process ends."""
    file = (folder / ".lock").open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RuntimeError(f"{folder} belongs to another run, that is not over") from None
    return file


# ---- to load ------------------------------------------------------------------------------------


def manifest_of(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises ValueError if it is broken, or of another format."""
    path = folder / MANIFEST
    try:
        page = json.loads(path.read_bytes())
        content: dict[str, Any] = page["manifest"]
        if page["hash"] != _digest(content):
            raise ValueError("its hash is another one")
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise ValueError(f"{path} is missing, cut short or changed: {error}") from None
    if (found := content["format"]) != FORMAT:
        raise ValueError(f"{path} is of format {found}, and this minidist reads {FORMAT}")
    return content


def require_stamp(path: Path, stamp: Stamp) -> None:
    """Raises ValueError that names the file if it is not what was written."""
    if not path.exists():
        raise ValueError(f"{path} is missing")
    size, digest = stamp
    if (found := path.stat().st_size) != size:
        raise ValueError(f"{path} is cut short or changed: it has {found} bytes of {size}")
    if hash_of(path) != digest:
        raise ValueError(f"{path} has changed since it was written: its hash is another one")


def hash_of(path: Path) -> str:
    """Of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def synced_stamp(path: Path) -> Stamp:
    """What the manifest says of a file, when the disk holds it. (torch 2.13 can sync its files too,
    but does so before the last bytes have left Python's buffer.)"""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path.stat().st_size, hash_of(path)


def _digest(content: Any) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode()).hexdigest()
