"""The same collectives by MPICH, which runs on processes of its own. Lesson: collectives

`seconds` has mpiexec start this file, once for each case. The ranks time their rounds as those of
`bench.shared` do, and rank 0 prints the times as JSON. The file is started by its path, so no
rank imports torch and a start takes a fraction of a second.

MPICH waits by spinning. Where ranks are more than cores, one that waits holds the core that another
needs until it yields it, after MPIR_CVAR_POLLS_BEFORE_YIELD polls. That is left at its default, and
so is the thread level that mpi4py asks for (multiple; with single, a rank hardly ever yields).

The arrays lie in pages of 4 KiB as torch's tensors do. numpy would ask for huge pages, with which
MPICH is faster: NUMPY_MADVISE_HUGEPAGE=1 in the environment measures that.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

LIMIT = 60  # seconds for one case, start and all; most take less than one
INSTALL = "in a clone of minidist: python -m pip install -c constraints.txt -e '.[mpi]'"
# Lines around the one that says what went wrong; mpiexec's own begin with a bracket.
NOISE = "=", "[", "Abort(", "This typically refers", "Please see the FAQ"


class MpichError(RuntimeError):
    """Why there are no times of MPICH, in one line."""


def missing() -> str | None:
    """What MPICH would need here, and how to install it, in one line; None if all is there."""
    if importlib.util.find_spec("mpi4py") is None:
        return f"mpi4py is not installed ({INSTALL})"
    return None if _mpiexec() else f"there is no mpiexec ({INSTALL})"


def _mpiexec() -> str | None:
    """mpiexec from the wheel of MPICH, beside this Python; if there is none, the system's."""
    scripts = sysconfig.get_path("scripts")
    return shutil.which("mpiexec", path=scripts) or shutil.which("mpiexec")


def seconds(name: str, world_size: int, size: int, rounds: int) -> list[float]:
    """Time a collective on `size` bytes: a round lasts as long as its slowest rank.

    MpichError says in one line why there are no times. No rank is left behind: ranks end with
    their mpiexec, which is killed if this call is interrupted, and ends itself after the limit.
    """
    ranks = [_mpiexec() or "mpiexec", "-n", str(world_size)]
    # mpi4py as the main module ends all ranks when one raises; else the others would wait for it.
    command = [*ranks, sys.executable, "-m", "mpi4py", __file__, name, str(size), str(rounds)]
    try:
        ran = subprocess.run(
            command,
            env={"NUMPY_MADVISE_HUGEPAGE": "0", **os.environ, "MPIEXEC_TIMEOUT": str(LIMIT + 5)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
    except OSError as error:
        raise MpichError(f"mpiexec does not start: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise MpichError(f"mpiexec took longer than {LIMIT} s") from error
    if ran.returncode:
        told = [line for line in (ran.stdout + ran.stderr).splitlines() if line.strip()]
        told = [line for line in told if not line.startswith(NOISE)] or told[:1] or ["said nothing"]
        raise MpichError(f"mpiexec ended with {ran.returncode}: {told[-1].strip()}")
    return parse(ran.stdout, world_size, rounds)


def parse(printed: str, world_size: int, rounds: int) -> list[float]:
    """The times that rank 0 printed, if it was MPICH that ran, on so many ranks."""
    found = [line for line in printed.splitlines() if line.startswith('{"library"')]
    if not found:
        raise MpichError("no times came back from mpiexec")
    times = json.loads(found[0])
    if times["library"] != "MPICH":
        raise MpichError(f"mpi4py runs on {times['library']} here, not on MPICH")
    if times["ranks"] != world_size:  # an mpiexec of another MPI starts ranks that stay alone
        raise MpichError(f"{world_size} ranks were started, and {times['ranks']} met")
    assert len(times["seconds"]) == rounds
    return [float(each) for each in times["seconds"]]


def in_a_row(size: int) -> int:
    """Calls that a round times together, one after another: a short call alone would say more of
    when the ranks leave the barrier before it."""
    return max(1, min(20, 4 * 10**6 // max(size, 1)))


def forget_segments() -> None:
    """Unlink MPICH's shared memory, which all ranks have mapped by now.

    MPICH does so at its end only: of ranks that are killed, the segment would stay in memory.
    """
    maps = Path("/proc/self/maps")  # of Linux; without it, all is as MPICH leaves it
    for line in maps.read_text().splitlines() if maps.exists() else []:
        if "/mpich_shm_" in line:
            Path(line.split()[5]).unlink(missing_ok=True)  # another rank may have been first


def main(name: str, size: int, rounds: int) -> None:
    """What each rank does under mpiexec."""
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    world.Barrier()
    forget_segments()
    n, p = size // 4, world.Get_size()
    whole, part = np.empty(n, np.float32), np.empty(n // p, np.float32)
    whole.fill(0)  # memory that is only asked for (np.zeros) is read from one page of zeros
    part.fill(0)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: world.Allreduce(MPI.IN_PLACE, whole),
        "broadcast": lambda: world.Bcast(whole, 0),
        "all_gather": lambda: world.Allgather(part, whole),
        "reduce_scatter": lambda: world.Reduce_scatter_block(whole, part),
    }
    taken, times = [], in_a_row(size)
    for turn in range(rounds + 1):
        world.Barrier()
        start = time.perf_counter()
        for _ in range(times):
            calls[name]()
        if turn > 0:
            taken.append((time.perf_counter() - start) / times)
    by_rank = world.gather(taken)
    if by_rank is not None:
        slowest = [max(times) for times in zip(*by_rank, strict=True)]
        print(json.dumps({"library": MPI.get_vendor()[0], "ranks": p, "seconds": slowest}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
