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
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

from minidist.fully_sharded.flat import FlatParameter
from minidist.fully_sharded.journey import Journey, Visit, in_backward
from minidist.fully_sharded.unit import Unit, hide, tensors_in


class Schedule:
    """What the units of one root share."""

    def __init__(self, units: list[Unit], prefetch: bool) -> None:
        self.units, self._prefetch = units, prefetch
        self.sync = True  # not within no_sync()
        self.running = False  # within a forward pass of the root
        self._journey = Journey()  # this pass
        self._known: list[Unit] = []  # the order of the last forward pass
        self._now: list[Unit] = []  # of this one
        self._last: Visit | None = None
        self._ahead: Unit | None = None  # gathered before its time
        self._reduces = self._awaited = False
        self._travels: FlatParameter | None = None
        self._visits: list[Visit] = []  # to which this backward pass has come
        self._back: dict[Journey, int] = {}  # how far it has come in each
        self._wanted = False  # it makes gradients of parameters
        self._pass: weakref.ref[Callable[[], None]] | None = None

    @property
    def flats(self) -> Iterator[FlatParameter]:
        """All there are."""
        return (flat for unit in self.units for flat in unit.flats)

    # ---- forward ---------------------------------------------------------------------------

    def begin(self) -> None:
        """The root's forward pass begins. What is there is from before a step: gather it again."""
        self.abandon()
        self.running, self._journey = True, Journey()
        if torch.is_grad_enabled():
            # Not less than before: the backward pass may be for several forward passes.
            self._reduces = self._awaited = self.sync or self._awaited

    def enter(self, unit: Unit) -> Visit:
        """Have the unit there, and the next one on its way."""
        again = in_backward()
        visit = Visit(unit, unit.before)
        if self._ahead is unit:
            self._ahead = None
        if not again:
            visit.entered = len(self._journey.events)
            if torch.is_grad_enabled():
                self._journey.events += [(visit, flat) for flat in unit.flats]
            for flat in unit.flats:
                flat.open.add(visit)
        unit.unshard(partial(self._arrived, None if again else self._journey, visit))
        if unit.flats and not again:
            self._now.append(unit)
            done = len(self._now)
            if self._now == self._known[:done] and done < len(self._known):
                self._fetch(self._known[done])
        return visit

    def leave(self, visit: Visit, inputs: Any, output: Any) -> None:
        """The unit has computed: free it, and be told when a backward pass comes to it."""
        unit, again = visit.unit, in_backward()
        found, trained = list(tensors_in(output)), torch.is_grad_enabled()
        made = unit.made(visit.since, found) if trained else []
        # A graph of which we see no end, or a view: somebody else will read the parameters.
        unseen = trained and not made and _has_graph(unit, inputs)
        if not again:  # else a checkpoint computes again: soon this will be needed
            for flat in unit.flats:
                flat.open.discard(visit)
            # A backward pass comes to a unit before it comes to those within it.
            visit.previous = unit.before = self._last
            if unit.flats and (made or unseen or not trained):
                self._last = visit
            if made or unseen:
                visit.left = len(self._journey.events)
                self._journey.events.append((visit, None))
            if unit.reshard_after_forward or not trained:
                unit.free(keep=unseen or unit.lends(found))
        journey = None if again else self._journey
        for tensor in made:
            tensor.register_hook(partial(self._come_to, journey, visit))

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
            for flat in unit.flats:
                flat.open.clear()
            unit.free()

    def _fetch(self, unit: Unit) -> None:
        if self._prefetch and not all(flat.there for flat in unit.flats):
            if self._ahead is not None:
                self._ahead.free()
            self._ahead = unit
            unit.start()

    # ---- backward --------------------------------------------------------------------------

    def _come_to(self, journey: Journey | None, visit: Visit, _: Any = None) -> None:
        """Before the backward pass of a unit."""
        if torch.is_grad_enabled():
            raise RuntimeError("gradients of gradients are not reduced: create_graph=True")
        self._begin_backward()
        self._go_back(journey, visit, None)

    def _arrived(
        self, journey: Journey | None, visit: Visit, flat: FlatParameter, gradients: Any
    ) -> None:
        """After it: the gradients of its parameters."""
        self._begin_backward()
        self._want()
        flat.gradient.add(flat, gradients)
        # In a pass within this one, of a checkpoint, more will come.
        if visit.task in (None, torch._C._current_graph_task_id()):
            self._go_back(journey, visit, flat)

    def _go_back(self, journey: Journey | None, visit: Visit, flat: FlatParameter | None) -> None:
        """To this event, by way of all that were later."""
        if journey is not None:  # what a checkpoint computes again is in none
            for later in self._latest_first():
                if later.number > journey.number:
                    self._go_to(later, 0)
            place = visit.left if flat is None else visit.place(flat)
            self._go_to(journey, place + 1)
            self._back[journey] = min(self._back[journey], place)
        self._event(journey, visit, flat)

    def _go_to(self, journey: Journey, place: int) -> None:
        reached = self._back.get(journey, len(journey.events))
        self._back[journey] = min(reached, place)
        for event in journey.events[place:reached][::-1]:
            self._event(journey, *event)

    def _latest_first(self) -> list[Journey]:
        return sorted(self._back, key=lambda journey: -journey.number)

    def _event(self, journey: Journey | None, visit: Visit, flat: FlatParameter | None) -> None:
        if flat is not None:
            self._close(visit, flat)
        else:
            self._open(journey, visit)

    def _open(self, journey: Journey | None, visit: Visit) -> None:
        if visit.task is not None and all(visit in flat.open for flat in visit.unit.flats):
            return
        visit.task = torch._C._current_graph_task_id()
        self._visits.append(visit)
        if self._ahead is visit.unit:
            self._ahead = None
        for flat in visit.unit.flats:
            flat.open.add(visit)
        with torch.enable_grad():  # a checkpoint within the unit computes again with these
            visit.unit.unshard(partial(self._arrived, journey, visit))
        if visit.previous is not None:
            self._fetch(visit.previous.unit)

    def _close(self, visit: Visit, flat: FlatParameter) -> None:
        flat.open.discard(visit)
        if not flat.open:
            hide(flat)
            if self._wanted and flat.trains:
                flat.gradient.kept = True
                self._reduce(flat)

    def _reduce(self, flat: FlatParameter) -> None:
        if self._reduces:
            if self._travels is not None:
                self._travels.gradient.arrive(self._travels)  # so that no more than one travels
            self._travels = flat
            flat.gradient.reduce(flat)

    def _begin_backward(self) -> None:
        if self._pass is not None:
            return

        def finish() -> None:
            self._finish()

        # If the pass fails, autograd drops `finish` instead of calling it.
        self._pass = weakref.ref(finish, lambda _: self._reset())
        Variable._execution_engine.queue_callback(finish)
        if any(_will_be_given(flat) for flat in self.flats):
            self._want()

    def _want(self) -> None:
        """The backward pass makes gradients of parameters; or it is torch.autograd.grad."""
        if self._wanted:
            return
        if self.running:
            raise RuntimeError(
                "backward() within the forward pass of a FullyShardedDataParallel: its parameters "
                "are still needed. torch.autograd.grad of other tensors works"
            )
        self._wanted = True
        for flat in self.flats:
            flat.gradient.resume(flat)

    def _finish(self) -> None:
        """Before `backward()` returns: gradients are complete, and only shards are left."""
        if self._wanted:
            for journey in self._latest_first():
                self._go_to(journey, 0)
            flats = [flat for flat in self.flats if flat.trained]
            if self._reduces:
                self._deliver(flats)
            else:
                for flat in flats:
                    flat.gradient.leave(flat)
        self._forget()

    def _deliver(self, flats: list[FlatParameter]) -> None:
        """A parameter without gradient on some ranks counts there as zero; the optimizer passes
        over it if it has none on any rank."""
        for flat in flats:
            if flat.gradient.kept or flat.gradient.whole is not None:
                self._reduce(flat)
        for flat in flats:
            flat.gradient.arrive(flat)
        self._awaited = False
        reduced = [flat for flat in flats if flat.gradient.total is not None]
        if not reduced:
            return
        kind = reduced[0].kind
        touched = [n in flat.gradient.touched for flat in reduced for n in range(len(flat.slots))]
        flags = torch.tensor(touched, dtype=torch.uint8, device=kind.device)
        for group in kind.groups:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group)
        told = iter(flags.bool().tolist())
        for flat in reduced:
            flat.gradient.deliver(flat, [next(told) for _ in flat.slots])

    def _forget(self) -> None:
        self._pass = self._ahead = self._travels = None
        for visit in self._visits:
            visit.task = None
            for flat in visit.unit.flats:
                flat.open.discard(visit)
        self._visits, self._back, self._wanted = [], {}, False
        for unit in self.units:
            unit.free()

    def _reset(self) -> None:
        """Forget a backward pass that has failed on its way."""
        self._forget()
        self._awaited = False
        for flat in self.flats:
            flat.gradient.reset()


def _has_graph(unit: Unit, inputs: Any) -> bool:
    """Whether autograd may have seen the unit compute."""
    return any(flat.trains for flat in unit.flats) or any(
        tensor.requires_grad for tensor in tensors_in(inputs)
    )


def _will_be_given(flat: FlatParameter) -> bool:
    """Whether this backward pass has gradients for one of the parameters."""
    pieces = [slot.piece.own for slot in flat.slots if slot.piece.own.requires_grad]
    nodes = (get_gradient_edge(piece).node for piece in pieces)
    try:
        return any(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError as error:
        raise RuntimeError(
            "torch.autograd.grad does not give the gradients of a FullyShardedDataParallel's "
            "parameters: call backward(), and read the .grad of each"
        ) from error
