"""When units are gathered and freed (lesson 9).

    forward:   gather 1 | compute 1 | compute 2 | compute 3
                          gather 2    gather 3
    backward:  gather 3 | compute 3 | compute 2 | compute 1
                          gather 2    gather 1
                                      reduce 3    reduce 2    reduce 1

At any time there are the unit that computes, and the one that comes next. In a forward pass that is
known from the one before it; a backward pass goes the way of the forward pass, back. After Zhao et
al., "PyTorch FSDP" (arXiv 2304.11277), sections 3.3 and 4.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook

from minidist.distributed_data_parallel.reducer import tensors
from minidist.fully_sharded.flat import FlatParameter
from minidist.fully_sharded.unit import Unit, hide


class Visit:
    """A forward pass of a unit, and the one that ended before it did: the next in the backward
    pass. `task` is the backward pass that has come to it."""

    def __init__(self, unit: Unit, previous: "Visit | None") -> None:
        self.unit, self.previous = unit, previous
        self.task: int | None = None


class Schedule:
    """What the units of one root share."""

    def __init__(self, units: list[Unit], prefetch: bool) -> None:
        self.units, self._prefetch = units, prefetch
        self.sync = True  # not within no_sync()
        self.running = False  # within a forward pass of the root
        self._known: list[Unit] = []  # the order of the last forward pass
        self._now: list[Unit] = []  # of this one
        self._last: Visit | None = None
        self._ahead: Unit | None = None  # gathered before its time
        self._reduces = self._awaited = False
        self._travels: FlatParameter | None = None
        self._visits: list[Visit] = []  # to which this backward pass has come
        self._pass: weakref.ref[Callable[[], None]] | None = None

    @property
    def flats(self) -> Iterator[FlatParameter]:
        """All there are."""
        return (flat for unit in self.units for flat in unit.flats)

    # ---- forward ---------------------------------------------------------------------------

    def begin(self) -> None:
        """The root's forward pass begins. What is still there is of old: gather it again."""
        self.abandon()
        self.running = True
        if torch.is_grad_enabled():
            # Not less than before: the backward pass may be for several forward passes.
            self._reduces = self._awaited = self.sync or self._awaited

    def enter(self, unit: Unit) -> Visit:
        """Have the unit there, and the next one on its way."""
        again = in_backward()
        visit = Visit(unit, unit.before)
        if self._ahead is unit:
            self._ahead = None
        unit.unshard(self._arrived_for(visit))
        if unit.flats and not again:
            self._now.append(unit)
            done = len(self._now)
            if self._now == self._known[:done] and done < len(self._known):
                self._fetch(self._known[done])
        return visit

    def leave(self, visit: Visit, inputs: Any, output: Any) -> None:
        """The unit has computed: free it, and be told when a backward pass comes to it."""
        if not in_backward():  # else a checkpoint computes again: soon this will be needed
            # A backward pass comes to a unit before it comes to those within it.
            visit.previous = visit.unit.before = self._last
            if visit.unit.flats:
                self._last = visit
            if visit.unit.reshard_after_forward or not torch.is_grad_enabled():
                visit.unit.free()
        if not torch.is_grad_enabled():
            return
        for tensor in tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda _: self._come_to(visit))
        # Autograd comes to what has made the inputs when it has done with all that was made since.
        given = [tensor for tensor in tensors(inputs) if tensor.grad_fn is not None]
        if visit.unit.flats and given:
            register_multi_grad_hook(given, lambda _: self._leave_behind(visit))

    def end(self) -> None:
        """The root's forward pass has ended."""
        if self._ahead is not None:
            self._ahead.free()
        self._known, self._now, self._last, self._ahead = self._now, [], None, None
        self.running = False

    def abandon(self) -> None:
        """No forward pass is going on, and nothing is there but for one."""
        self._now, self._last, self._ahead, self.running = [], None, None, False
        for unit in self.units:
            unit.free()

    def _fetch(self, unit: Unit) -> None:
        if self._prefetch and not all(flat.there for flat in unit.flats):
            if self._ahead is not None:
                self._ahead.free()
            self._ahead = unit
            unit.start()

    # ---- backward --------------------------------------------------------------------------

    def _come_to(self, visit: Visit) -> None:
        """Before the backward pass of a unit."""
        if torch.is_grad_enabled():
            raise RuntimeError("gradients of gradients are not reduced: create_graph=True")
        self._begin_backward()
        if visit.task is not None:
            return
        visit.task = torch._C._current_graph_task_id()
        self._visits.append(visit)
        if self._ahead is visit.unit:
            self._ahead = None
        for flat in visit.unit.flats:
            flat.open.add(visit)
        with torch.enable_grad():  # a checkpoint within the unit computes again with these
            visit.unit.unshard(self._arrived_for(visit))
        if visit.previous is not None:
            self._fetch(visit.previous.unit)

    def _arrived_for(self, visit: Visit) -> Callable[[FlatParameter, Any], None]:
        def arrived(flat: FlatParameter, gradients: Any) -> None:
            self._begin_backward()
            flat.add(gradients)
            # In a pass within this one, of a checkpoint, more will come.
            if visit.task in (None, torch._C._current_graph_task_id()):
                self._close(visit, flat)

        return arrived

    def _leave_behind(self, visit: Visit) -> None:
        """After the backward pass of a unit: its inputs have their gradients."""
        for flat in visit.unit.flats:
            if visit in flat.open:
                self._close(visit, flat)

    def _close(self, visit: Visit, flat: FlatParameter) -> None:
        flat.open.discard(visit)
        if not flat.open:
            hide(flat)
            self._reduce(flat)

    def _reduce(self, flat: FlatParameter) -> None:
        if self._reduces and flat.gradient is not None:
            if self._travels is not None:
                self._travels.arrive()  # so that no more than one travels
            self._travels = flat
            flat.reduce()

    def _begin_backward(self) -> None:
        if self._pass is not None:
            return

        def finish() -> None:
            self._finish()

        # If the pass fails, autograd drops `finish` instead of calling it.
        self._pass = weakref.ref(finish, lambda _: self._reset())
        Variable._execution_engine.queue_callback(finish)
        for flat in self.flats:
            flat.resume()

    def _finish(self) -> None:
        """Before `backward()` returns: gradients are complete, and only shards are left."""
        flats = [flat for flat in self.flats if flat.trained]
        if self._reduces:
            for flat in flats:
                self._reduce(flat)
            for flat in flats:
                flat.arrive()
            self._deliver(flats)
        else:
            for flat in flats:
                flat.leave()
        self._forget()

    def _deliver(self, flats: list[FlatParameter]) -> None:
        """A parameter without gradient on some ranks counts there as zero; the optimizer passes
        over it if it has none on any rank."""
        reduced = [flat for flat in flats if flat.total is not None]
        if not reduced:
            return  # it is torch.autograd.grad, which wants none of our gradients
        self._awaited = False
        kind = reduced[0].kind
        touched = [n in flat.touched for flat in reduced for n in range(len(flat.slots))]
        flags = torch.tensor(touched, dtype=torch.uint8, device=kind.device)
        for group in kind.groups:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group)
        told = iter(flags.bool().tolist())
        for flat in reduced:
            flat.deliver([next(told) for _ in flat.slots])

    def _forget(self) -> None:
        self._pass = self._ahead = self._travels = None
        for visit in self._visits:
            visit.task = None
        self._visits = []
        for flat in self.flats:
            flat.open.clear()
            hide(flat)

    def _reset(self) -> None:
        """Forget a backward pass that has failed on its way."""
        self._forget()
        self._awaited = False
        for flat in self.flats:
            flat.reset()


def in_backward() -> bool:
    """Whether autograd computes a backward pass, on this thread."""
    return torch._C._current_graph_task_id() != -1
