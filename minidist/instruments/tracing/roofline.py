"""What one core can do, measured: bytes and operations a second, and which of them holds up an
operation (lesson: reading_a_step).

After Williams, Waterman and Patterson, "Roofline" (Communications of the ACM 52(4), 2009).
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter, thread_time
from typing import Any

import torch

from minidist.instruments.measure import count_flops


def own_time(function: Callable[[], Any], seconds: float = 0.15) -> float:
    """Seconds of the fastest call, after one that does not count, by the clock of this thread. It
    stands still while others have the core: so this is for one thread that never waits. Lesson:
    reading_a_step."""
    function()
    calls, best, until = 1, float("inf"), perf_counter() + seconds
    while perf_counter() < until or best == float("inf"):
        start = thread_time()
        for _ in range(calls):
            function()
        took = thread_time() - start
        if took < 1e-3 and calls < 4096:  # too short for the clock
            calls *= 4
        else:
            best = min(best, took / calls)
    return best


def bandwidth(megabytes: float = 64) -> float:
    """Bytes a second of y.add_(x), which reads two tensors of float32 and writes one. They are so
    large together. Lesson: reading_a_step."""
    x, y = torch.ones(2, int(megabytes * 1e6 / 8))
    return 3 * x.nbytes / own_time(lambda: y.add_(x))


def product(n: int) -> float:
    """FLOP/s of the product of two n × n matrices of float32. Lesson: reading_a_step."""
    a, b = torch.randn(2, n, n)
    return 2 * n**3 / own_time(lambda: a @ b)


@dataclass(frozen=True)
class Point:
    """An operation below the roofline. Lesson: reading_a_step.

    intensity: FLOP for each byte that it must move. speed: FLOP/s. seconds: of a call.
    """

    name: str
    intensity: float
    speed: float
    seconds: float


def point(
    name: str, function: Callable[[], Any], nbytes: float, flops: float | None = None
) -> Point:
    """Measure an operation that moves so many bytes at least. flops: None counts matrix products
    and attention. Lesson: reading_a_step."""
    flops, seconds = count_flops(function) if flops is None else flops, own_time(function)
    return Point(name, flops / nbytes, flops / seconds, seconds)
