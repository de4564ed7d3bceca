"""When units are gathered and freed: the forward pass.

    forward:   gather 1 | compute 1 | compute 2 | compute 3
                          gather 2    gather 3
    backward:  gather 3 | compute 3 | compute 2 | compute 1
                          gather 2    gather 1
                                      reduce 3    reduce 2    reduce 1

At any time at most two units are gathered: the one that computes, and the next one. The order is
that of the forward pass before; the backward pass goes back the way of its own forward pass.
Zhao et al., "PyTorch FSDP" (arXiv 2304.11277), sections 3.3 and 4. Lesson: fully_sharded
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import Variable
from torch.utils._pytree import tree_map

from minidist.common.guard import Guard
from minidist.common.replicas import broadcast_state
from minidist.common.tensors_in import tensors_in
from minidist.fully_sharded.flat.backward_pass import BackwardPass, Trace, UnitPass, in_backward
from minidist.fully_sharded.flat.flat_gradient import FlatGradient
from minidist.fully_sharded.flat.flat_parameter import FlatParameter
from minidist.fully_sharded.flat.graph_ends import gives_parameters, has_graph, made
from minidist.fully_sharded.flat.units import Unit


class Schedule:
    """What the units of one root share."""

    def __init__(self, units: list[Unit], prefetches: bool) -> None:
        self.units, self.root, self._prefetches = units, units[0], prefetches
        self._guard = Guard(
            self.root.module, "fully sharded training", self.root.options.ignored_parameters
        )
        self.sync = True  # not within no_sync()
        self.running = False  # within a forward pass of the root
        self.reduces = True  # the backward passes that follow reduce their gradients
        self.unreduced = False  # a forward pass wanted that, and no backward pass has reduced since
        self.ahead: Unit | None = None  # gathered before its time
        self._trace = Trace()  # of this forward pass
        self._known: list[Unit] = []  # the order of units in the last forward pass
        self._now: list[Unit] = []  # in this one
        self._last: UnitPass | None = None
        self._stale_buffers = False
        self._backward: BackwardPass | None = None
        self._lost: Any = None  # a weak reference: autograd dropped a backward pass that failed

    @property
    def flats(self) -> Iterator[FlatParameter]:
        """All there are."""
        return (flat for unit in self.units for flat in unit.flats)

    # ---- forward ---------------------------------------------------------------------------

    def run(self, unit: Unit, compute: Callable[..., Any], inputs: Any, kwargs: Any) -> Any:
        """The forward pass of a unit: gather its parameters, compute, and free them."""
        if unit.summoned:
            return compute(*inputs, **kwargs)
        again = in_backward()  # a checkpoint computes again
        begins = unit is self.root and not again
        if begins:
            self._begin()
        elif not (self.running or again):
            raise RuntimeError(
                "a unit of a fully sharded model was called outside of the forward pass of its "
                "root, the outermost one. Call that one"
            )
        try:
            this = self._enter(unit, again)
            precision = unit.options.precision
            root_too = begins and precision.cast_root_forward_inputs
            if precision.param_dtype and (precision.cast_forward_inputs or root_too):
                inputs, kwargs = cast((inputs, kwargs), precision.param_dtype)
            output = compute(*inputs, **kwargs)
            self._leave(this, again, inputs, kwargs, output)
        except BaseException:
            if begins:
                self.abandon()
            raise
        if begins:
            self._end()
        return cast(output, unit.options.output_dtype)

    def _begin(self) -> None:
        """What is gathered is from before the optimizer's step. Gather it again."""
        if torch.is_grad_enabled():
            self._guard.require_unchanged()
        for flat in self.flats:
            flat.require_in_place()
        if self._stale_buffers:  # a pass that trained has left other ones on each rank
            for group in self.root.options.groups[::-1]:
                broadcast_state(self.root.module.buffers(), group)
        self._stale_buffers = torch.is_grad_enabled() and self.sync
        self.abandon()
        self.running, self._trace = True, Trace()
        if torch.is_grad_enabled():
            # Not less than before: the backward pass may be for several forward passes.
            self.reduces = self.unreduced = self.sync or self.unreduced

    def _enter(self, unit: Unit, again: bool) -> UnitPass:
        """Gather the unit, and begin to gather the next one."""
        this = UnitPass(unit, unit.before)
        if self.ahead is unit:
            self.ahead = None
        if not again:
            this.entered = len(self._trace.events)
            if torch.is_grad_enabled():
                self._trace.events += [(this, flat) for flat in unit.flats]
            for flat in unit.flats:
                flat.readers.add(this)
        trace = None if again else self._trace
        unit.show(lambda flat, gradients: self.backward().add(trace, this, flat, gradients))
        if unit.flats and not again:
            self._now.append(unit)
            done = len(self._now)
            if self._now == self._known[:done] and done < len(self._known):
                self.prefetch(self._known[done])
        return this

    def _leave(self, this: UnitPass, again: bool, inputs: Any, kwargs: Any, output: Any) -> None:
        """Free the unit, and have a backward pass call us when it comes to it."""
        unit, trained = this.unit, torch.is_grad_enabled()
        found = list(tensors_in(output))
        ends = made(unit, this.since, found) if trained else []
        # It has a graph of which we see no end: somebody else may read the parameters.
        unseen = trained and not ends and has_graph(unit, (inputs, kwargs))
        if not again:  # else its backward pass follows, and needs the parameters
            for flat in unit.flats:
                flat.readers.discard(this)
                if unseen:
                    flat.unseen.add(this)
            this.unseen = unseen
            # A backward pass comes to a unit before it comes to those within it.
            this.previous = unit.before = self._last
            if unit.flats and (ends or unseen or not trained):
                self._last = this
            if ends or unseen:
                this.left = len(self._trace.events)
                self._trace.events.append((this, None))
            if unit.reshards or not trained:
                unit.free(keep=gives_parameters(unit, found))
        trace = None if again else self._trace
        for tensor in ends:
            tensor.register_hook(lambda _: self.backward().come_to(trace, this))

    def _end(self) -> None:
        if self.ahead is not None:
            self.ahead.free()
        self._known, self._now, self._last, self.ahead = self._now, [], None, None
        self.running = False

    def abandon(self) -> None:
        """No forward pass is going on, and no unit is gathered."""
        self._now, self._last, self.ahead, self.running = [], None, None, False
        for flat in self.flats:
            flat.readers.clear()
        for unit in self.units:
            unit.free()

    def prefetch(self, unit: Unit) -> None:
        """Begin to gather a unit while another one computes."""
        if self._prefetches and not all(flat.gathered for flat in unit.flats):
            if self.ahead is not None:
                self.ahead.free()
            self.ahead = unit
            unit.start()

    # ---- backward --------------------------------------------------------------------------

    def backward(self) -> BackwardPass:
        """The one that autograd computes."""
        if self._backward is None:
            self._backward = backward = BackwardPass(self)

            def finish() -> None:
                backward.finish()
                self._forget(backward)

            # If the pass fails, autograd drops `finish` instead of calling it.
            self._lost = weakref.ref(finish, lambda _: self._forget(backward, failed=True))
            Variable._execution_engine.queue_callback(finish)
            backward.look_ahead()
        return self._backward

    def _forget(self, backward: BackwardPass, failed: bool = False) -> None:
        """It is over. Nothing stays gathered."""
        backward.close_all()
        self._lost = self._backward = self.ahead = None
        for unit in self.units:
            unit.free()
        if failed:
            self.unreduced = False
            for flat in self.flats:
                flat.gradient = FlatGradient()


def cast(values: Any, dtype: torch.dtype | None) -> Any:
    """Floating tensors, nested as they are, in this dtype; None changes nothing."""
    if dtype is None:
        return values

    def to(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if floating else value

    return tree_map(to, values)
