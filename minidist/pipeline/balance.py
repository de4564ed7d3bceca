"""Where to cut a model: stages of equal cost, as nearly as whole layers allow."""

import time
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from statistics import median

import torch
import torch.distributed as dist
from torch import nn


def balance_by_parameters(module: nn.Sequential, stages: int) -> list[int]:
    """How many layers each stage takes, so that the largest stage has the fewest parameters.
    Raises ValueError if there are fewer layers than stages.

    Lesson: layer_splitting
    """
    return balance([sum(p.numel() for p in layer.parameters()) for layer in module], stages)


def balance_by_cost(
    module: nn.Sequential,
    example: torch.Tensor,
    stages: int,
    process_group: dist.ProcessGroup | None = None,
) -> list[int]:
    """How many layers each stage takes, so that the slowest stage is as fast as can be.
    Lesson: layer_splitting

    Each layer's forward pass is timed on `example`, a micro-batch of inputs. Where there is a
    process group, all its ranks call this, and take the mean of their times: they must cut alike.
    Layers that are in training mode draw random numbers and update their buffers.
    """
    seconds, x = torch.zeros(len(module), dtype=torch.float64), example
    with torch.no_grad():
        for number, layer in enumerate(module):
            seconds[number] = median([_seconds(layer, x) for _ in range(5)])
            x = layer(x)
    if dist.is_available() and dist.is_initialized():
        times: list[torch.Tensor] = [seconds] * dist.get_world_size(process_group)
        dist.all_gather_object(times, seconds, group=process_group)
        seconds = torch.stack(times).mean(0)
    return balance(seconds.tolist(), stages)


def _seconds(layer: nn.Module, x: torch.Tensor) -> float:
    _finish(x)
    start = time.perf_counter()
    _finish(layer(x))
    return time.perf_counter() - start


def _finish(x: torch.Tensor) -> None:
    if x.is_cuda:  # its work is only queued
        torch.cuda.synchronize(x.device)


def balance(costs: Sequence[float], stages: int) -> list[int]:
    """Cut a row of costs into `stages` pieces, none empty, so that the largest sum is smallest.
    Returns the lengths of the pieces. With all costs equal, the pieces are as long as each other.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"{len(costs)} layers cannot be cut into {stages} stages")
    sums = [0, *accumulate(costs)]

    @cache
    def best(end: int, pieces: int) -> tuple[float, float, int]:
        """Of the first `end` costs: the largest sum; the sum of squares, smaller for pieces that
        are more alike; and where the last piece begins."""
        if pieces == 1:
            return sums[end], sums[end] ** 2, 0
        return min(
            (max(best(cut, pieces - 1)[0], last), best(cut, pieces - 1)[1] + last**2, cut)
            for cut in range(pieces - 1, end)
            for last in [sums[end] - sums[cut]]
        )

    lengths, end = [], len(costs)
    for pieces in range(stages, 0, -1):
        cut = best(end, pieces)[2]
        lengths.append(end - cut)
        end = cut
    return lengths[::-1]
