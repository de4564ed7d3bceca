"""Start a process with torch already imported, in milliseconds.

`import torch` takes seconds; a fork takes milliseconds. So one helper process, the forkserver of
Python's own `multiprocessing`, imports torch once and is forked for every rank. The notebook's
kernel itself is never forked: it has threads, and a fork of those can hang.
"""

import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from multiprocessing.util import get_temp_dir
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext  # Windows has none

# Everything slow that ranks need. `torch._dynamo` is imported by the first optimizer that a
# process makes: 1.6 s. Not minidist itself: a pool must see the files as they are now.
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "torch.distributed.fsdp", "cloudpickle"]

LONGEST = 70  # characters of a temporary folder; a socket's whole path has 104 at most

_globals = threading.Lock()


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

    socket_folder()
    resource_tracker.ensure_running()  # its start would unblock the signal again
    # A kernel's interrupt goes to the forkserver too, which only ignores it after its imports.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def socket_folder() -> str:
    """Where multiprocessing makes its sockets, whose paths may not be long: not below a long
    TMPDIR."""
    before = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST:
        tempfile.tempdir = "/tmp"
    try:
        return get_temp_dir()
    finally:
        tempfile.tempdir = before


def start(target: Callable[..., None], *args: Any) -> BaseProcess:
    """Start one process that runs `target(*args)`.

    It is not a daemon, since a daemon may not have children, and a DataLoader's workers are.
    """
    with _of_nobody():
        warm_up()
        process = context().Process(target=target, args=args, daemon=False)
        process.start()
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
