"""Programs of their own for tests that end one: by a signal, by an interrupt, by os._exit.

Each carries a mark in its environment, which every process that descends from it inherits. So a
test finds exactly its own processes, whatever else runs on the machine, and knows that none is
left even after their parents are gone.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import minidist as md

HERE = Path(md.__file__).parents[1]  # the minidist under test, installed or not

SOAK = "MINIDIST_SEED" in os.environ  # `make soak` takes another one each time, and prints it
SEED = os.environ.get("MINIDIST_SEED", "0")  # of the moments and cases that are drawn at random

# A program that a shell starts in the background ignores SIGINT, and so do its children.
LISTEN_TO_SIGINT = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"

# Without what else a forkserver imports, for optimizers and for fully_shard: a second and a half.
LIGHT = {"MINIDIST_PRELOAD": "torch torch.distributed"}


def few(cases: Iterable[str], kept: set[str]) -> list[Any]:
    """The cases of a test of programs, of which `make test` runs the kept ones, and `make soak` the
    others: a program imports torch, and again in its forkserver."""
    unknown = kept - set(cases := list(cases))
    assert not unknown, unknown
    soak = pytest.mark.soak
    return [each if each in kept else pytest.param(each, marks=soak) for each in cases]


class Family:
    """All processes that carry one mark, and the folder that holds their temporary files."""

    def __init__(self) -> None:
        self.mark = f"MINIDIST_TEST={uuid.uuid4()}"
        # Not in pytest's tmp_path: sockets are made here, whose whole path has 107 characters.
        self.tmp = Path(tempfile.mkdtemp(prefix="test-"))
        weakref.finalize(self, shutil.rmtree, self.tmp, ignore_errors=True)

    def environ(self) -> dict[str, str]:
        name, value = self.mark.split("=")
        path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
        inherited = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
        return {**inherited, name: value, "TMPDIR": str(self.tmp), "PYTHONPATH": path}

    def alive(self) -> list[int]:
        """The processes that are still there. (One that has ended has no environment.)"""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                pass  # it is gone, or another user's
        return found

    def gone_within(self, seconds: float) -> bool:
        return eventually(lambda: not self.alive(), seconds)

    def temporary(self) -> list[str]:
        """The temporary files and folders that ranks and multiprocessing make."""
        kept = ("torchinductor_",)  # torch's own cache, for the next program as well
        return [path.name for path in self.tmp.iterdir() if not path.name.startswith(kept)]

    def end(self) -> None:
        for pid in self.alive():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


class Program(Family):
    """A Python program in a session of its own. Its warnings are errors. If `light`, its ranks
    start sooner: they would have to import what makes an optimizer."""

    def __init__(
        self, source: str, tmp_path: Path, *, file: Path | None = None, light: bool = False
    ) -> None:
        super().__init__()
        self.file = file or tmp_path / "program.py"
        self.file.write_text(LISTEN_TO_SIGINT + source)
        self.err = self.file.with_suffix(".stderr")  # a file takes all of it, read or not
        with self.err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error", str(self.file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
                env=self.environ() | (LIGHT if light else {}),
                cwd=tmp_path,
                start_new_session=True,
            )

    def line(self) -> str:
        """The next line that it prints. An error with its stderr if it ends instead."""
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return line.rstrip("\n")
        raise EOFError(f"the program printed no line. Its stderr:\n{self.err.read_text()}")

    def say(self, line: str) -> None:
        """A line for its stdin."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def finish(self, timeout: float) -> tuple[int, str, str]:
        """Wait for its end: its exit code, what it printed since, and all of its stderr."""
        out, _ = self.process.communicate(timeout=timeout)
        return self.process.returncode, out, self.err.read_text()

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self.process.kill()
        self.process.communicate()


def eventually(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
