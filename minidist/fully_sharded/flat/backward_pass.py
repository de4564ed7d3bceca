"""The backward pass: back along the trace of the forward pass. Lesson: fully_sharded"""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge

from minidist.fully_sharded.flat.flat_parameter import FlatParameter
from minidist.fully_sharded.flat.units import Unit

if TYPE_CHECKING:
    from minidist.fully_sharded.flat.unit_schedule import Schedule


class UnitPass:
    """A forward pass of a unit, and the one that ended before it, which is next in the backward
    pass. `task`: the backward pass that has come to it."""

    def __init__(self, unit: Unit, previous: "UnitPass | None") -> None:
        self.unit, self.previous = unit, previous
        self.since = torch.autograd._get_sequence_nr()  # the first node of its graph
        self.task: int | None = None
        self.entered = self.left = 0  # places in the trace
        self.unseen = False  # we do not see when a backward pass comes to it

    def place(self, flat: FlatParameter) -> int:
        """In the trace, of the event that it was gathered."""
        return self.entered + self.unit.flats.index(flat)


class Trace:
    """What happened in a forward pass of the root, in this order, the same on all ranks: a flat
    parameter of a unit was gathered (pass, flat), a unit was left (pass, None).

    Autograd goes back in exactly this order, node by node. A backward pass that comes to an event
    has done with all that was later. What it has not come to by then is not in this rank's graph.
    It may be in another rank's: so gather and reduce it all the same.
    """

    _numbers = itertools.count()

    def __init__(self) -> None:
        self.number = next(self._numbers)
        self.events: list[tuple[UnitPass, FlatParameter | None]] = []


class BackwardPass:
    """One backward pass of autograd over the units of a root."""

    def __init__(self, schedule: "Schedule") -> None:
        self._schedule = schedule
        self._opened: list[UnitPass] = []  # to which it has come
        self._reached: dict[Trace, int] = {}  # how far it has come in each
        self._in_flight: FlatParameter | None = None  # its gradient is being reduced
        self._trains = False  # it makes gradients of parameters

    def come_to(self, trace: Trace | None, this: UnitPass) -> None:
        """Autograd is about to go back through a unit."""
        if torch.is_grad_enabled():
            raise RuntimeError("gradients of gradients are not reduced: create_graph=True")
        self._go_back(trace, this, None)

    def add(
        self, trace: Trace | None, this: UnitPass, flat: FlatParameter, gradients: Sequence[Any]
    ) -> None:
        """It has gone through the unit, and has these gradients."""
        self._begin_training()
        flat.gradient.add(flat, gradients)
        # In a pass within this one, of a checkpoint, more will come.
        if this.task in (None, torch._C._current_graph_task_id()):
            self._go_back(trace, this, flat)

    def look_ahead(self) -> None:
        """Find out whether it makes gradients of parameters. torch.autograd.grad makes none."""
        if any(_will_be_given(flat) for flat in self._schedule.flats):
            self._begin_training()

    def _begin_training(self) -> None:
        if self._trains:
            return
        if self._schedule.running:
            raise RuntimeError(
                "backward() within the forward pass of a fully sharded model: its parameters "
                "are still needed. torch.autograd.grad of other tensors works"
            )
        self._trains = True
        for flat in self._schedule.flats:
            flat.gradient.resume(flat)

    # ---- along the trace -------------------------------------------------------------------

    def _go_back(self, trace: Trace | None, this: UnitPass, flat: FlatParameter | None) -> None:
        """To this event, through all that were later."""
        if trace is not None:  # what a checkpoint computes again is in none
            for later in self._latest_first():
                if later.number > trace.number:
                    self._go_to(later, 0)
            place = this.left if flat is None else this.place(flat)
            self._go_to(trace, place + 1)
            self._reached[trace] = min(self._reached[trace], place)
        self._event(trace, this, flat)

    def _go_to(self, trace: Trace, place: int) -> None:
        reached = self._reached.get(trace, len(trace.events))
        self._reached[trace] = min(reached, place)
        for event in trace.events[place:reached][::-1]:
            self._event(trace, *event)

    def _latest_first(self) -> list[Trace]:
        return sorted(self._reached, key=lambda trace: -trace.number)

    def _event(self, trace: Trace | None, this: UnitPass, flat: FlatParameter | None) -> None:
        if flat is None:
            self._open(trace, this)
        else:
            self._close(this, flat)

    def _open(self, trace: Trace | None, this: UnitPass) -> None:
        """Gather the unit, and begin to gather the next one."""
        if this.task is not None and all(this in flat.readers for flat in this.unit.flats):
            return
        this.task = torch._C._current_graph_task_id()
        self._opened.append(this)
        schedule = self._schedule
        if schedule.ahead is this.unit:
            schedule.ahead = None
        for flat in this.unit.flats:
            flat.readers.add(this)
        with torch.enable_grad():  # a checkpoint within the unit computes again with these
            this.unit.show(
                lambda flat, gradients: schedule.backward().add(trace, this, flat, gradients)
            )
        if this.previous is not None:
            schedule.prefetch(this.previous.unit)
            if this.previous.unseen:  # nobody will say that autograd has come to it
                for flat in this.previous.unit.flats:
                    flat.wait()

    def _close(self, this: UnitPass, flat: FlatParameter) -> None:
        """Free the parameters, and begin to reduce their gradient."""
        flat.readers.discard(this)
        flat.unseen.discard(this)
        if not flat.readers:
            flat.hide()
            if self._trains and flat.trains:
                flat.gradient.pending = True
                self._reduce(flat)

    def close_all(self) -> None:
        """Nothing is read any more."""
        for this in self._opened:
            this.task = None
            for flat in this.unit.flats:
                flat.readers.discard(this)

    # ---- gradients -------------------------------------------------------------------------

    def _reduce(self, flat: FlatParameter) -> None:
        if self._schedule.reduces:
            if self._in_flight is not None:
                self._in_flight.gradient.wait(self._in_flight)  # no more than one is in flight
            self._in_flight = flat
            flat.gradient.reduce(flat)

    def finish(self) -> None:
        """Before `backward()` returns: the gradients are complete."""
        if not self._trains:
            return
        for trace in self._latest_first():
            self._go_to(trace, 0)
        flats = [flat for flat in self._schedule.flats if flat.trained]
        if self._schedule.reduces:
            self._deliver(flats)
        else:
            for flat in flats:
                flat.gradient.leave(flat)

    def _deliver(self, flats: list[FlatParameter]) -> None:
        """A parameter without gradient on some ranks counts there as zero. The optimizer passes
        over it if it has none on any rank."""
        for flat in flats:
            if flat.gradient.pending or flat.gradient.full is not None:
                self._reduce(flat)
        for flat in flats:
            flat.gradient.wait(flat)
        self._schedule.unreduced = False
        reduced = [flat for flat in flats if flat.gradient.mean is not None]
        if not reduced:
            return
        numbers = ((flat, number) for flat in reduced for number in range(len(flat.parameters)))
        touched = [number in flat.gradient.touched for flat, number in numbers]
        flags = torch.tensor(touched, dtype=torch.uint8, device=reduced[0].device)
        for group in self._schedule.root.options.groups:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group)
        anywhere = iter(flags.bool().tolist())
        for flat in reduced:
            flat.gradient.deliver(flat, [next(anywhere) for _ in flat.parameters])


def in_backward() -> bool:
    """Whether autograd computes a backward pass, on this thread."""
    return torch._C._current_graph_task_id() != -1


def _will_be_given(flat: FlatParameter) -> bool:
    """Whether this backward pass has gradients for one of the parameters."""
    trained = [each.local for each in flat.parameters if each.local.requires_grad]
    nodes = (get_gradient_edge(local).node for local in trained)
    try:
        return any(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError as error:
        raise RuntimeError(
            "torch.autograd.grad does not give the gradients of fully sharded parameters: call "
            "backward(), and read the .grad of each"
        ) from error
