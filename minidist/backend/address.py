"""How a process shows its files to the others of its machine, and how these see that it has ended.

What it shows travels through a store, which other machines and containers may share. There the same
path leads to a stranger's file, or nowhere; and here too, once the process has ended and its number
is another's. So nothing is opened before it is known to be the one that was shown.
"""

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator


def machine() -> str:
    """Identifies this boot and PID namespace: only processes with equal values can open each
    other's /proc files."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # macOS
        return socket.gethostname()


def new_file(nbytes: int) -> tuple[int, str]:
    """A file in memory, without a name. Where the system has none or refuses it, one in a folder;
    on macOS that needs its name, until all have it open."""
    try:
        return os.memfd_create("minidist", os.MFD_CLOEXEC), ""
    except (AttributeError, OSError) as error:
        refused = f"memfd_create: {error}"
    if not os.path.isdir("/proc/self/fd"):
        return tempfile.mkstemp(prefix="minidist-")
    for folder in ("/dev/shm", tempfile.gettempdir()):
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)  # or a full folder ends us by SIGBUS
                return os.dup(file.fileno()), ""
        except OSError as error:
            refused += f"; {folder}: {error}"
    raise OSError(f"no memory that ranks could share ({refused})")


def show(file: int, name: str = "") -> str:
    """Where another process finds a file that this one has open, by its name if it has one; and
    what tells the file from any other that may be found there."""
    there = os.fstat(file)
    return f"{name or f'/proc/{process()}/fd/{file}'}:{there.st_dev}:{there.st_ino}"


def reach(shown: str, flags: int) -> int:
    """Open what another process shows. Raises FileNotFoundError if that is gone."""
    name, device, inode = shown.rsplit(":", 2)
    there = os.stat(name)  # not yet opened: a stranger's pipe would notice that
    if (there.st_dev, there.st_ino) != (int(device), int(inode)):
        raise FileNotFoundError(name)
    return os.open(name, flags | os.O_CLOEXEC)


def hide(shown: str) -> None:
    """Nobody will reach it any more."""
    name = shown.rsplit(":", 2)[0]
    if not name.startswith("/proc/"):
        os.unlink(name)


@contextlib.contextmanager
def closed_by_an_error(files: list[int]) -> Iterator[None]:
    """Should the block fail, these are closed: those too that it adds to the list."""
    try:
        yield
    except BaseException:
        for file in files:
            os.close(file)
        raise


def process() -> int:
    """The number by which others find this process."""
    try:
        return int(os.readlink("/proc/self"))
    except OSError:  # macOS
        return os.getpid()


def life(number: int) -> str:
    """When the process of this number began, by the kernel's clock; "" if it has ended. So two
    processes that had the number one after the other are told apart. Raises OSError if this cannot
    be seen now."""
    try:
        with open(f"/proc/{number}/stat") as file:
            state, *fields = file.read().rpartition(")")[2].split()  # behind its name
        return "" if state in "ZXx" else fields[18]
    except (FileNotFoundError, ProcessLookupError):
        if os.path.isdir("/proc/self"):
            return ""
    try:  # macOS
        os.kill(number, 0)
    except ProcessLookupError:
        return ""
    return "?"
