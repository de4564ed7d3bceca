"""The parent of a pool's ranks: one small process that forks them, and ends them without fail.

A rank may be stopped, or in C code that holds the GIL, and the program may be killed: neither can
be trusted to end the ranks. So they are children of a third process, which runs nothing of the
reader's. It imports minidist once for all its ranks; since it lives as long as its pool, a new pool
runs the files as they are now. It says which rank has ended, and kills what is left when the pool
lets it go, or is gone.
"""

import errno
import gc
import importlib
import multiprocessing
import os
import shutil
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess, current_process

from minidist.machine.runtime import worker

PIPES = 4  # of each rank


# ---- the pool's side of the line ---------------------------------------------------------------


def request_rank(line: Connection, pipes: Sequence[Connection]) -> None:
    """Let the supervisor start the next rank, with these pipes, which are closed here."""
    try:
        with _as_socket(line) as messages:  # a Connection does not carry files
            socket.send_fds(messages, [b"+"], [pipe.fileno() for pipe in pipes])
    except (BrokenPipeError, ConnectionResetError):
        pass  # it is gone, and has said why
    finally:
        for pipe in pipes:
            pipe.close()


def hang_up(line: Connection, seconds: float) -> None:
    """Let the supervisor end what is left, and wait for its own end, but no longer than this."""
    with suppress(OSError), _as_socket(line) as messages:  # it may have ended
        messages.shutdown(socket.SHUT_WR)
        messages.settimeout(seconds)
        while messages.recv(4096):
            pass  # which rank has ended


@contextmanager
def _as_socket(end: Connection) -> Iterator[socket.socket]:
    same = socket.socket(fileno=end.fileno())
    try:
        same.settimeout(None)  # whatever socket.setdefaulttimeout says
        yield same
    finally:
        same.detach()


# ---- the supervisor ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What ranks are started with."""

    environs: Sequence[dict[str, str]]  # one a rank
    folder: str  # made for the ranks' files and sockets, and removed at the end
    stage: bytes  # see `worker.main`
    imports: Sequence[str]  # modules that each rank would import


def main(line: Connection, plan: Plan) -> None:
    """Start the ranks with the pipes that come by `line`, and supervise them until its end.

    By `line` the pool learns (rank, exit code) of each rank that ends, or the exception for which
    no rank can be started.
    """
    bell = _hear_children()
    running: dict[int, BaseProcess] = {}
    try:
        os.mkdir(plan.folder, 0o700)
        vars(current_process())["_config"]["tempdir"] = plan.folder  # for multiprocessing's sockets
        for name in plan.imports:
            importlib.import_module(name)
        # What is imported is here for good. A rank's collection that walked it would copy its
        # pages, which ranks share, and take a third of a second.
        gc.freeze()
        for rank, environ in enumerate(plan.environs):
            running[rank] = _fork(line, bell, environ, plan)
        _watch(line, bell, running)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the pool has hung up
    except Exception as error:
        with suppress(Exception):
            line.send(error)
    for process in running.values():
        _kill(process)
    for process in running.values():
        process.join()
    bell.close()
    shutil.rmtree(plan.folder, ignore_errors=True)


def _fork(
    line: Connection, bell: socket.socket, environ: dict[str, str], plan: Plan
) -> BaseProcess:
    with _as_socket(line) as messages:
        message, files, *_ = socket.recv_fds(messages, 1, PIPES)
    if not message:
        raise EOFError
    if len(files) < PIPES:  # the system left some out
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    pipes = worker.Pipes(*map(Connection, files))
    args = (line, bell, pipes, environ, plan.folder, plan.stage)
    process = multiprocessing.get_context("fork").Process(target=_be_rank, args=args)
    process.start()
    pipes.close()
    return process


def _be_rank(
    line: Connection,
    bell: socket.socket,
    pipes: worker.Pipes,
    environ: dict[str, str],
    folder: str,
    stage: bytes,
) -> None:
    line.close()
    bell.close()
    os.close(signal.set_wakeup_fd(-1))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a rank has children of its own
    worker.main(pipes, environ, folder, stage)


def _watch(line: Connection, bell: socket.socket, running: dict[int, BaseProcess]) -> None:
    """Say which rank has ended, until the pool hangs up."""
    while True:
        for rank, process in list(running.items()):
            if process.exitcode is not None:
                _kill(process)
                del running[rank]
                line.send((rank, process.exitcode))
        if line in wait([line, bell]):
            return  # all requests have come: this is the end of the line
        bell.recv(4096)


def _kill(process: BaseProcess) -> None:
    """Kill a rank, and all that it started, in a session of its own."""
    process.kill()  # it may have no session yet
    assert process.pid is not None
    with suppress(ProcessLookupError, PermissionError):  # macOS says so of zombies
        os.killpg(process.pid, signal.SIGKILL)


def _hear_children() -> socket.socket:
    """A socket, to wait for besides the line, that is readable when a child has ended."""
    hears, rings = socket.socketpair()
    hears.setblocking(False)
    rings.setblocking(False)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the program may have blocked it
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing rings
    signal.set_wakeup_fd(rings.detach(), warn_on_full_buffer=False)
    return hears
