"""Start a process with torch already imported, in milliseconds.

`import torch` takes seconds; a fork takes milliseconds. So one helper process, the forkserver,
imports torch once, and is forked whenever a process is wanted. The notebook's kernel itself is
never forked: it has threads, and a fork of those can hang.

Python's `multiprocessing` has a forkserver, too. It imports the user's script again in each child,
and leaves files behind when the program is killed. This one knows its program by one socket, and
ends when that is closed, however the program has ended.
"""

import atexit
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any

# Everything slow that ranks need. `torch._dynamo` is imported by the first optimizer that a
# process makes: 1.6 s. Not minidist itself: a pool must see the files as they are now. The variable
# MINIDIST_PRELOAD names other modules instead, with spaces between them.
PRELOAD = os.environ.get(
    "MINIDIST_PRELOAD", "torch torch.distributed torch._dynamo torch.distributed.fsdp cloudpickle"
).split()

MACOS = sys.platform == "darwin"  # it may lose a file that is closed before it is taken
_starting = threading.Lock()
_server: subprocess.Popen[bytes] | None = None
_requests: socket.socket  # to the server
_lines: weakref.WeakSet[Connection] = weakref.WeakSet()  # to the processes


def warm_up() -> None:
    """Start the forkserver now, and return at once: it imports torch while the reader reads. Raises
    OSError where no process can be forked."""
    global _server, _requests
    if not hasattr(os, "fork"):
        raise OSError(
            "minidist forks its ranks, which Windows cannot. "
            "Use the Windows Subsystem for Linux (WSL), where everything here works."
        )
    with _starting:
        if _server is not None:
            if _server.poll() is None:
                return
            _requests.close()
        _requests, theirs = socket.socketpair()
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        # -P: what lies beside this file is not for `import`. A session of its own: a kernel's
        # interrupt goes to the whole session.
        _server = subprocess.Popen(
            [sys.executable, *flags, "-P", __file__, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()


def start(target: Callable[..., None], *args: Any) -> Connection:
    """Start a process that runs `target(line, *args)`. Our end of the line: it is at its end once
    the process has ended."""
    warm_up()
    line, theirs = Pipe()
    _lines.add(line)
    try:
        socket.send_fds(_requests, [b"+"], [theirs.fileno()])
        if MACOS:
            _requests.recv(1)
    finally:
        theirs.close()
    line.send((sys.path, sys.argv, os.getcwd()))  # first: by these it finds the target
    line.send((target, args))
    return line


@atexit.register
def _stop() -> None:
    if _server is not None:
        _requests.close()
        _server.kill()  # it may still import torch
        _server.wait()


def _forget() -> None:
    """In a forked child: these are its parent's, and must not stay open when that is killed."""
    global _server, _starting
    _starting = threading.Lock()
    if _server is not None:
        _server.returncode = 0  # not ours to wait for
        _server = None
        _requests.close()
    for line in list(_lines):
        line.close()


if hasattr(os, "register_at_fork"):  # Windows has none
    os.register_at_fork(after_in_child=_forget)


# ---- the server --------------------------------------------------------------------------------


def _serve(requests: socket.socket) -> None:
    """Fork once for each byte that comes, with the line that comes with it."""
    for name in PRELOAD:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system shall bury what is forked
    while True:
        request, files, *_ = socket.recv_fds(requests, 1, 1)
        if not request:
            return  # the program has ended
        if MACOS:
            requests.send(b"+")
        if os.fork() == 0:
            requests.close()
            _run(Connection(files[0]))
        os.close(files[0])


def _run(line: Connection) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        sys.path[:], sys.argv[:], folder = line.recv()
        os.chdir(folder)
        target, args = line.recv()
        target(line, *args)
    except Exception:
        traceback.print_exc()
    os._exit(0)  # what is registered to run at exit is the server's


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as ours:
        _serve(ours)
