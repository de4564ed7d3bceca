"""The way back: a backward pass gathers units again, frees them, and reduces their gradients.

    gather 3 | compute 3 | compute 2 | compute 1
               gather 2    gather 1
                           reduce 3    reduce 2    reduce 1

It goes back the way of its own forward pass, of which each rank keeps the same trace.
Zhao et al., "PyTorch FSDP" (arXiv 2304.11277), sections 3.3 and 4. Lesson: fully_sharded
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from minidist.fully_sharded.param_group import Gradients, ParamGroup


class UnitPass:
    """A forward pass of a unit, and the one that ended before it, which is next in the backward
    pass. `task`: the backward pass that has come to it."""

    def __init__(self, group: ParamGroup) -> None:
        self.group = group
        self.previous: UnitPass | None = group.before
        self.since = torch.autograd._get_sequence_nr()  # the first node of its graph
        self.node: Any = lambda: None  # of its full parameters, if autograd still has it
        self.task: int | None = None
        self.entered = self.left = 0  # places in the trace


class Trace:
    """What happened in a forward pass of the root, in this order, the same on all ranks: a unit was
    entered (pass, True), or left (pass, False).

    Autograd goes back through it node by node. When a backward pass reaches an event, all later
    ones are done, or are not in this rank's graph. They may be in another rank's: so gather and
    reduce them all the same.
    """

    _numbers = itertools.count()

    def __init__(self) -> None:
        self.number = next(self._numbers)
        self.events: list[tuple[UnitPass, bool]] = []


class Ahead:
    """The units that are gathered before their time, while another one computes."""

    def __init__(self) -> None:
        self._groups: list[ParamGroup] = []

    def prefetch(self, groups: list[ParamGroup]) -> None:
        """Begin to gather these, and free all others that nobody has used."""
        for group in self._groups:
            if group not in groups:
                group.reshard()
        self._groups = [group for group in groups if group in self._groups or not group.unsharded]
        for group in self._groups:
            with record_function(f"fsdp.unshard {group.name}"):
                group.unshard()

    def use(self, group: ParamGroup) -> None:
        """Its time has come."""
        if group in self._groups:
            self._groups.remove(group)

    def forget(self) -> None:
        """Leave them as they are."""
        self._groups = []


class BackwardPass:
    """One backward pass of autograd over the units of a root, back along the trace."""

    def __init__(
        self,
        groups: list[ParamGroup],
        traces: Iterable[Trace],
        ahead: Ahead,
        on_gradients: Callable[[Trace | None, UnitPass], Callable[[Gradients], None]],
    ) -> None:
        """`on_gradients` says what autograd calls when it has gone through a unit."""
        self._groups, self._ahead, self._on_gradients = groups, ahead, on_gradients
        self._opened: list[UnitPass] = []  # to which it has come
        self._reached: dict[Trace, int] = {}  # how far it has come in each
        self._in_flight: ParamGroup | None = None  # its gradient is being reduced
        self._touched: dict[ParamGroup, list[bool]] = {}  # which parameters have a gradient
        # Whether it makes gradients of parameters. torch.autograd.grad makes none.
        nodes = [
            node for t in traces for this, entered in t.events if entered and (node := this.node())
        ]
        self.trains = any(map(torch._C._will_engine_execute_node, nodes))

    def pre_backward(self, trace: Trace | None, this: UnitPass) -> None:
        """Autograd is about to go back through a unit."""
        if torch.is_grad_enabled():
            raise RuntimeError("gradients of gradients are not reduced: create_graph=True")
        self._go_back(trace, this, entered=False)

    def post_backward(self, trace: Trace | None, this: UnitPass, gradients: Gradients) -> None:
        """It has gone through the unit, and has these gradients."""
        self.trains = True
        this.group.add(gradients)
        # In a pass within this one, of a checkpoint, more will come.
        if this.task in (None, torch._C._current_graph_task_id()):
            self._go_back(trace, this, entered=True)

    # ---- along the trace -------------------------------------------------------------------

    def _go_back(self, trace: Trace | None, this: UnitPass, entered: bool) -> None:
        """To this event, through all that were later."""
        if trace is not None:  # what a checkpoint computes again is in none
            for later in self._latest_first():
                if later.number > trace.number:
                    self._go_to(later, 0)
            place = this.entered if entered else this.left
            self._go_to(trace, place + 1)
            self._reached[trace] = min(self._reached[trace], place)
        self._close(this) if entered else self._open(trace, this)

    def _go_to(self, trace: Trace, place: int) -> None:
        reached = self._reached.get(trace, len(trace.events))
        self._reached[trace] = min(reached, place)
        for this, entered in trace.events[place:reached][::-1]:
            self._close(this) if entered else self._open(trace, this)

    def _latest_first(self) -> list[Trace]:
        return sorted(self._reached, key=lambda trace: -trace.number)

    def _open(self, trace: Trace | None, this: UnitPass) -> None:
        """Gather the unit, and begin to gather the next one."""
        group = this.group
        if this.task is not None and this in group.readers:
            return
        this.task = torch._C._current_graph_task_id()
        self._opened.append(this)
        self._ahead.use(group)
        group.readers.add(this)
        # A checkpoint within the unit computes again with these.
        with torch.enable_grad(), record_function(f"fsdp.pre_backward {group.name}"):
            group.wait_for_unshard(self._on_gradients(trace, this))
        if group.next_backward is not None:
            self._ahead.prefetch(group.next_backward)
        elif this.previous is not None:
            self._ahead.prefetch([this.previous.group])

    def _close(self, this: UnitPass) -> None:
        """Free the parameters, and begin to reduce their gradient, or leave it in `.grad`."""
        group = this.group
        group.readers.discard(this)
        if not group.readers:
            with record_function(f"fsdp.post_backward {group.name}"):
                if group.reshards_after_backward:
                    group.reshard()
                else:
                    group.to_sharded()
                if self.trains and group.trains:
                    self._reduce(group) if group.syncs else group.leave()

    def close_all(self) -> None:
        """Nothing is read any more."""
        for this in self._opened:
            this.task = None
            this.group.readers.discard(this)

    # ---- gradients -------------------------------------------------------------------------

    def _reduce(self, group: ParamGroup) -> None:
        if self._in_flight is not None:
            self._in_flight.wait_for_reduce()  # no more than one is in flight
        self._in_flight = group
        before, now = self._touched.get(group), group.has_gradients()
        self._touched[group] = [a or b for a, b in zip(before or now, now, strict=True)]
        group.reduce()

    def root_post_backward(self) -> None:
        """Before `backward()` returns: the gradients are complete. A parameter without gradient on
        some ranks counts there as zero. The optimizer passes over it if it has none on any."""
        if not self.trains:
            return
        for trace in self._latest_first():
            self._go_to(trace, 0)
        for group in self._groups:
            if group.syncs and group.has_partial:
                self._reduce(group)
        if not self._touched:
            return
        with record_function("fsdp.root_post_backward"):
            self._ahead.prefetch([])  # a hook of a parameter may be an optimizer's step
            for group in self._touched:
                group.wait_for_reduce()
            flags = [flag for touched in self._touched.values() for flag in touched]
            options = self._groups[0].options
            together = torch.tensor(flags, dtype=torch.uint8, device=options.mesh.device_type)
            for replicas in options.groups:
                dist.all_reduce(together, dist.ReduceOp.MAX, replicas)
            anywhere = iter(together.bool().tolist())
            for group in self._touched:
                group.deliver(anywhere)
