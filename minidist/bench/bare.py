"""Two bare processes that make the copies of an all_reduce by shared memory, and nothing else.

The backend "shm" takes a tensor through staging areas, piece by piece (`backend.collectives`): a
rank stages a piece, adds up its own half of it, and takes the other half. Here is just that, by a
fork and a spinning flag: no process group, no check, no thread. So it is a bound: from ordinary
tensors, no library is faster that makes these copies.

`seconds` starts this file by its path, as `bench.mpich` does. Lesson: collectives
"""

import json
import mmap
import os
import subprocess
import sys
import time

LIMIT = 60  # seconds for one size, start and all
STAGES = 3  # areas: a piece is staged, added up and taken, with a barrier between
LINE = 8  # words, of a line of the cache: so far apart lie the flags


def seconds(size: int, rounds: int) -> list[float]:
    """Time it on `size` bytes of float32: a round lasts as long as its slower process.

    RuntimeError says why there are no times.
    """
    from minidist.backend.members import STAGE
    from minidist.bench.mpich import in_a_row

    numbers = size, rounds, in_a_row(size), STAGE
    command = [sys.executable, __file__, *map(str, numbers)]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"two bare processes took longer than {LIMIT} s") from error
    if ran.returncode:
        raise RuntimeError(f"two bare processes: {ran.stderr.strip() or ran.returncode}")
    return json.loads(ran.stdout)


def main(size: int, rounds: int, in_a_row: int, stage: int) -> None:
    """What both processes do; the first one prints. `stage`: bytes of a staging area."""
    import torch

    torch.set_num_threads(1)
    parent = os.getpid()
    shared = mmap.mmap(-1, mmap.PAGESIZE + 8 * 2 * rounds + 2 * STAGES * stage)
    flags = memoryview(shared)[: mmap.PAGESIZE].cast("q")
    floats = torch.frombuffer(shared, dtype=torch.float32, offset=mmap.PAGESIZE)
    rooms = floats[: 2 * STAGES * stage // 4].view(2, STAGES, -1)
    taken = floats[rooms.numel() :].view(torch.float64).view(2, rounds)  # seconds
    child = os.fork()
    rank, ticks = (0, 0) if child else (1, 0)
    x = torch.ones(size // 4)

    def barrier() -> None:
        nonlocal ticks
        ticks += 1
        flags[LINE * rank] = ticks
        spins = 0
        while flags[LINE * (1 - rank)] < ticks:
            spins += 1
            if spins % 10**6 == 0 and rank and os.getppid() != parent:
                os._exit(1)  # the other one was killed

    def halves(piece: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What this process adds up, and what the other one does."""
        pair = piece[: len(piece) // 2], piece[len(piece) // 2 :]
        return pair[rank], pair[1 - rank]

    def room(number: int, piece: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """A piece, and the rooms for it: mine and the other's."""
        there = rooms[:, number % STAGES, : len(piece)]
        return piece, there[rank], there[1 - rank]

    def all_reduce() -> None:
        taken = added = None
        pieces = [room(number, piece) for number, piece in enumerate(x.split(stage // 4))]
        while pieces or added or taken:
            staged = pieces.pop(0) if pieces else None
            if taken:  # what the other one has added up
                piece, _, theirs = taken
                halves(piece)[1].copy_(halves(theirs)[1])
            if added:  # my half, and show it
                piece, mine, theirs = added
                half = halves(piece)[0]
                torch.add(half, halves(theirs)[0], out=half)
                halves(mine)[0].copy_(half)
            if staged:  # show the other half
                piece, mine, _ = staged
                halves(mine)[1].copy_(halves(piece)[1])
            if added or staged:
                barrier()
            taken, added = added, staged

    all_reduce()  # touches memory that is new
    assert bool((x == 2).all())
    x.zero_()
    for turn in range(rounds):
        barrier()
        start = time.perf_counter()
        for _ in range(in_a_row):
            all_reduce()
        taken[rank, turn] = (time.perf_counter() - start) / in_a_row
    barrier()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    print(json.dumps(taken.amax(0).tolist()))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
