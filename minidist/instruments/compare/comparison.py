"""Runs one system after another, and holds each against one process."""

import gc
import io
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import minidist as md
from minidist.instruments.compare.model_parts import shape_of
from minidist.instruments.compare.our_systems import one_process
from minidist.instruments.compare.results import Row
from minidist.instruments.compare.systems import RefusedError, System, systems
from minidist.instruments.compare.task import DATA, Source, Task, bare
from minidist.instruments.compare.watched_steps import WARM, State, Watch
from minidist.instruments.parity import relative_difference
from minidist.machine.runtime import Pool, RankError

EXACT_STEPS = 3  # that are compared with one process
ROWS = 16  # of a batch, at least
ADAM: dict[str, Any] = dict(optimizer_class=torch.optim.Adam, options=dict(lr=1e-3))


@dataclass(frozen=True)
class Found:
    """What a rank reports: the largest difference from one process, which parameters it had, the
    losses of the compared training, and the record of the measured one."""

    largest: float
    names: set[str]
    losses: list[float]
    watch: Watch
    backend: str


@dataclass(frozen=True)
class Alone:
    """What one process comes to: its parameters, and the loss of each step. frozen: whether some of
    the parameters are not trained. shape: what the planner calls the model, if it knows it."""

    state: State
    losses: list[float]
    frozen: bool
    shape: md.planner.Transformer | None


def run(
    world_size: int = 4,
    *,
    only: Iterable[str] | None = None,
    peers: bool = False,
    data: str = "text",
    model: Callable[[], nn.Module] | str | None = None,
    steps: int = 10,
    backend: str = "auto",
    link: md.Link | None = None,
    progress: Callable[[str, Row | None], None] | None = None,
) -> list[Row]:
    """Train by each system, and hold it against one process. Lesson: real_tools.

        rows = md.compare.run(2, only=["DDP", "FSDP"])
        print(md.compare.table(rows))

    only: names of `systems()`; None is all of minidist, and with `peers` all there are.
    data: "text" or "digits". model: a function that makes one for them, or "file.py:function";
        None is a small transformer, or a small MLP for the digits. With batch norm or dropout it is
        another one on the rows of a rank than on whole batches, so there will be a difference.
    steps: that are timed; the table has their median. backend, link: those of `md.ranks`.
    progress: called with the name of a system and None when it begins, and its row when it ends.

    Returns the rows: a system that cannot train is a row whose `problem` says why. Raises
    ValueError for a name that is unknown, numbers that make no sense, and a model that does not
    train in one process.
    """
    chosen = choose(only, peers)
    if world_size < 1 or steps < 1:
        raise ValueError(f"needs 1 rank and 1 step, or more, not {world_size} and {steps}")
    if data not in DATA:
        raise ValueError(f"there is no data {data!r}; there are {', '.join(DATA)}")
    microbatches = max(8, world_size)
    even = math.lcm(world_size, microbatches)  # torch's pipelines take no other micro-batches
    exact = Task(
        model_of(model, data),
        data,
        rows=-(-ROWS // even) * even,
        steps=EXACT_STEPS,
        microbatches=microbatches,
        world_size=world_size,
    )
    measured = replace(exact, steps=WARM + steps, dtype=torch.float32, **ADAM)
    alone: dict[torch.dtype, Alone] = {}
    rows: list[Row] = []
    kept = {world_size: first_ranks(world_size, backend, link)}
    say = progress or (lambda name, row: None)
    try:
        for system in chosen:
            say(system.name, None)
            dtype = torch.float64 if system.float64 else torch.float32
            compared = replace(exact, dtype=dtype)
            if dtype not in alone:
                alone[dtype] = train_alone(compared)
            rows.append(row_of(system, compared, alone[dtype], measured, backend, link, kept))
            say(system.name, rows[-1])
    finally:
        for pool in kept.values():
            pool.close()
    return rows


def model_of(given: Callable[[], nn.Module] | str | None, data: str) -> Callable[[], nn.Module]:
    """What makes the model. Raises ValueError for a file that cannot be used."""
    if given is None:
        return DATA[data].model
    if not isinstance(given, str):
        return given
    path, _, name = given.rpartition(":")
    if not path:
        raise ValueError(f"a model is FILE.py:FUNCTION, not {given}")
    source = Source(f"{Path(path).resolve()}:{name}")
    source.require()
    return source


def first_ranks(world_size: int, backend: str, link: md.Link | None) -> Pool:
    """The ranks. Raises ValueError where there can be none of this kind."""
    try:
        return md.ranks(world_size, backend, timeout=System.timeout, link=link)
    except RankError as error:
        why = str(error).partition("\n\n")[0]
        raise ValueError(f"ranks on the backend {backend!r} cannot start: {why}") from error


def choose(only: Iterable[str] | None, peers: bool) -> list[System]:
    """The systems to run, in the order of the list. Raises ValueError for a name that is unknown,
    with those there are."""
    known = {system.name: system for system in systems()}
    if only is None:
        return [system for system in known.values() if peers or not system.peer]
    wanted = list(only)
    if strange := [name for name in wanted if name not in known]:
        raise ValueError(f"there is no system {', '.join(strange)}; there are {', '.join(known)}")
    return [system for name, system in known.items() if name in wanted]


def train_alone(task: Task) -> Alone:
    """The training in this process. Raises ValueError if the model does not train."""
    watch = Watch(counts=False)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            state = one_process(replace(task, world_size=1), watch)
    except Exception as error:
        raise ValueError(f"the model does not train in one process: {error}") from error
    model = task.make()
    named = dict(model.named_parameters())
    frozen = not all(parameter.requires_grad for parameter in named.values())
    state = {name: state[name] for name in bare(named)}
    return Alone(state, watch.losses, frozen, shape_of(model))


def planned_bytes(system: System, task: Task, alone: Alone) -> float | None:
    """Those that the planner has of the rank that sends most; None where it has none. It takes all
    parameters to be trained."""
    if alone.frozen:
        return None
    if system.stage is not None:
        size = sum(tensor.numel() for tensor in alone.state.values())
        return md.planner.traffic(size, task.world_size, system.stage, precision="float32")
    if system.layout is None or alone.shape is None:
        return None
    layout = system.layout(task)
    if layout.pipeline > 1 and layout.tensor > 1:  # it may share out the layers in another way
        return None
    try:
        return md.planner.most_sent(alone.shape, layout, "float32")
    except ValueError:  # a stage without a layer, which the planner does not have
        return None


def row_of(
    system: System,
    compared: Task,
    alone: Alone,
    measured: Task,
    backend: str,
    link: md.Link | None,
    kept: dict[int, Pool],
) -> Row:
    """Train by one system; whatever happens there, this is its row. `kept` are the ranks of the
    systems before, by their number: if all goes well they serve the next one, too."""
    row = Row(system.name, peer=system.peer, exact=str(compared.dtype).removeprefix("torch."))
    if missing := system.missing():
        return replace(row, problem=f"not installed: {', '.join(missing)}; {system.install}")
    ranks = 1 if system.one_process else compared.world_size
    line = None if ranks == 1 else link
    with ExitStack() as ends:
        ends.enter_context(redirect_stdout(io.StringIO()))  # of the ranks
        ends.enter_context(redirect_stderr(io.StringIO()))
        own = bool(system.needs) or system.timeout != System.timeout
        try:
            pool = None if own else kept.pop(ranks, None)
            pool = pool or md.ranks(ranks, backend, timeout=system.timeout, link=line)
            close = ExitStack()
            ends.push(close)
            close.callback(pool.close)
            row = filled(row, system, pool(on_a_rank, system, compared, alone, measured), alone)
            row = replace(row, planned=planned_bytes(system, measured, alone))
        except Exception as error:
            refused = isinstance(error.__cause__, RefusedError)
            why = str(error.__cause__ if refused else error).partition("\n\n")[0]
            words = "cannot take the model" if refused else "failed"
            return replace(row, problem=f"{words}: {why}")
        if not own:
            close.pop_all()
            kept[ranks] = pool
    return row


def filled(row: Row, system: System, found: Sequence[Found], alone: Alone) -> Row:
    """The row, of what all ranks report. Raises RuntimeError if that is not a whole training."""
    if lost := set(alone.state).difference(*[each.names for each in found]):
        raise RuntimeError(f"no rank returns {', '.join(sorted(lost))}")
    watches = [each.watch for each in found]
    times = [max(step) for step in zip(*[watch.seconds[WARM:] for watch in watches], strict=True)]
    losses = _means([watch.losses for watch in watches])
    if not times or not losses:
        raise RuntimeError("it says nothing of its steps, or of their losses")
    seen = found[0].backend == "shm" or not system.peer  # torch makes calls in C++
    fullest = max(watches, key=lambda watch: sum(watch.memory.values()))
    return replace(
        row,
        difference=max(_losses_apart(found, alone), *[each.largest for each in found]),
        memory=fullest.memory,
        sent=max(watch.sent for watch in watches) if seen else None,
        seconds=statistics.median(times),
        loss=losses[-1],
        note=watches[0].note,
    )


def on_a_rank(system: System, compared: Task, alone: Alone, measured: Task) -> Found:
    """Both trainings, on one rank."""
    gc.collect()  # what the system before has left
    watch = Watch(counts=False)
    torch.manual_seed(0)
    state = bare(system.train(compared, watch))
    own = {name: state[name].cpu() for name in alone.state if name in state}
    apart = [relative_difference(tensor, alone.state[name]) for name, tensor in own.items()]
    losses = watch.losses
    del state
    gc.collect()
    system.train(measured, watch := Watch())
    return Found(max(apart, default=0.0), set(own), losses, watch, str(dist.get_backend()))


def _losses_apart(found: Sequence[Found], alone: Alone) -> float:
    """Of the means over the ranks that know them, relatively: the largest."""
    ours = torch.tensor(_means([each.losses for each in found]), dtype=torch.float64)
    wanted = torch.tensor(alone.losses, dtype=torch.float64)
    if len(ours) != len(alone.losses):
        raise RuntimeError(f"it has told {len(ours)} losses of {len(alone.losses)} steps")
    return max(map(relative_difference, ours, wanted))


def _means(losses: Sequence[list[float]]) -> list[float]:
    known = [each for each in losses if each]
    return [statistics.fmean(step) for step in zip(*known, strict=True)]
