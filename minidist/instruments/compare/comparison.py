"""Runs one system after another, and holds each against one process."""

import gc
import io
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import minidist as md
from minidist.instruments.compare import our_systems, torch_systems
from minidist.instruments.compare.results import Row
from minidist.instruments.compare.task import DATA, System, Task, bare
from minidist.instruments.compare.watched_steps import WARM, State, Watch
from minidist.instruments.parity import relative_difference
from minidist.machine.runtime import Pool

SYSTEMS = [*our_systems.SYSTEMS, *torch_systems.SYSTEMS]
EXACT_STEPS = 3  # that are compared with one process
ROWS = 16  # of a batch, at least
ADAM: dict[str, Any] = dict(optimizer_class=torch.optim.Adam, options=dict(lr=1e-3))


@dataclass(frozen=True)
class Found:
    """What a rank reports: the largest difference from one process, which parameters it had, the
    losses in float64, and the record of the other training."""

    largest: float
    names: set[str]
    losses: list[float]
    watch: Watch


def run(
    world_size: int = 4,
    *,
    only: Iterable[str] | None = None,
    data: str = "text",
    model: Callable[[], nn.Module] | None = None,
    steps: int = 10,
    systems: Sequence[System] = SYSTEMS,
    begins: Callable[[str], None] = lambda name: None,
) -> list[Row]:
    """Train by each system, and hold it against one process. Lesson: real_tools.

        rows = md.compare.run(2, only=["DDP", "FSDP"])
        print(md.compare.table(rows))

    only: names of `systems`; None is all of them.
    data: "text" or "digits". model: makes one for them; None is a small transformer, or an MLP.
        Batch norm and dropout act on the rows that a rank has, so they make a difference.
    steps: that are timed; the table has their median. systems: those that there are, or your own.
    begins: called with a system's name.

    A system that cannot train is a row that says why. Raises ValueError for an unknown name.
    """
    names = [system.name for system in systems]
    if only is not None and (unknown := set(only) - set(names)):
        raise ValueError(f"there is no system {', '.join(unknown)}; there are {', '.join(names)}")
    microbatches = max(8, world_size)
    even = math.lcm(world_size, microbatches)  # torch's pipelines take no other micro-batches
    exact = Task(
        model or DATA[data][1],
        data,
        rows=-(-ROWS // even) * even,
        steps=EXACT_STEPS,
        microbatches=microbatches,
        world_size=world_size,
    )
    measured = replace(exact, steps=WARM + steps, dtype=torch.float32, **ADAM)
    watch, rows = Watch(counts=False), []
    alone = our_systems.one_process(exact, watch)
    alone = {name: alone[name] for name, _ in exact.make().named_parameters()}  # no buffers
    with md.ranks(1) as single, md.ranks(world_size) as pool:
        for system in systems:
            if only is None or system.name in only:
                begins(system.name)
                ranks = single if system.one_process else pool
                rows.append(row_of(system, ranks, exact, measured, alone, watch.losses))
    return rows


def row_of(
    system: System, pool: Pool, exact: Task, measured: Task, alone: State, losses: list[float]
) -> Row:
    """Train by one system; whatever happens there, this is its row."""
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            found = pool(on_a_rank, system, exact, alone, measured)
        return filled(system, found, measured, alone, losses)
    except Exception as error:
        return Row(system.name, problem=str(error).partition("\n\n")[0])


def on_a_rank(system: System, exact: Task, alone: State, measured: Task) -> Found:
    """Both trainings, on one rank."""
    gc.collect()  # what the system before has left
    watch = Watch(counts=False)
    torch.manual_seed(0)
    state = bare(system.train(exact, watch))
    own = {name: state[name].cpu() for name in alone if name in state}
    apart = [relative_difference(tensor, alone[name]) for name, tensor in own.items()]
    losses = watch.losses
    del state
    gc.collect()
    system.train(measured, watch := Watch())
    return Found(max(apart, default=0.0), set(own), losses, watch)


def filled(
    system: System, found: Sequence[Found], task: Task, alone: State, losses: list[float]
) -> Row:
    """The row, of what all ranks report. Raises RuntimeError if that is not a whole training."""
    if lost := set(alone).difference(*[each.names for each in found]):
        raise RuntimeError(f"no rank returns {', '.join(sorted(lost))}")
    watches = [each.watch for each in found]
    seconds = [max(step) for step in zip(*[watch.seconds[WARM:] for watch in watches], strict=True)]
    apart = relative_difference(_means([each.losses for each in found]), _means([losses]))
    fullest = max(watches, key=lambda watch: sum(watch.memory.values()))
    size, planned = sum(tensor.numel() for tensor in alone.values()), None
    if system.stage is not None:
        planned = md.planner.traffic(size, task.world_size, system.stage, precision="float32")
    return Row(
        system.name,
        difference=max(apart, *[each.largest for each in found]),
        memory=fullest.memory,
        sent=max(watch.sent for watch in watches),
        planned=planned,
        seconds=statistics.median(seconds),
        loss=_means([watch.losses for watch in watches])[-1].item(),
        note=watches[0].note,
    )


def _means(losses: Sequence[list[float]]) -> torch.Tensor:
    """(steps,), over the ranks that know them."""
    return torch.tensor([each for each in losses if each], dtype=torch.float64).mean(0)
