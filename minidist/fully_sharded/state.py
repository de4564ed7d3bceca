"""When the units of a root are gathered and freed.

    forward     gather 1 | compute 1 | compute 2 | compute 3
                           gather 2    gather 3

    backward    gather 3 | compute 3 | compute 2 | compute 1
                           gather 2    gather 1
                                       reduce 3    reduce 2    reduce 1

At any time few units are gathered: the one that computes, those around it, such as the root, and
the next one. The order is that of the forward pass before; every rank goes through the same units.
Zhao et al., "PyTorch FSDP" (arXiv 2304.11277), sections 3.3 and 4. Lesson: hiding_gathers
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.profiler import record_function
from torch.utils._pytree import tree_map_only

from minidist.common.agree import on_any_rank
from minidist.common.replicas import broadcast_state
from minidist.common.tensors_in import tensors_of
from minidist.common.uncompiled import uncompiled
from minidist.common.wrapper import in_backward, kinds_of, require_as_found
from minidist.fully_sharded.param_group import Gradients, ParamGroup, deliver


class UnitPass:
    """A forward pass of a unit. `previous` ended before it, and comes after it in the backward
    pass."""

    def __init__(self, group: ParamGroup) -> None:
        self.group = group
        self.previous: UnitPass | None = group.before


class State:
    """What the units of one root share. The outermost unit comes first."""

    def __init__(self, groups: list[ParamGroup]) -> None:
        self.groups, self.root = groups, groups[0]
        self.running = False  # within a forward pass of the root
        self._ahead: ParamGroup | None = None  # it is gathered before its time
        self._known: list[ParamGroup] = []  # the order of units in the last forward pass
        self._now: list[ParamGroup] = []  # in this one
        self._last: UnitPass | None = None
        self._stale_buffers = False
        self._reset_backward()
        for name, module in self.root.module.named_modules():
            if group := vars(module).get("fsdp_group"):
                group.prefix = f"{name}." if name else ""
        self.watch()

    def watch(self) -> None:
        """From now on the parameters must stay those that there are."""
        ignored = frozenset[nn.Parameter]().union(*(g.options.ignored for g in self.groups))
        self._left_out, self._found = ignored, kinds_of(self.root.module.named_parameters())

    def _prefetch(self, group: ParamGroup | None) -> None:
        """Begin to gather this unit, and free the one that was gathered and that nobody used."""
        if self._ahead is group:
            return
        if self._ahead is not None:
            self._ahead.reshard()
        self._ahead = None if group is None or group.unsharded else group
        if group is not None:
            with record_function(f"fsdp.unshard {group.name}"):
                group.unshard()

    def _use(self, group: ParamGroup) -> None:
        """Its time has come."""
        if self._ahead is group:
            self._ahead = None

    # ---- forward ---------------------------------------------------------------------------

    def run(self, group: ParamGroup, compute: Callable[..., Any], inputs: Any, kwargs: Any) -> Any:
        """The forward pass of a unit: gather its parameters, compute, and free them."""
        again = in_backward()  # a checkpoint computes again
        begins = group is self.root and not again
        if begins:
            self._begin()
        elif not (self.running or again):
            raise RuntimeError(
                "a unit of a fully sharded model was called outside of the forward pass of its "
                "root, the outermost one. Call that one"
            )
        precision = group.options.precision
        try:
            this = self._pre_forward(group, again)
            if precision.param_dtype and precision.cast_forward_inputs:
                inputs, kwargs = cast((inputs, kwargs), precision.param_dtype)
            output = compute(*inputs, **kwargs)
            self._post_forward(this, again, output)
        except BaseException:
            if begins:
                self._abandon()
            raise
        if begins:
            self._end()
        return cast(output, precision.output_dtype)

    @uncompiled
    def _begin(self) -> None:
        self._abandon()
        require_as_found(self.root.module, self._found, self._left_out)
        if self._stale_buffers:  # a pass that trained has left other ones on each rank
            modules = (module for group in self.groups for module in group.modules)
            buffers = {id(b): b for m in modules for b in m._buffers.values() if b is not None}
            for replicas in self.root.options.groups[::-1] if buffers else ():
                broadcast_state(buffers.values(), replicas)
        self._stale_buffers = torch.is_grad_enabled() and self.root.syncs
        self.running = True

    @uncompiled
    def _pre_forward(self, group: ParamGroup, again: bool) -> UnitPass:
        """Gather the unit, and begin to gather the next one."""
        this = UnitPass(group)
        self._use(group)
        if not again:
            group.readers.add(this)
        with record_function(f"fsdp.pre_forward {group.name}"):
            group.wait_for_unshard(self._on_gradients(this))
        if not again:
            self._now.append(group)
            done = len(self._now)
            if group.prefetches and self._now == self._known[:done] and done < len(self._known):
                self._prefetch(self._known[done])
        return this

    @uncompiled
    def _post_forward(self, this: UnitPass, again: bool, output: Any) -> None:
        """Free the unit, and have a backward pass call us when it comes to it."""
        group, trains = this.group, torch.is_grad_enabled()
        ends = [tensor for tensor in tensors_of(output) if tensor.grad_fn is not None]
        if not again:  # else its backward pass follows, and needs the parameters
            group.readers.discard(this)
            # A backward pass comes to a unit before it comes to those within it.
            this.previous = group.before = self._last
            if ends or not trains:
                self._last = this
            with record_function(f"fsdp.post_forward {group.name}"):
                reshards = group.options.reshards
                if not trains or (group is not self.root if reshards is None else reshards):
                    group.reshard()
                elif not group.readers:
                    group.to_sharded()
        for tensor in ends:
            tensor.register_hook(lambda _: self._pre_backward(this))

    @uncompiled
    def _end(self) -> None:
        self._prefetch(None)
        self._known, self._now, self._last = self._now, [], None
        self.running = False

    def _abandon(self) -> None:
        """Free all units. Forget a forward pass, or a backward pass, that has failed."""
        self._now, self._last, self.running = [], None, False
        if self._goes_back:
            for group in self.groups:
                group.forget()
        self._reset_backward()
        self._ahead = None
        for group in self.groups:
            group.readers.clear()
            group.reshard()

    # ---- backward --------------------------------------------------------------------------

    def _reset_backward(self) -> None:
        self._goes_back = self._trains = False  # _trains: it has made gradients of parameters
        self._opened: list[UnitPass] = []  # to which it has come
        self._in_flight: ParamGroup | None = None  # its gradient is being reduced
        self._reduced: dict[ParamGroup, None] = {}
        self._unreduced = set[ParamGroup]()  # they have new gradients

    def _start_backward(self) -> None:
        if not self._goes_back:
            self._goes_back = True
            Variable._execution_engine.queue_callback(self._root_post_backward)

    def _pre_backward(self, this: UnitPass) -> None:
        """Autograd is about to go back through a unit: gather it, and begin to gather the next."""
        if torch.is_grad_enabled():
            raise RuntimeError("gradients of gradients are not reduced: create_graph=True")
        self._start_backward()
        group = this.group
        if this in group.readers:
            return
        self._opened.append(this)
        self._use(group)
        group.readers.add(this)
        # A checkpoint within the unit computes again with these.
        with torch.enable_grad(), record_function(f"fsdp.pre_backward {group.name}"):
            group.wait_for_unshard(self._on_gradients(this))
        previous = this.previous
        if group.prefetches and previous is not None and previous not in self._opened:
            self._prefetch(previous.group)

    def _on_gradients(self, this: UnitPass) -> Callable[[Gradients], None]:
        """What autograd calls when it has gone back through this pass of a unit."""

        def post_backward(gradients: Gradients) -> None:
            """Free the unit, and begin to reduce its gradients."""
            self._start_backward()
            self._trains = True
            this.group.add(gradients)
            self._unreduced.add(this.group)
            self._close(this)

        return post_backward

    def _close(self, this: UnitPass) -> None:
        """Free the parameters, and begin to reduce their gradient."""
        group = this.group
        group.readers.discard(this)
        if group.readers:
            return
        with record_function(f"fsdp.post_backward {group.name}"):
            group.reshard()
            if group in self._unreduced:
                self._reduce(group) if group.syncs else group.leave()
                self._unreduced.discard(group)

    def _reduce(self, group: ParamGroup) -> None:
        if self._in_flight is not None:
            self._in_flight.wait_for_reduce()  # no more than one is in flight
        self._in_flight = group
        self._reduced[group] = None
        group.reduce()

    def _root_post_backward(self) -> None:
        """Before `backward()` returns: the gradients are complete. A parameter without gradient on
        some ranks counts there as zero. The optimizer passes over it if it has none on any."""
        for this in self._opened:
            self._close(this)  # no gradient came of it
        if self._trains:
            for group in self.groups:
                if group.syncs and group.trained and (group in self._unreduced or group.has_left):
                    self._reduce(group)
        with record_function("fsdp.root_post_backward"):
            self._prefetch(None)  # a hook of a parameter may be an optimizer's step
            for group in self._reduced:
                group.wait_for_reduce()
            every = [each for group in self._reduced for each in group.trained]
            groups = self.root.options.groups
            anywhere = on_any_rank([each.touched for each in every], *groups) if every else []
            self._reset_backward()
            for group in self.groups:
                group.reshard()
            for each, here in zip(every, anywhere, strict=True):
                deliver(each, here)


def cast(values: Any, dtype: torch.dtype | None) -> Any:
    """Floating tensors, nested as they are, in this dtype; None changes nothing."""

    def to(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    return values if dtype is None else tree_map_only(torch.Tensor, to, values)
