"""A training step under several ways to average its gradients, as timelines (lesson:
distributed_data_parallel)."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from minidist.instruments.measure.soft import rounds
from minidist.instruments.measure.timeline import Span, Timeline

Ways = Mapping[str, Callable[[nn.Module], nn.Module]]
ALONE = "computing alone"


def step_seconds(timelines: list[Timeline]) -> float:
    """Of a step of `step_timelines`: on the slowest rank. Lesson: distributed_data_parallel."""
    return max(timeline.seconds()["step"] for timeline in timelines)


def step_timelines(
    pool: Callable[..., list[Any]],
    model: Callable[[], nn.Module],
    ways: Ways,
    images: torch.Tensor,
    labels: torch.Tensor,
    seconds: float = 20,
) -> dict[str, list[Timeline]]:
    """The fastest step of each way on the ranks of `pool`: the timelines of all ranks.

    ways: {name: what wraps a model}. If the wrapper has a method `finish`, it is called after
    backward. The result begins with `computing alone`, which averages nothing. Each rank takes
    every N-th image. A step's spans are forward, backward, which ends with the last gradient, and
    waiting, until the rank may go on. Steps are taken until of each way the two fastest differ by
    5 % at most, or the seconds have passed. Lesson: distributed_data_parallel.
    """
    found: dict[str, list[list[Timeline]]] = {name: [] for name in (ALONE, *ways)}
    for _ in rounds(seconds=seconds):
        of_ranks = pool(_in_turns, model, ways, images, labels)
        for name, steps in found.items():
            steps += map(list, zip(*(of[name] for of in of_ranks), strict=True))
            steps.sort(key=step_seconds)
        if all(step_seconds(s[1]) < 1.05 * step_seconds(s[0]) for s in found.values()):
            break
    return {name: steps[0] for name, steps in found.items()}


def _in_turns(
    model: Callable[[], nn.Module], ways: Ways, images: torch.Tensor, labels: torch.Tensor
) -> dict[str, list[Timeline]]:
    """On a rank, five steps of each way. The ways take turns, so that all meet the same noise."""
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    models = {ALONE: model()} | {name: wrap(model()) for name, wrap in ways.items()}
    steps: dict[str, list[Timeline]] = {name: [] for name in models}
    for _ in range(2 + 5):  # two to warm up, and to rebuild buckets
        for name, each in models.items():
            steps[name].append(_step(each, images[mine], labels[mine]))
    return {name: timelines[2:] for name, timelines in steps.items()}


def _step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Timeline:
    times: list[float] = []
    model.zero_grad()
    first = next(model.parameters())  # backward comes to it last
    hook = first.register_hook(lambda _: times.append(time.perf_counter()))
    dist.barrier()
    with Timeline() as timeline:
        times.append(time.perf_counter())
        loss = F.cross_entropy(model(x), y)
        times.append(time.perf_counter())
        loss.backward()
        getattr(model, "finish", lambda: None)()
        times.append(time.perf_counter())
    hook.remove()
    for name, start, end in zip(("forward", "backward", "waiting"), times, times[1:], strict=False):
        timeline.spans.append(Span(name, "step", start, end))
    return timeline
