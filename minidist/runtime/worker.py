"""What runs inside a rank's process: take a call, run it, send back how it ended."""

import ctypes
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.util import get_temp_dir
from typing import Any

import cloudpickle

from minidist.runtime.report import Failure
from minidist.runtime.stack import Stack


@dataclass
class Pipes:
    """A rank's ends of its pipes."""

    calls: Connection  # a call comes in, its outcome goes out
    control: Connection  # "where are you?" comes in, a Stack goes out
    stdout: Connection
    stderr: Connection


def main(pipes: Pipes, environ: dict[str, str], folder: str, stage: bytes) -> None:
    """Set the stage, serve calls until an empty one says that it is over, and clear the stage.

    `stage` is a pickled function that takes the scratch folder and returns a context manager.
    """
    _settle(pipes, environ)
    watched = (pipes.control, folder, threading.get_ident())
    watch = threading.Thread(target=_watch, args=watched, daemon=True)
    watch.start()
    with ExitStack() as stack:
        progress: Callable[[], int] = int  # int() == 0: nothing yet

        def enter() -> None:
            nonlocal progress
            progress = stack.enter_context(cloudpickle.loads(stage)(folder))

        try:
            _answer(pipes.calls, enter, progress)
            while call := pipes.calls.recv_bytes():
                _answer(pipes.calls, partial(_perform, call), progress)
        except (EOFError, OSError):
            watch.join()  # the pool is gone, without a farewell: the watch ends this process


def _settle(pipes: Pipes, environ: dict[str, str]) -> None:
    # A session of its own: a kernel's interrupt (a SIGINT to its whole process group) does not
    # reach it, and one signal ends it with all its children, a DataLoader's workers too.
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # At the level of file descriptors, so that output of C++ is caught as well.
    os.dup2(pipes.stdout.fileno(), 1)
    os.dup2(pipes.stderr.fileno(), 2)
    pipes.stdout.close()
    pipes.stderr.close()
    for fd, name in ((1, "stdout"), (2, "stderr")):
        stream = open(fd, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    # The forkserver's own environment dates from when it started.
    os.environ.clear()
    os.environ.update(environ)
    sys.modules["__main__"] = types.ModuleType("__main__")


def _watch(control: Connection, folder: str, main_thread: int) -> None:
    """Answer where the main thread is; end this rank, and its children, with its parent."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    try:
        while parent.sentinel not in wait([control, parent.sentinel]):
            control.recv_bytes()
            stack = Stack.of(sys._current_frames()[main_thread])
            control.send_bytes(cloudpickle.dumps(_from_call(stack)))
    except (EOFError, OSError):
        pass  # the pool is gone
    if wait([parent.sentinel], timeout=0):
        # The program is gone, without a farewell. Wait a moment before the folder goes too: a
        # rank that has just started and finds no rendezvous there would keep the GIL, and live.
        time.sleep(0.3)
        for path in (folder, get_temp_dir()):  # the parent's: its forkserver's socket
            for _ in range(100):  # while others still make files in it
                if os.path.exists(path):
                    shutil.rmtree(path, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _perform(call: bytes) -> Any:
    function, args, kwargs = cloudpickle.loads(call)
    return function(*args, **kwargs)


def _answer(calls: Connection, action: Callable[[], Any], progress: Callable[[], int]) -> None:
    """Run one action, and send how it ended: its value, or its failure, and the progress made."""
    before = progress()
    try:
        value = action()
        outcome = _pickle_result(value, progress() - before)
    except BaseException as error:  # SystemExit too: the pool says what it means
        outcome = cloudpickle.dumps((None, _take_apart(error), progress() - before))
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)  # what C++ has printed
    calls.send_bytes(outcome)


def _pickle_result(value: Any, progress: int) -> bytes:
    try:
        return cloudpickle.dumps((value, None, progress))
    except Exception as error:
        kind = type(value).__name__
        raise TypeError(f"the result, a {kind}, cannot be sent back: {error}") from error


def _take_apart(error: BaseException) -> Failure:
    when = time.monotonic()
    try:
        pickled = cloudpickle.dumps(error)
        cloudpickle.loads(pickled)  # an exception with its own __init__ may not come back
    except Exception:
        pickled = None
    return Failure.of(error, when, pickled)


def _from_call(stack: Stack) -> Stack:
    """The stack without the frames of this file, which started the call."""
    ours = [i for i, frame in enumerate(stack.frames) if frame.filename == __file__]
    return Stack(stack.frames[ours[-1] + 1 :] if ours else stack.frames)
