"""What runs inside a rank's process: take a call, run it, send back how it ended."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from minidist.machine.runtime import pickling
from minidist.machine.runtime.cell import let
from minidist.machine.runtime.report import Failure
from minidist.machine.runtime.stack import Stack


@dataclass
class Pipes:
    """A rank's ends of its pipes."""

    calls: Connection  # a call comes in, its outcome goes out
    control: Connection  # "where are you?" comes in, a Stack goes out
    stdout: Connection
    stderr: Connection

    def close(self) -> None:
        for end in (self.calls, self.control, self.stdout, self.stderr):
            end.close()


def main(pipes: Pipes, environ: dict[str, str], folder: str, stage: bytes) -> None:
    """Enter the stage, run calls until an empty message arrives, then leave it.

    `stage` is a pickled function that takes the scratch folder and returns a context manager.
    """
    _settle(pipes, environ)
    watched = pipes.control, threading.get_ident()
    threading.Thread(target=_watch, args=watched, daemon=True).start()
    with ExitStack() as stack:
        progress: Callable[[], int] = int  # int() == 0: nothing yet

        def enter() -> int:
            nonlocal progress
            progress = stack.enter_context(cloudpickle.loads(stage)(folder))
            return os.getpid()

        try:
            _answer(pipes.calls, enter, progress)
            while call := pipes.calls.recv_bytes():
                _answer(pipes.calls, partial(_perform, call), progress)
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)  # the pool is gone, or a call has closed the pipe


def _settle(pipes: Pipes, environ: dict[str, str]) -> None:
    # A session of its own: one signal ends it with all its children, a DataLoader's workers too.
    os.setsid()
    for fd, name, pipe in ((1, "stdout", pipes.stdout), (2, "stderr", pipes.stderr)):
        os.dup2(pipe.fileno(), fd)  # for C++ as well
        stream = open(fd, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    # The forkserver's own environment dates from when it started.
    os.environ.clear()
    os.environ.update(environ)
    if "inline" in environ.get("MPLBACKEND", ""):  # it draws into a kernel, and this is none
        os.environ["MPLBACKEND"] = "module://minidist.machine.runtime.figures"
    sys.modules["__main__"] = types.ModuleType("__main__")
    let()  # nobody answers what a rank asks
    # Children that a rank starts, such as a DataLoader's workers, start as in any program.
    multiprocessing.set_start_method(None, force=True)
    reduction.dump = pickling.dump_to_child


def _watch(control: Connection, main_thread: int) -> None:
    """Answer where the main thread is; end this rank, and its children, with the pool."""
    try:
        while True:
            control.recv_bytes()
            stack = _from_call(Stack.of(sys._current_frames()[main_thread]))
            control.send_bytes(pickling.dumps(stack))
    except (EOFError, OSError):
        os.killpg(0, signal.SIGKILL)


def _from_call(stack: Stack) -> Stack:
    """The stack from where this file runs the call; empty if there is none."""
    ours = [i for i, frame in enumerate(stack.frames) if frame.filename == __file__]
    in_call = any(stack.frames[i].function == _answer.__name__ for i in ours)
    return Stack(stack.frames[ours[-1] + 1 :] if in_call else ())


def _perform(call: bytes) -> Any:
    function, args, kwargs = cloudpickle.loads(call)
    return function(*args, **kwargs)


def _answer(calls: Connection, action: Callable[[], Any], progress: Callable[[], int]) -> None:
    """Run one action, and send how it ended: its value, or its failure, and the progress made."""
    before = progress()
    try:
        outcome = _pickle_result(action(), progress() - before)
    except BaseException as error:  # SystemExit too: the pool says what it means
        outcome = pickling.dumps((None, _take_apart(error), progress() - before))
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)  # what C++ has printed
    if os.getsid(0) != os.getpid():
        os._exit(0)  # a child that the call has forked: the answer is its parent's
    calls.send_bytes(outcome)


def _pickle_result(value: Any, progress: int) -> bytes:
    try:
        return pickling.dumps((value, None, progress))
    except Exception as error:
        kind = type(value).__name__
        raise TypeError(f"the result, a {kind}, cannot be sent back: {error}") from error


def _take_apart(error: BaseException) -> Failure:
    when = time.monotonic()
    try:
        pickled = pickling.dumps(error)
        cloudpickle.loads(pickled)  # an exception with its own __init__ may not come back
    except (Exception, SystemExit):
        pickled = None
    return Failure.of(error, when, pickled)
