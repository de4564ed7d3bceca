"""Compile DeepSpeed's C++ into a private folder, once: run it by `python build_deepspeed.py`.

DeepSpeed compiles at its first `initialize`, also for a CPU. A start that is killed meanwhile
leaves a file `lock` behind, and later starts wait for it for ever. So it is done here beforehand,
by one process at a time, and a lock that nobody holds is removed.
"""

import fcntl
import os
import shutil
import sys
from pathlib import Path

from minidist.instruments.compare.build_locks import remove_stale

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


if __name__ == "__main__":
    if not shutil.which(os.environ.get("CXX", "g++")):
        sys.exit("DeepSpeed needs a C++ compiler: install g++ (on Debian: apt install g++)")
    build()
    print("DeepSpeed's C++ is compiled")
