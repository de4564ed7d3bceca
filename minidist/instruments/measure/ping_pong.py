"""What a message costs: there and back, by size, and the α and β of it; and what all ranks take for
something that they do together. Lessons: communication, networks."""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from math import nan
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

Samples = list[tuple[int, float]]  # (bytes, seconds)


def ping_pong(sizes: Iterable[int], repeats: int = 21) -> Samples:
    """Messages of so many bytes from rank 0 to rank 1 and back: half of the time there and back.

    All ranks may call it; the others return an empty list. The sizes take turns, so that all of
    them meet the same machine. The first round, which touches memory that is new, is not counted,
    and neither is the byte that goes there and back before each message: without it the one after
    the longest would find its code and its data gone from the caches.
    """
    rank, samples = dist.get_rank(), Samples()
    if rank > 1:
        return samples
    messages = [torch.zeros(nbytes, dtype=torch.uint8) for nbytes in sizes]
    byte = torch.zeros(1, dtype=torch.uint8)
    for round_ in range(1 + repeats):
        for x in messages:
            _there_and_back(byte, rank)
            start = time.perf_counter()
            _there_and_back(x, rank)
            if round_:
                samples.append((x.numel(), (time.perf_counter() - start) / 2))
    return samples


def _there_and_back(x: torch.Tensor, rank: int) -> None:
    if rank == 0:
        dist.send(x, dst=1)
        dist.recv(x, src=1)
    else:
        dist.recv(x, src=0)
        dist.send(x, dst=0)


def medians(samples: Sequence[tuple[int, float]]) -> dict[int, float]:
    """The median of the seconds of each size."""
    return {nbytes: median(seconds) for nbytes, seconds in _by_size(samples).items()}


def fastest(samples: Sequence[tuple[int, float]]) -> dict[int, float]:
    """The least seconds of each size: what is left if nothing else was going on. Use it where a
    busy machine can only add to the time, as on a link."""
    return {nbytes: min(seconds) for nbytes, seconds in _by_size(samples).items()}


def _by_size(samples: Sequence[tuple[int, float]]) -> dict[int, list[float]]:
    by_size: dict[int, list[float]] = {}
    for nbytes, seconds in samples:
        by_size.setdefault(nbytes, []).append(seconds)
    return by_size


def fit(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """α and β, in seconds and seconds a byte, of the line α + nβ through the medians.

    Least squares of the relative errors, so that short messages count as much as long ones.
    """
    points = torch.tensor(list(medians(samples).items()), dtype=torch.float64)  # (sizes, 2)
    sizes, seconds = points.unbind(1)
    columns = torch.stack([1 / seconds, sizes / seconds], dim=1)  # α/t + nβ/t = 1
    alpha, beta = torch.linalg.lstsq(columns, torch.ones(len(sizes), 1).double()).solution
    return alpha.item(), beta.item()


def crossing(first: Mapping[int, float], second: Mapping[int, float]) -> float:
    """Where two lines cross, {bytes: seconds} at the same sizes: from there on the other one is
    faster. Not a number if they do not. Lesson: communication."""
    ahead = [(nbytes, second[nbytes] - first[nbytes]) for nbytes in sorted(first)]
    for (low, won), (high, lost) in pairwise(ahead):
        if won * lost <= 0 and won != lost:
            return low + (high - low) * won / (won - lost)
    return nan


def together(program: Callable[..., Any], *args: Any, rounds: int = 4) -> float:
    """Seconds of `program(*args)` on all ranks, which all call this: from the start of the first to
    the end of the last. Of some rounds the shortest. Lesson: networks."""
    lengths = []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        program(*args)
        mine = (start, time.perf_counter())
        spans: list[Any] = [mine] * dist.get_world_size()
        dist.all_gather_object(spans, mine)
        starts, ends = zip(*spans, strict=True)
        lengths.append(max(ends) - min(starts))
    return min(lengths)


def tie_to_cores(count: int) -> bool:
    """Tie this process to the first `count` of its cores; False where the system cannot.

    Then ranks share their cores on a large machine as they do on a small one.
    """
    if not hasattr(os, "sched_setaffinity"):  # macOS
        return False
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])
    return True
