"""Answers to the puzzles and the exercise of the lesson surviving_failures."""

import io
import os
import shutil
import tempfile
import threading
from os import fsync, replace
from pathlib import Path

import torch

from minidist.course.checks import surviving_failures as check
from minidist.saving import naive


def beside(state, path):
    with open(f"{path}.new", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.new", path)


def by_names_of_os(state, path):
    """By a file of any name, and of functions that were imported by name."""
    with tempfile.NamedTemporaryFile(dir=Path(path).parent, delete=False) as file:
        torch.save(state, file)
        file.flush()
        fsync(file.fileno())
    replace(file.name, path)


def by_path(state, path):
    """torch opens the file; it is synced by another descriptor."""
    torch.save(state, f"{path}.new")
    with open(f"{path}.new", "rb+") as file:
        os.fsync(file)
    os.rename(f"{path}.new", path)


def by_descriptor(state, path):
    """Without a Python file: written by the system's own call."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    file, name = tempfile.mkstemp(dir=os.path.dirname(path))
    os.write(file, buffer.getvalue())
    os.fsync(file)
    os.close(file)
    os.replace(name, path)


def in_a_thread(state, path):
    thread = threading.Thread(target=beside, args=(state, path))
    thread.start()
    thread.join()


def by_torch_alone(state, path):
    torch.save(state, path)


def into_the_old_file(state, path):
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def old_one_copied_first(state, path):
    if os.path.exists(path):
        shutil.copyfile(path, f"{path}.bak")
    torch.save(state, path)


def two_files(state, path):
    torch.save(state, f"{path}.bak")
    torch.save(state, path)


def old_one_removed(state, path):
    torch.save(state, f"{path}.new")
    with open(f"{path}.new", "rb+") as file:
        os.fsync(file)
    if os.path.exists(path):
        os.remove(path)
    os.rename(f"{path}.new", path)


def copied(state, path):
    beside(state, f"{path}.whole")
    shutil.copy(f"{path}.whole", path)


def not_synced(state, path):
    torch.save(state, f"{path}.new")
    os.replace(f"{path}.new", path)


def flushed_by_torch(state, path):
    with open(f"{path}.new", "wb") as file:
        torch.save(state, file)
        os.fsync(file.fileno())
    os.replace(f"{path}.new", path)


def not_flushed(state, path):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with open(f"{path}.new", "wb") as file:
        file.write(buffer.getvalue()[:-100])
        file.write(buffer.getvalue()[-100:])
        os.fsync(file.fileno())
    os.replace(f"{path}.new", path)


def synced_too_late(state, path):
    torch.save(state, f"{path}.new")
    os.replace(f"{path}.new", path)
    with open(path, "rb+") as file:
        os.fsync(file)


def another_name(state, path):
    beside(state, f"{path}.{state['step']}")


def only_once(state, path):
    if not os.path.exists(path):
        beside(state, path)


def not_over_an_old_one(state, path):
    """A killed save leaves `.new`, and every later one fails."""
    with open(f"{path}.new", "xb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.new", path)


ANSWERS = {
    check.lost_share: ([8, 2 * 16**0.5], [32, 17, 2, 4, 0.5, 0.08, 16, "8 %"]),
    check.suspect: ([3, 3.0], [0, 1, 2, 4, "rank 3"]),
    check.save: (
        [
            beside,
            by_names_of_os,
            by_path,
            flushed_by_torch,
            naive.save,
            in_a_thread,
            by_descriptor,
        ],
        [
            by_torch_alone,
            into_the_old_file,
            old_one_copied_first,
            two_files,
            old_one_removed,
            copied,
            not_synced,
            not_flushed,
            synced_too_late,
            another_name,
            only_once,
            not_over_an_old_one,
        ],
    ),
}
