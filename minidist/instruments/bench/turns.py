"""Subjects are timed in turns, or each alone, in moments when no other process computes."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from time import perf_counter

import torch
import torch.distributed as dist

from minidist.instruments.bench.quiet import LIMIT, MOMENT, UNKNOWN, Moment
from minidist.instruments.bench.rows import Noise, Row

PATIENCE = 1.0  # seconds that may be thrown away of any measurement, however short
BLOCKS = 2  # of each that is timed alone

Subjects = Mapping[str, Callable[[], float]]


class Times(dict[str, list[float]]):
    """Seconds of each round, by subject; and the rounds that were disturbed."""

    def __init__(self, seconds: dict[str, list[float]], noise: Noise | None = None) -> None:
        super().__init__(seconds)
        self.noise = noise or Noise()

    def row(self, what: str, ours: str, theirs: str, against: str = "") -> Row:
        """A subject beside another, which is called `against` (its own name, if not said)."""
        return Row(what, self[ours], against or theirs, tuple(self[theirs]), self.noise)


def in_turns(subjects: Subjects, rounds: int, warm: int = 0, root: int | None = None) -> Times:
    """Call each subject once a round: the seconds that each one reports.

    The first `warm` rounds do not count. The others are judged, short ones several at a time: if
    other processes took more than LIMIT of the machine meanwhile, they are thrown away and taken
    again, until that has taken as long as all should take. What comes then is kept. `root` is the
    process that started ours, this one if None.

    Also on ranks, where all must call it: a subject then takes as long as on its slowest rank.
    """
    times = Times({name: [] for name in subjects})
    judges = not dist.is_initialized() or dist.get_rank() == 0
    start = perf_counter()
    for _ in range(warm):
        _round(subjects)
    each = _slowest([(perf_counter() - start) / warm])[0] if warm else MOMENT
    done, lost = 0, 0.0
    while done < rounds:
        several = min(rounds - done, max(1, math.ceil(MOMENT / each)))
        moment = Moment(os.getpid() if root is None else root) if judges else None
        start = perf_counter()
        taken = [_round(subjects) for _ in range(several)]
        each = (perf_counter() - start) / several
        share = moment.share() if moment else UNKNOWN
        each, share, *seconds = _slowest([each, share, *chain(*taken)])
        lost += max(MOMENT, several * each) if share > LIMIT else 0
        times.noise.watched = share != UNKNOWN
        if share > LIMIT and lost <= max(PATIENCE, rounds * each):
            times.noise.thrown += several
            continue
        times.noise.kept += several if share > LIMIT else 0
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
            times.noise.add(taken.noise)
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
