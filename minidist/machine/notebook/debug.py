"""`%%ranks --debug 1`: a rank's pdb in the notebook. This file is for the ranks."""

import bdb
import json
import os
import pdb
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.util import get_temp_dir
from types import FrameType
from typing import Any

import torch.distributed as dist

from minidist.machine.runtime.cell import let, run_cell
from minidist.machine.runtime.output import QUESTION, tell

LONG = timedelta(days=1)  # that ranks wait for one whose reader thinks


def debug_cell(source: str, name: str, ranks: Sequence[int]) -> None:
    """Run a cell in which some ranks stop at `breakpoint()` and at an error. The others do not, and
    wait for these as long as it takes."""
    debugged = int(os.environ["RANK"]) in ranks
    with _patience():
        try:
            run_cell(source, name, _ask, _stop if debugged else _go_on)
        except Exception as error:
            if debugged and not isinstance(error, bdb.BdbQuit):
                print(f"{type(error).__name__}: {error}")
                debugger = _Debugger()
                debugger.reset()
                debugger.interaction(None, error.__traceback__)
            raise
        finally:
            sys.settrace(None)  # the reader may have stepped out of the cell
            let()


class _Debugger(pdb.Pdb):
    """pdb for a cell: nothing of the runtime that runs it."""

    def __init__(self) -> None:
        super().__init__(skip=["minidist.machine.runtime.*", "minidist.machine.notebook.*"])

    def canonic(self, filename: str) -> str:
        """A cell's name as it is: pdb would make it a path."""
        return filename if filename.startswith("Cell ") else super().canonic(filename)

    def get_stack(self, *source: Any) -> tuple[list[tuple[FrameType, int]], int]:
        """The stack from the cell on, and the place in it of the frame to show."""
        stack, place = super().get_stack(*source)
        cells = [frame.f_code.co_filename.startswith("Cell ") for frame, _ in stack]
        first = cells.index(True) if True in cells else 0
        return stack[first:], place - first


def _stop(*_: Any, **__: Any) -> None:
    caller: FrameType | None = sys._getframe(1)
    _Debugger().set_trace(caller)


def _go_on(*_: Any, **__: Any) -> None:
    pass


def _ask(prompt: object = "") -> str:
    """A line from the reader. It comes by a named pipe."""
    path = os.path.join(get_temp_dir(), f"answer-{uuid.uuid4().hex}")  # goes with the pool's folder
    os.mkfifo(path)
    # For writing too: so it is opened at once, before the notebook has opened its end.
    with open(os.open(path, os.O_RDWR), encoding="utf-8") as answer:
        tell(QUESTION, json.dumps([path, str(prompt)]))
        said = answer.readline().rstrip("\n")
    os.unlink(path)
    return said


@contextmanager
def _patience() -> Iterator[None]:
    usual = dist.distributed_c10d.default_pg_timeout
    _set_timeouts(LONG)
    try:
        yield
    finally:
        _set_timeouts(usual)


def _set_timeouts(timeout: timedelta) -> None:
    """Of all groups, and of those to be made."""
    c10d: Any = dist.distributed_c10d
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timeout
    for group in c10d._world.pg_map:
        group.set_timeout(timeout)
