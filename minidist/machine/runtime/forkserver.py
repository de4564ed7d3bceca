"""Start a process with torch already imported, in milliseconds.

`import torch` takes seconds; a fork takes milliseconds. So one helper process, the forkserver of
Python's own `multiprocessing`, imports torch once and is forked for every rank. The notebook's
kernel itself is never forked: it has threads, and a fork of those can hang.
"""

import multiprocessing
import multiprocessing.process
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess, current_process
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext  # Windows has none

# Everything slow that ranks need. `torch._dynamo` is imported by the first optimizer that a
# process makes: 1.6 s. Not minidist itself: a pool must see the files as they are now. The variable
# MINIDIST_PRELOAD names other modules instead, with spaces between them.
PRELOAD = os.environ.get(
    "MINIDIST_PRELOAD", "torch torch.distributed torch._dynamo torch.distributed.fsdp cloudpickle"
).split()

LONGEST = 63  # bytes of a temporary folder; a socket's path in it has 40 more, and 103 at most

_globals = threading.RLock()  # of multiprocessing, and `__main__`: held while they are changed
_HAS_UNNAMED = hasattr(os, "O_PATH") and os.path.isdir("/proc/self/fd")  # Linux
_socket: int | None = None  # the forkserver's, where it has no name


def context() -> "ForkServerContext":
    """Python's forkserver context, which will import torch. Raises OSError where there is none."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        raise OSError(
            "minidist starts its ranks with Python's forkserver, which Windows does not have. "
            "Use the Windows Subsystem for Linux (WSL), where everything here works."
        )
    ctx = multiprocessing.get_context("forkserver")
    ctx.set_forkserver_preload(PRELOAD)
    return ctx


def warm_up() -> None:
    """Start the forkserver now, and return at once: it imports torch while the reader reads."""
    context()
    from multiprocessing import forkserver, resource_tracker

    resource_tracker.ensure_running()  # its start would unblock the signal again
    # A kernel's interrupt goes to the forkserver too, which only ignores it after its imports.
    # SIGCHLD may not be blocked in it: so it hears of its children.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        with _globals, _unnamed(forkserver._forkserver):
            try:
                forkserver.ensure_running()
            except ChildProcessError:  # it has ended, and the program, or the system, waited for it
                _drop_forkserver()
                context()
                forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def _unnamed(server: Any) -> Iterator[None]:
    """Let a forkserver that starts here have a socket without a name: a killed program would leave
    it behind. It is opened by its name once, and then found by /proc. macOS keeps the name."""
    global _socket
    folder = tempfile.mkdtemp(prefix="minidist-", dir=short_folder())
    before = put_sockets_in(folder)
    try:
        yield
    finally:
        put_sockets_in(before)
        address = server._forkserver_address or ""
        if address.startswith(folder) and not _HAS_UNNAMED:
            Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)
        else:
            if address.startswith(folder):
                if _socket is not None:
                    os.close(_socket)
                _socket = os.open(address, os.O_PATH)
                server._forkserver_address = f"/proc/self/fd/{_socket}"
            shutil.rmtree(folder)


def put_sockets_in(folder: str | None) -> str | None:
    """Let multiprocessing, here and in children to come, make its sockets there: where it did."""
    config = vars(current_process())["_config"]
    before: str | None = config.get("tempdir")
    config["tempdir"] = folder
    return before


def short_folder() -> str:
    """The temporary folder, or /tmp where its path is too long for sockets in it."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) <= LONGEST else "/tmp"


def start(target: Callable[..., None], *args: Any) -> BaseProcess:
    """Start one process that runs `target(*args)`.

    It is not a daemon, since a daemon may not have children, and a DataLoader's workers are. A
    daemon may start it: it ends with its program, whatever that is.
    """
    with _of_nobody():
        warm_up()
        process = context().Process(target=target, args=args, daemon=False)
        ours: Any = current_process()
        daemon = ours._config.pop("daemon", None)  # or multiprocessing refuses
        try:
            process.start()
        finally:
            if daemon is not None:
                ours._config["daemon"] = daemon
    return process


@contextmanager
def _of_nobody() -> Iterator[None]:
    """Keep the new process from importing the program that starts it, and its sockets from the
    program's default timeout: on macOS a start waits until the forkserver has imported torch.

    multiprocessing would run the user's script again in each child. Ours receive functions by
    value, and need no `if __name__ == "__main__"`.
    """
    with _globals:
        main, timeout = sys.modules["__main__"], socket.getdefaulttimeout()
        sys.modules["__main__"] = types.ModuleType("__main__")
        socket.setdefaulttimeout(None)
        try:
            yield
        finally:
            sys.modules["__main__"] = main
            socket.setdefaulttimeout(timeout)


def _forget() -> None:
    """In a forked child: the forkserver is its parent's, and so are the parent's processes."""
    global _socket
    if _socket is not None:
        with suppress(OSError):  # the program may have closed all its files
            os.close(_socket)  # now: later another file may have its number
        _socket = None
    processes: Any = multiprocessing.process
    processes._children.clear()
    _drop_forkserver()
    _globals.release()


def _drop_forkserver() -> None:
    """Let the next one that is asked for be another one."""
    if module := sys.modules.get("multiprocessing.forkserver"):
        server: Any = vars(module)["_forkserver"]
        if server._forkserver_alive_fd is not None:
            with suppress(OSError):
                os.close(server._forkserver_alive_fd)
        server.__init__()


if hasattr(os, "register_at_fork"):  # Windows has none
    # Nobody forks while the globals are others than the program's.
    os.register_at_fork(
        before=_globals.acquire, after_in_parent=_globals.release, after_in_child=_forget
    )
