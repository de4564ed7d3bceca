"""A step of a pipeline whose layers sleep, simulated and run on an emulated link.

Sleeping needs no core, so ranks on two cores take the time that they would on cores of their own.
Lesson: pipeline_schedules
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from minidist.course.zoo import Sleep
from minidist.instruments.link import Link
from minidist.instruments.measure import rounds
from minidist.pipeline import SCHEDULES, Pipeline, Schedule, Span, simulate
from minidist.pipeline.schedules import Prediction
from minidist.rank import ranks

N, ROWS, WIDTH = 4, 16, 10_000  # ranks; rows of a batch; 40 kB a row
Choice = tuple[str | Schedule, int]  # a schedule, by its name or itself, and the micro-batches


class Raced(NamedTuple):
    """A step by one schedule: simulated, and what each rank did in the fastest real one."""

    predicted: Prediction
    traces: Sequence[Sequence[Span]]

    @property
    def measured(self) -> float:
        return _seconds(self.traces)


def predict(
    schedule: str | Schedule, m: int, link: Link | None = None, ms: float = 4
) -> Prediction:
    """The step of four ranks. A row takes `ms` on each, forward, and twice that backward."""
    if isinstance(schedule, str):
        schedule = SCHEDULES[schedule](N, m)
    part = ms / 1e3 * ROWS / m * N / schedule.stages
    return simulate(schedule, part, part, part, link, nbytes=4 * WIDTH * ROWS // m)


def race(choices: Sequence[Choice], link: Link | None = None, ms: float = 4) -> list[Raced]:
    """Each choice as predicted, and run. A busy machine can only add time, so the fastest of
    several rounds counts: one, if none is 80 ms late."""
    soon = [predict(schedule, m, link, ms) for schedule, m in choices]
    best: list[Sequence[Sequence[Span]]] = []
    with ranks(N, link=link) as on_link:
        for _ in rounds(1, 5):
            steps = list(zip(*on_link(_run, choices, ms), strict=True))
            best = [min(pair, key=_seconds) for pair in zip(best or steps, steps, strict=True)]
            if all(_seconds(b) < s.time + 0.08 for b, s in zip(best, soon, strict=True)):
                break
    return [Raced(*pair) for pair in zip(soon, best, strict=True)]


def _run(choices: Iterable[Choice], ms: float) -> list[list[Span]]:
    """On a rank: what it did in a step by each schedule."""
    batch, traces = torch.zeros(ROWS, WIDTH), []
    for schedule, m in choices:
        layers = 2 * N if schedule == "interleaved" else N
        slow = nn.Sequential(*(Sleep(ms * N / layers) for _ in range(layers)))
        model = Pipeline(slow, m, schedule)
        dist.barrier()
        model.train_step(batch, batch, F.mse_loss)
        traces.append(model.trace)
    return traces


def _seconds(traces: Sequence[Sequence[Span]]) -> float:
    spans = [span for trace in traces for span in trace]
    return max(span.end for span in spans) - min(span.start for span in spans)
