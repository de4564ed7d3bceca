"""Subjects are timed in turns, or each alone, in moments when no other process computes."""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from time import perf_counter

import torch
import torch.distributed as dist

from minidist.instruments.bench.rows import Row

MOMENT = 0.5  # seconds, the shortest that can be judged: the kernel counts in hundredths
LIMIT = 0.05  # of the machine: a moment in which others take more is thrown away
PATIENCE = 1.0  # seconds that may be thrown away of any measurement, however short
BLOCKS = 2  # of each that is timed alone

Subjects = Mapping[str, Callable[[], float]]


class Times(dict[str, list[float]]):
    """Seconds of each round, by subject. `disturbed` rounds were kept although other processes took
    part of the machine: too many had been thrown away."""

    disturbed = 0

    def row(self, what: str, ours: str, theirs: str, against: str = "") -> Row:
        """A subject beside another, which is called `against` (its own name, if not said)."""
        return Row(what, self[ours], against or theirs, self[theirs], self.disturbed)


def in_turns(subjects: Subjects, rounds: int, warm: int = 0, root: int | None = None) -> Times:
    """Call each subject once a round: the seconds that each one reports.

    The first `warm` rounds do not count. The others are judged, short ones several at a time: if
    other processes took more than LIMIT of the machine meanwhile, they are thrown away and taken
    again, until that has taken as long as all should take. What comes then is kept. `root` is the
    process that started ours, this one if None.

    Also on ranks, where all must call it: a subject then takes as long as on its slowest rank.
    """
    times = Times({name: [] for name in subjects})
    start = perf_counter()
    for _ in range(warm):
        _round(subjects)
    each = _slowest([(perf_counter() - start) / warm])[0] if warm else MOMENT
    done, lost = 0, 0.0
    while done < rounds:
        several = min(rounds - done, max(1, math.ceil(MOMENT / each)))
        others = _Others(root or os.getpid())
        start = perf_counter()
        taken = [_round(subjects) for _ in range(several)]
        each = (perf_counter() - start) / several
        each, share, *seconds = _slowest([each, others.share(), *chain(*taken)])
        if share > LIMIT:
            lost += max(MOMENT, several * each)
            if lost <= max(PATIENCE, rounds * each):
                continue
            times.disturbed += several
        for i, name in enumerate(subjects):
            times[name] += seconds[i :: len(subjects)]
        done += several
    return times


def alone(programs: Mapping[str, Callable[[int], Times]], rounds: int) -> Times:
    """Times in blocks: A, A, …, B, B, …, and again. So A does not pay for what B has left in the
    processors' caches. A program takes so many rounds and returns the times of its name."""
    times = Times({name: [] for name in programs})
    for block in range(BLOCKS):
        several = rounds * (block + 1) // BLOCKS - rounds * block // BLOCKS
        for name, program in programs.items() if several else ():
            taken = program(several)
            times[name] += taken[name]
            times.disturbed += taken.disturbed
    return times


def _round(subjects: Subjects) -> list[float]:
    return [subject() for subject in subjects.values()]


def _slowest(values: Sequence[float]) -> list[float]:
    """The largest of all ranks, one by one."""
    if not dist.is_initialized():
        return list(values)
    largest = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


class _Others:
    """How much of the machine others take from now on: not idle, and not ours, which are `root` and
    its descendants. Rank 0 looks; for the other ranks it is nothing."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._looks = not dist.is_initialized() or dist.get_rank() == 0
        self._start, self._before = time.monotonic(), self._idle_or_ours()

    def share(self) -> float:
        """0 to 1. Lets MOMENT pass first."""
        if not self._looks:
            return 0.0
        time.sleep(max(0.0, self._start + MOMENT - time.monotonic()))
        spent, seconds = self._idle_or_ours() - self._before, time.monotonic() - self._start
        return 1 - spent / (seconds * (os.cpu_count() or 1))

    def _idle_or_ours(self) -> float:
        """Seconds of all processors."""
        if not self._looks:
            return 0.0
        import psutil

        whole = psutil.cpu_times()
        seconds = whole.idle + getattr(whole, "iowait", 0.0)
        parent = psutil.Process(self._root)
        for process in [parent, *parent.children(recursive=True)]:
            with suppress(psutil.Error):  # it has just ended
                seconds += sum(process.cpu_times()[:4])  # also of its children that have ended
        return float(seconds)
