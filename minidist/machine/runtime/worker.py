"""What runs inside a rank's process: take a call, run it, send back how it ended."""

import ctypes
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
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
from minidist.machine.runtime.modules import Modules
from minidist.machine.runtime.report import Failure
from minidist.machine.runtime.stack import Stack

PR_SET_PDEATHSIG = 1  # of prctl(2)


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
        modules = Modules()

        def enter() -> int:
            nonlocal progress
            progress = stack.enter_context(cloudpickle.loads(stage)(folder))
            return os.getpid()

        try:
            _answer(pipes, 0, enter, progress, modules)
            for number in itertools.count(1):
                call = pipes.calls.recv_bytes()
                if not call:
                    break
                _answer(pipes, number, partial(_perform, call), progress, modules)
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)  # the pool is gone, or a call has closed the pipe


def _settle(pipes: Pipes, environ: dict[str, str]) -> None:
    # A session of its own: a kernel's interrupt (a SIGINT to its whole process group) does not
    # reach it, and one signal ends it with all its children, a DataLoader's workers too.
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":  # should the supervisor be killed, the system ends its ranks
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _open_streams(pipes)
    if sys.stdin is not None:  # /dev/null: what a rank starts takes no line of the program's either
        os.dup2(sys.stdin.fileno(), 0)
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


def _open_streams(pipes: Pipes) -> None:
    """Let stdout and stderr be the rank's pipes, for C++ as well."""
    for fd, name, pipe in ((1, "stdout", pipes.stdout), (2, "stderr", pipes.stderr)):
        os.dup2(pipe.fileno(), fd)
        stream = open(fd, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _watch(control: Connection, main_thread: int) -> None:
    """Answer where the main thread is; end this rank, and its children, with the pool."""
    try:
        while True:
            control.recv_bytes()
            stack = _where(sys._current_frames()[main_thread])
            control.send_bytes(pickling.dumps(stack))
    except (EOFError, OSError):
        os.killpg(0, signal.SIGKILL)


def _perform(call: bytes) -> Any:
    function, args, kwargs = cloudpickle.loads(call)
    return function(*args, **kwargs)


def _answer(
    pipes: Pipes,
    number: int,
    action: Callable[[], Any],
    progress: Callable[[], int],
    modules: Modules,
) -> None:
    """Run one action, and send how it ended: its value, or its failure, and the progress made."""
    before, rank, code = progress(), os.getpid(), 0
    edited: list[str] | None = None
    try:
        value = action()
        edited = modules.edited()
        outcome = _pickle_result(number, value, progress() - before, edited)
    except BaseException as error:  # SystemExit too: the pool says what it means
        edited = modules.edited() if edited is None else edited  # the second answer would be empty
        parts = number, None, _take_apart(error), progress() - before, edited
        outcome = pickling.dumps(parts)
        if os.getpid() != rank:
            traceback.print_exception(error)
            code = 1
    _flush(pipes)
    if os.getpid() != rank:  # the action has forked: only the rank itself answers
        os._exit(code)
    pipes.calls.send_bytes(outcome)


def _flush(pipes: Pipes) -> None:
    """Send what Python and C++ have printed; a call may have closed where it goes."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        os.fstat(1)
        os.fstat(2)
    except (AttributeError, OSError, ValueError):
        _open_streams(pipes)
    ctypes.CDLL(None).fflush(None)


def _pickle_result(number: int, value: Any, *rest: Any) -> bytes:
    try:
        return pickling.dumps((number, value, None, *rest))
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


def _where(frame: types.FrameType) -> Stack:
    """Where the call is; or where it failed, while its failure is taken apart."""
    outer: types.FrameType | None = frame
    while outer is not None:
        if outer.f_code is _take_apart.__code__:
            return _from_call(Stack.of(outer.f_locals["error"].__traceback__))
        outer = outer.f_back
    return _from_call(Stack.of(frame))


def _from_call(stack: Stack) -> Stack:
    """The stack from where this file runs the call; empty if there is none."""
    ours = [i for i, frame in enumerate(stack.frames) if frame.filename == __file__]
    in_call = any(stack.frames[i].function == _answer.__name__ for i in ours)
    return Stack(stack.frames[ours[-1] + 1 :] if in_call else ())
