"""When units are gathered, freed and reduced.

    forward:   gather 1 | compute 1 | compute 2 | compute 3
                          gather 2    gather 3
    backward:  gather 3 | compute 3 | compute 2 | compute 1
                          gather 2    gather 1
                                      reduce 3    reduce 2    reduce 1

At any time few units are gathered: the one that computes, those around it, such as the root, and
the next one. The order is that of the forward pass before; the backward pass goes back the way of
its own forward pass.
Zhao et al., "PyTorch FSDP" (arXiv 2304.11277), sections 3.3 and 4. Lesson: fully_sharded
"""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.profiler import record_function
from torch.utils._pytree import tree_map

from minidist.backend.uncompiled import uncompiled
from minidist.common.replicas import broadcast_state
from minidist.common.tensors_in import tensors_in
from minidist.common.wrapper import Guard
from minidist.fully_sharded.param_group import Gradients, ParamGroup

_OF_TORCH = frozenset(nn.Module().__dict__)  # attributes that every module has


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

    Autograd goes back in exactly this order, node by node. A backward pass that comes to an event
    has done with all that was later. What it has not come to by then is not in this rank's graph.
    It may be in another rank's: so gather and reduce it all the same.
    """

    _numbers = itertools.count()

    def __init__(self) -> None:
        self.number = next(self._numbers)
        self.events: list[tuple[UnitPass, bool]] = []


class State:
    """What the units of one root share, and the forward pass. The outermost unit comes first."""

    def __init__(self, groups: list[ParamGroup]) -> None:
        self.groups, self.root = groups, groups[0]
        self.running = False  # within a forward pass of the root
        self.ahead: list[ParamGroup] = []  # gathered before their time
        self.trace = Trace()  # of this forward pass
        self.traces = weakref.WeakSet[Trace]()  # of all that a backward pass may go back along
        self._known: list[ParamGroup] = []  # the order of units in the last forward pass
        self._now: list[ParamGroup] = []  # in this one
        self._last: UnitPass | None = None
        self._stale_buffers = False
        self._backward: BackwardPass | None = None
        self._lost: Any = None  # a weak reference: autograd dropped a backward pass that failed
        for name, module in self.root.module.named_modules():
            if group := vars(module).get("fsdp_group"):
                group.prefix = f"{name}." if name else ""
        self.watch()

    def watch(self) -> None:
        """From now on the parameters must stay those that there are."""
        ignored = frozenset[nn.Parameter]().union(*(g.options.ignored for g in self.groups))
        self._guard = Guard(self.root.module, "fully sharded training", ignored, frozen_too=True)

    # ---- forward ---------------------------------------------------------------------------

    def run(self, group: ParamGroup, compute: Callable[..., Any], inputs: Any, kwargs: Any) -> Any:
        """The forward pass of a unit: gather its parameters, compute, and free them."""
        if group.summoned:
            return compute(*inputs, **kwargs)
        again = in_backward()  # a checkpoint computes again
        begins = group is self.root and not again
        if begins:
            self._begin()
        elif not (self.running or again):
            raise RuntimeError(
                "a unit of a fully sharded model was called outside of the forward pass of its "
                "root, the outermost one. Call that one"
            )
        this = None
        try:
            this = self.pre_forward(group, again)
            precision = group.options.precision
            if precision.param_dtype and group.casts_inputs:
                inputs, kwargs = cast((inputs, kwargs), precision.param_dtype)
            output = compute(*inputs, **kwargs)
            self.post_forward(this, again, (inputs, kwargs), output)
        except BaseException:
            if begins:
                self.abandon()
            elif this is not None and not again:  # the model may go on without it
                group.readers.discard(this)
                group.reshard()
            raise
        if begins:
            self._end()
        return cast(output, precision.output_dtype)

    @uncompiled
    def _begin(self) -> None:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError(
                "a fully sharded model cannot be called within torch.func's transforms, which do "
                "not go through its messages. torch.autograd.grad, and functional.jacobian, do"
            )
        self.abandon()
        self._guard.require_unchanged()
        if self._stale_buffers:  # a pass that trained has left other ones on each rank
            modules = (module for group in self.groups for module in group.modules)
            buffers = {id(b): b for m in modules for b in m._buffers.values() if b is not None}
            for replicas in self.root.options.groups[::-1]:
                broadcast_state(buffers.values(), replicas)
        self._stale_buffers = torch.is_grad_enabled() and self.root.syncs
        self.running, self.trace = True, Trace()
        self.traces.add(self.trace)

    @uncompiled
    def pre_forward(self, group: ParamGroup, again: bool) -> UnitPass:
        """Gather the unit, and begin to gather the next one."""
        this = UnitPass(group)
        if group in self.ahead:
            self.ahead.remove(group)
        if not again:
            this.entered = len(self.trace.events)
            if torch.is_grad_enabled():
                self.trace.events.append((this, True))
            group.readers.add(this)
        trace = None if again else self.trace
        with record_function(f"fsdp.pre_forward {group.name}"):
            this.node = group.wait_for_unshard(
                lambda grads: self.backward().post_backward(trace, this, grads)
            )
        if not again:
            self._now.append(group)
            done = len(self._now)
            if group.next_forward is not None:
                self.prefetch(group.next_forward)
            elif self._now == self._known[:done] and done < len(self._known):
                self.prefetch([self._known[done]])
        return this

    @uncompiled
    def post_forward(self, this: UnitPass, again: bool, inputs: Any, output: Any) -> None:
        """Free the unit, and have a backward pass call us when it comes to it."""
        group, trained = this.group, torch.is_grad_enabled()
        found = list(tensors_in(output))
        ends = _made(this, found) if trained else []
        # It has a graph of which we see no end: somebody else may read the parameters.
        unseen = trained and not ends and _has_graph(group, inputs)
        if not again:  # else its backward pass follows, and needs the parameters
            group.readers.discard(this)
            # A backward pass comes to a unit before it comes to those within it.
            this.previous = group.before = self._last
            if ends or unseen or not trained:
                self._last = this
            if ends or unseen:
                this.left = len(self.trace.events)
                self.trace.events.append((this, False))
            with record_function(f"fsdp.post_forward {group.name}"):
                reshards = group is not self.root if group.reshards is None else group.reshards
                if reshards or not trained:
                    group.reshard(keep=unseen or group.holds(found))
                elif not group.readers:
                    group.hide()
        trace = None if again else self.trace
        for tensor in ends:
            tensor.register_hook(lambda _: self.backward().pre_backward(trace, this))

    @uncompiled
    def _end(self) -> None:
        self.prefetch([])
        self._known, self._now, self._last = self._now, [], None
        self.running = False

    def abandon(self) -> None:
        """Reset: drop the forward pass, free all units but those that the user keeps."""
        self._now, self._last, self.ahead, self.running = [], None, [], False
        for group in self.groups:
            group.readers.clear()
            kept = group.unsharded and (group.pinned or not group.reshards_after_backward)
            if kept and group.version == group.gathered_version:
                group.hide()
                for flat in group.flats:
                    flat.wait()
            else:
                group.reshard()

    def prefetch(self, groups: list[ParamGroup]) -> None:
        """Begin to gather the next units while another one computes, and no others."""
        for group in self.ahead:
            if group not in groups:
                group.reshard()
        self.ahead = [group for group in groups if group in self.ahead or not group.unsharded]
        for group in self.ahead:
            with record_function(f"fsdp.unshard {group.name}"):
                group.unshard()

    # ---- backward --------------------------------------------------------------------------

    def backward(self) -> "BackwardPass":
        """The one that autograd computes."""
        if self._backward is None:
            backward = BackwardPass(self)
            backward.look_ahead()

            def finish() -> None:
                backward.root_post_backward()
                self._forget(backward)

            # If the pass fails, autograd drops `finish` instead of calling it.
            self._lost = weakref.ref(finish, lambda _: self._forget(backward, failed=True))
            Variable._execution_engine.queue_callback(finish)
            self._backward = backward
        return self._backward

    def _forget(self, backward: "BackwardPass", failed: bool = False) -> None:
        """It is over. Nothing stays gathered."""
        backward.close_all()
        self._lost = self._backward = None
        self.prefetch([])
        for group in self.groups:
            if failed:
                group.forget()
            if group.reshards_after_backward or failed:
                group.reshard()


class BackwardPass:
    """One backward pass of autograd over the units of a root, back along the trace."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._opened: list[UnitPass] = []  # to which it has come
        self._reached: dict[Trace, int] = {}  # how far it has come in each
        self._in_flight: ParamGroup | None = None  # its gradient is being reduced
        self._touched: dict[ParamGroup, list[bool]] = {}  # which parameters have a gradient
        self._trains = False  # it makes gradients of parameters

    def pre_backward(self, trace: Trace | None, this: UnitPass) -> None:
        """Autograd is about to go back through a unit."""
        if torch.is_grad_enabled():
            raise RuntimeError("gradients of gradients are not reduced: create_graph=True")
        self._go_back(trace, this, entered=False)

    def post_backward(self, trace: Trace | None, this: UnitPass, gradients: Gradients) -> None:
        """It has gone through the unit, and has these gradients."""
        self._begin_training()
        this.group.add(gradients)
        # In a pass within this one, of a checkpoint, more will come.
        if this.task in (None, torch._C._current_graph_task_id()):
            self._go_back(trace, this, entered=True)

    def look_ahead(self) -> None:
        """Find out whether it makes gradients of parameters. torch.autograd.grad makes none."""
        events = (event for trace in self._state.traces for event in trace.events)
        nodes = [node for this, entered in events if entered and (node := this.node())]
        if any(map(torch._C._will_engine_execute_node, nodes)):
            self._begin_training()

    def _begin_training(self) -> None:
        if self._state.running:
            raise RuntimeError(
                "backward() within the forward pass of a fully sharded model: its parameters "
                "are still needed. torch.autograd.grad of other tensors works"
            )
        self._trains = True

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
        group, state = this.group, self._state
        if this.task is not None and this in group.readers:
            return
        this.task = torch._C._current_graph_task_id()
        self._opened.append(this)
        if group in state.ahead:
            state.ahead.remove(group)
        group.readers.add(this)
        # A checkpoint within the unit computes again with these.
        with torch.enable_grad(), record_function(f"fsdp.pre_backward {group.name}"):
            group.wait_for_unshard(lambda grads: state.backward().post_backward(trace, this, grads))
        if group.next_backward is not None:
            state.prefetch(group.next_backward)
        elif this.previous is not None:
            state.prefetch([this.previous.group])

    def _close(self, this: UnitPass) -> None:
        """Free the parameters, and begin to reduce their gradient."""
        group = this.group
        group.readers.discard(this)
        if not group.readers:
            with record_function(f"fsdp.post_backward {group.name}"):
                if group.reshards_after_backward:
                    group.reshard()
                else:
                    group.hide()
                if self._trains and group.trains:
                    group.pending = True
                    if group.syncs:
                        self._reduce(group)

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
        if not self._trains:
            return
        for trace in self._latest_first():
            self._go_to(trace, 0)
        for group in self._state.groups:
            if group.syncs and (group.pending or group.has_partial):
                self._reduce(group)
            elif group.pending:
                group.leave()
        if not self._touched:
            return
        with record_function("fsdp.root_post_backward"):
            self._state.prefetch([])  # a hook of a parameter may be an optimizer's step
            for group in self._touched:
                group.wait_for_reduce()
            flags = [flag for touched in self._touched.values() for flag in touched]
            options = self._state.root.options
            together = torch.tensor(flags, dtype=torch.uint8, device=options.mesh.device_type)
            for replicas in options.groups:
                dist.all_reduce(together, dist.ReduceOp.MAX, replicas)
            anywhere = iter(together.bool().tolist())
            for group in self._touched:
                group.deliver(anywhere)


def in_backward() -> bool:
    """Whether autograd computes a backward pass, on this thread."""
    return torch._C._current_graph_task_id() != -1


def cast(values: Any, dtype: torch.dtype | None) -> Any:
    """Floating tensors, nested as they are, in this dtype; None changes nothing."""
    if dtype is None:
        return values

    def to(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if floating else value

    return tree_map(to, values)


def _made(this: UnitPass, output: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of the output, and of the attributes of the unit's modules, in which one may leave a loss:
    what this forward pass has put into its graph. There autograd will come into it."""
    attributes = [
        value
        for module in this.group.modules
        for name, value in module.__dict__.items()
        if name not in _OF_TORCH and name not in module._parameters
        if name not in ("_flat_weights", "fsdp_group", "fsdp_state")
    ]
    found = [*output, *tensors_in(attributes, depth=0)]
    return [t for t in found if t.grad_fn is not None and t.grad_fn._sequence_nr() >= this.since]


def _has_graph(group: ParamGroup, inputs: Any) -> bool:
    """Whether autograd may have seen the unit compute."""
    return group.trains or any(tensor.requires_grad for tensor in tensors_in(inputs))
