"""Scripts for torch's FSDP, run by torchrun: as they are, and with the library's name changed."""

import shutil
import subprocess
import sys

import fsdp_model
import torch
from programs import Family

# Runs a script, and leaves at once. Gloo's threads end with the last reference to their group;
# models hold some, and so does a cache of torch's DTensor. A thread that outlives Python now and
# then aborts the process, after all its work: https://github.com/pytorch/pytorch/pull/179291
RUN = """
import os, runpy, sys
sys.argv.pop(0)
runpy.run_path(sys.argv[0])
os._exit(0)
"""


def saved_by_both(folder, script):
    """What the script saves, with `LIBRARY` in it as minidist and as torch.distributed.fsdp. Its
    processes leave nothing behind."""
    family, runs = Family(), []
    environ = {**family.environ(), "OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    shutil.copy(fsdp_model.__file__, folder / "model.py")
    (folder / "run.py").write_text(RUN)
    try:
        for who, library in (("ours", "minidist"), ("theirs", "torch.distributed.fsdp")):
            (folder / f"{who}.py").write_text(script.replace("LIBRARY", library))
            command = [sys.executable, *torchrun, "run.py", f"{who}.py", f"{who}.pt"]
            runs.append(subprocess.Popen(command, env=environ, cwd=folder, stderr=subprocess.PIPE))
        words = [run.communicate(timeout=100)[1].decode() for run in runs]
        assert [run.returncode for run in runs] == [0, 0], "\n".join(words)
        assert family.gone_within(20)
    finally:
        family.end()
    return tuple(torch.load(folder / f"{who}.pt") for who in ("ours", "theirs"))
