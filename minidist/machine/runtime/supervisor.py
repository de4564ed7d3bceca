"""The parent of a pool's ranks: one small process that forks them, and ends them without fail.

A rank may be stopped, or in C code that holds the GIL, and the program may be killed: neither can
be trusted to end the ranks. So they are children of a third process, which runs nothing of the
reader's. It imports minidist once for all its ranks; since it lives as long as its pool, a new pool
runs the files as they are now. It says which rank has ended, and kills what is left when the pool
lets it go, or is gone.
"""

import contextlib
import errno
import gc
import importlib
import multiprocessing
import os
import shutil
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from minidist.machine.backend.segment import has_ended
from minidist.machine.runtime import forkserver, worker
from minidist.machine.runtime.system import as_socket

PIPES = 4  # of each rank


# ---- the pool's side of the line ---------------------------------------------------------------


def request_rank(line: Connection, pipes: Sequence[Connection]) -> None:
    """Let the supervisor start the next rank, with these pipes, which are closed here."""
    try:
        with as_socket(line) as messages:  # a Connection does not carry files
            socket.send_fds(messages, [b"+"], [pipe.fileno() for pipe in pipes])
    except (BrokenPipeError, ConnectionResetError):
        pass  # it is gone, and has said why
    finally:
        for pipe in pipes:
            pipe.close()


def hang_up(line: Connection) -> None:
    """Let the supervisor end what is left, though a forked child may hold the line open."""
    with as_socket(line) as messages, contextlib.suppress(OSError):  # it may have ended
        messages.shutdown(socket.SHUT_WR)


# ---- the supervisor ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What ranks are started with."""

    environs: Sequence[dict[str, str]]  # one a rank
    folder: str  # made for the ranks' files and sockets, and removed at the end
    stage: bytes  # see `worker.main`
    imports: Sequence[str]  # modules that each rank would import
    program: int  # the process that has the pool


def main(line: Connection, plan: Plan) -> None:
    """Start the ranks with the pipes that come by `line`, and supervise them until its end.

    By `line` the pool learns (rank, exit code) of each rank that ends, or the exception for which
    no rank can be started.
    """
    os.setsid()  # out of reach of signals to the program's process group
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGINT})  # not what the program blocks
    bell = _Bell()
    running: dict[int, BaseProcess] = {}
    try:
        os.mkdir(plan.folder, 0o700)
        forkserver.put_sockets_in(plan.folder)
        for name in plan.imports:
            importlib.import_module(name)
        # What is imported is here for good. A rank's collection that walked it would copy its
        # pages, which ranks share, and take a third of a second.
        gc.freeze()
        for rank, environ in enumerate(plan.environs):
            running[rank] = _fork(line, bell, environ, plan.stage, plan.folder)
        _watch(line, bell, plan.program, running)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    except Exception as error:
        with contextlib.suppress(Exception):
            line.send(error)
    for process in running.values():
        _kill(process)
    for process in running.values():
        process.join()
    shutil.rmtree(plan.folder, ignore_errors=True)
    os._exit(0)  # what is registered to run at exit is the forkserver's


def _fork(
    line: Connection, bell: "_Bell", environ: dict[str, str], stage: bytes, folder: str
) -> BaseProcess:
    pipes = worker.Pipes(*map(Connection, _next_message(line)))
    args = (line, bell, pipes, environ, folder, stage)
    process = multiprocessing.get_context("fork").Process(target=_be_rank, args=args)
    try:
        process.start()
    except OSError as error:
        what = f"fork: {os.strerror(error.errno or 0)} (rank {environ.get('RANK')})"
        raise OSError(error.errno, what) from None
    pipes.close()
    return process


def _next_message(line: Connection) -> list[int]:
    """The files that come with it. Raises EOFError once the pool has hung up."""
    with as_socket(line) as messages:
        message, files, *_ = socket.recv_fds(messages, 1, PIPES)
    if not message:
        raise EOFError
    if len(files) < PIPES:  # the system left some out
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return files


def _be_rank(line: Connection, bell: "_Bell", *args: Any) -> None:
    line.close()
    bell.close()
    worker.main(*args)


def _watch(line: Connection, bell: "_Bell", program: int, running: dict[int, BaseProcess]) -> None:
    """Say which rank has ended, until the pool hangs up or its program ends."""
    exit_of_program = _exit_of(program)
    if has_ended(program):
        raise EOFError
    while True:
        for rank, process in list(running.items()):
            if _has_ended(process):
                del running[rank]
                line.send((rank, process.exitcode))
        ready = wait([line, bell.hears, *exit_of_program], None if exit_of_program else 1)
        if not ready and has_ended(program):
            raise EOFError
        if line in ready:
            _next_message(line)
        elif ready and ready == exit_of_program:  # a process that it forked keeps the line open
            raise EOFError
        if bell.hears in ready:
            bell.silence()


def _exit_of(process: int) -> list[int]:
    """A file that is readable once the process has ended. Empty where the system has none, such as
    macOS, or refuses it, as containers may. Raises EOFError if it has ended."""
    try:
        return [os.pidfd_open(process)]
    except ProcessLookupError:
        raise EOFError from None
    except (AttributeError, OSError):
        return []


def _has_ended(process: BaseProcess) -> bool:
    """Whether a rank has ended. What it started ends with it."""
    assert process.pid is not None
    if hasattr(os, "waitid"):  # macOS has it since Python 3.13
        with contextlib.suppress(ChildProcessError):  # multiprocessing has waited for it already
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return False
            _kill(process)  # now: nobody else can have its number while it is a zombie
    return process.exitcode is not None


def _kill(process: BaseProcess) -> None:
    """Kill a rank, and all that it started, in a session of its own."""
    process.kill()  # it may have no session yet
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says so of zombies
        os.killpg(process.pid, signal.SIGKILL)


class _Bell:
    """`hears`, to wait for besides the line, is readable when a child has ended."""

    def __init__(self) -> None:
        self.hears, self._rings = socket.socketpair()
        for end in (self.hears, self._rings):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing rings
        signal.set_wakeup_fd(self._rings.fileno(), warn_on_full_buffer=False)

    def silence(self) -> None:
        """Read what has rung so far."""
        self.hears.recv(4096)

    def close(self) -> None:
        """For a rank, which has children of its own."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.hears.close()
        self._rings.close()
