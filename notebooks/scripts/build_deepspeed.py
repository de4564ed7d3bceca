"""Compile DeepSpeed's C++ into a private folder, once: run it by `python build_deepspeed.py`.

DeepSpeed compiles at its first `initialize`, also for a CPU. A start that is killed meanwhile
leaves a file `lock` behind, and later starts wait for it for ever. So it is done here beforehand,
by one process at a time, and a lock that nobody holds is removed.
"""

import fcntl
import os
import shutil
import sys
import time
from pathlib import Path

FOLDER = Path(os.environ.get("TORCH_EXTENSIONS_DIR", f"{sys.prefix}/torch_extensions"))


def build() -> None:
    """Compile, or find that all is there: that takes seconds."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(FOLDER)}
    os.environ["PATH"] = f"{sys.prefix}/bin:{os.environ['PATH']}"  # where ninja is
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / ".turn").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        remove_stale(FOLDER)
        from deepspeed.accelerator import get_accelerator

        get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)


def remove_stale(folder: Path) -> None:
    """Remove each file `lock` within `folder`/* that no process holds. Who builds has it open, and
    removes it right after closing it; so look twice."""
    found = [lock for lock in folder.glob("*/lock") if not is_open(lock)]
    if found:
        time.sleep(0.2)
    for lock in found:
        if lock.exists() and not is_open(lock):
            lock.unlink(missing_ok=True)


def is_open(file: Path) -> bool:
    """Whether a process has it open. Those of other users are not seen."""
    import psutil  # comes with DeepSpeed

    for process in psutil.process_iter():
        try:
            if any(Path(found.path) == file.resolve() for found in process.open_files()):
                return True
        except (psutil.Error, OSError):
            continue  # it has ended, or is another user's
    return False


if __name__ == "__main__":
    if not shutil.which(os.environ.get("CXX", "g++")):
        sys.exit("DeepSpeed needs a C++ compiler: install g++ (on Debian: apt install g++)")
    build()
    print("DeepSpeed's C++ is compiled")
