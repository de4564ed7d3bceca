"""When the units of a root are gathered and freed.

    forward     gather 1 | compute 1 | compute 2 | compute 3
                           gather 2    gather 3

    backward    gather 3 | compute 3 | compute 2 | compute 1
                           gather 2    gather 1
                                       reduce 3    reduce 2    reduce 1

At any time few units are gathered: the one that computes, those around it, such as the root, and
the next one. The order is that of the forward pass before; every rank goes through the same units.
Zhao et al., "PyTorch FSDP" (arXiv 2304.11277), sections 3.3 and 4. Lesson: fully_sharded
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves, tree_map

from minidist.common.replicas import broadcast_state
from minidist.common.uncompiled import uncompiled
from minidist.common.wrapper import in_backward, kinds_of, require_as_found
from minidist.fully_sharded.param_group import Gradients, ParamGroup


class UnitPass:
    """A forward pass of a unit. `previous` ended before it, and comes after it in the backward
    pass."""

    def __init__(self, group: ParamGroup) -> None:
        self.group = group
        self.previous: UnitPass | None = group.before
        self.since = torch.autograd._get_sequence_nr()  # the first node of its graph


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
    """One backward pass of autograd over the units of a root."""

    def __init__(
        self,
        groups: list[ParamGroup],
        ahead: Ahead,
        on_gradients: Callable[[UnitPass], Callable[[Gradients], None]],
    ) -> None:
        """`on_gradients` says what autograd calls when it has gone through a unit."""
        self._groups, self._ahead, self._on_gradients = groups, ahead, on_gradients
        self._opened: list[UnitPass] = []  # to which it has come
        self._in_flight: ParamGroup | None = None  # its gradient is being reduced
        self._reduced: dict[ParamGroup, list[bool]] = {}  # which parameters have a gradient
        self._unreduced = set[ParamGroup]()  # they have new gradients
        self.trains = False  # it has made gradients of parameters

    def pre_backward(self, this: UnitPass) -> None:
        """Autograd is about to go back through a unit: gather it, and begin to gather the next."""
        if torch.is_grad_enabled():
            raise RuntimeError("gradients of gradients are not reduced: create_graph=True")
        group = this.group
        if this in group.readers:
            return
        self._opened.append(this)
        self._ahead.use(group)
        group.readers.add(this)
        # A checkpoint within the unit computes again with these.
        with torch.enable_grad(), record_function(f"fsdp.pre_backward {group.name}"):
            group.wait_for_unshard(self._on_gradients(this))
        if group.next_backward is not None:
            self._ahead.prefetch(group.next_backward)
        elif this.previous is not None and this.previous not in self._opened:
            self._ahead.prefetch([this.previous.group])

    def post_backward(self, this: UnitPass, gradients: Gradients) -> None:
        """It has gone through the unit, and has these gradients: free it, and begin to reduce."""
        self.trains = True
        this.group.add(gradients)
        self._unreduced.add(this.group)
        self._close(this)

    def _close(self, this: UnitPass) -> None:
        """Free the parameters, and begin to reduce their gradient."""
        group = this.group
        group.readers.discard(this)
        if group.readers:
            return
        with record_function(f"fsdp.post_backward {group.name}"):
            group.reshard() if group.reshards_after_backward else group.to_sharded()
            if group in self._unreduced:
                self._reduce(group) if group.syncs else group.leave()
                self._unreduced.discard(group)

    def _reduce(self, group: ParamGroup) -> None:
        if self._in_flight is not None:
            self._in_flight.wait_for_reduce()  # no more than one is in flight
        self._in_flight = group
        before, now = self._reduced.get(group), group.has_gradients()
        self._reduced[group] = [a or b for a, b in zip(before or now, now, strict=True)]
        group.reduce()

    def close_all(self) -> None:
        """Nothing is read any more."""
        for this in self._opened:
            this.group.readers.discard(this)

    def root_post_backward(self) -> None:
        """Before `backward()` returns: the gradients are complete. A parameter without gradient on
        some ranks counts there as zero. The optimizer passes over it if it has none on any."""
        if not self.trains:
            return
        for this in self._opened:
            self._close(this)  # no gradient came of it
        for group in self._groups:
            if group.syncs and group.trained and (group in self._unreduced or group.has_left):
                self._reduce(group)
        with record_function("fsdp.root_post_backward"):
            self._ahead.prefetch([])  # a hook of a parameter may be an optimizer's step
            for group in self._reduced:
                group.wait_for_reduce()
            if not self._reduced:
                return
            flags = [flag for touched in self._reduced.values() for flag in touched]
            options = self._groups[0].options
            together = torch.tensor(flags, dtype=torch.uint8, device=options.mesh.device_type)
            for replicas in options.groups:
                dist.all_reduce(together, dist.ReduceOp.MAX, replicas)
            anywhere = iter(together.bool().tolist())
            for group in self._reduced:
                group.deliver(anywhere)


class State:
    """What the units of one root share, and the forward pass. The outermost unit comes first."""

    def __init__(self, groups: list[ParamGroup]) -> None:
        self.groups, self.root = groups, groups[0]
        self.running = False  # within a forward pass of the root
        self._ahead = Ahead()
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
        self._left_out, self._found = ignored, kinds_of(self.root.module.named_parameters())

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
        this = None
        try:
            this = self.pre_forward(group, again)
            precision = group.options.precision
            if precision.param_dtype and group.casts_inputs:
                inputs, kwargs = cast((inputs, kwargs), precision.param_dtype)
            output = compute(*inputs, **kwargs)
            self.post_forward(this, again, output)
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
        self.abandon()
        require_as_found(self.root.module, self._found, self._left_out)
        if self._stale_buffers:  # a pass that trained has left other ones on each rank
            modules = (module for group in self.groups for module in group.modules)
            buffers = {id(b): b for m in modules for b in m._buffers.values() if b is not None}
            for replicas in self.root.options.groups[::-1] if buffers else ():
                broadcast_state(buffers.values(), replicas)
        self._stale_buffers = torch.is_grad_enabled() and self.root.syncs
        self.running = True

    @uncompiled
    def pre_forward(self, group: ParamGroup, again: bool) -> UnitPass:
        """Gather the unit, and begin to gather the next one."""
        this = UnitPass(group)
        self._ahead.use(group)
        if not again:
            group.readers.add(this)
        with record_function(f"fsdp.pre_forward {group.name}"):
            group.wait_for_unshard(self._on_gradients(this))
        if not again:
            self._now.append(group)
            done = len(self._now)
            if group.next_forward is not None:
                self._ahead.prefetch(group.next_forward)
            elif self._now == self._known[:done] and done < len(self._known):
                self._ahead.prefetch([self._known[done]])
        return this

    @uncompiled
    def post_forward(self, this: UnitPass, again: bool, output: Any) -> None:
        """Free the unit, and have a backward pass call us when it comes to it."""
        group, trained = this.group, torch.is_grad_enabled()
        found = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        # What this forward pass has put into its graph: there autograd will come into it.
        ends = [t for t in found if t.grad_fn and t.grad_fn._sequence_nr() >= this.since]
        if not again:  # else its backward pass follows, and needs the parameters
            group.readers.discard(this)
            # A backward pass comes to a unit before it comes to those within it.
            this.previous = group.before = self._last
            if ends or not trained:
                self._last = this
            with record_function(f"fsdp.post_forward {group.name}"):
                reshards = group is not self.root if group.reshards is None else group.reshards
                if reshards or not trained:
                    group.reshard(keep=group.holds(found))
                elif not group.readers:
                    group.to_sharded()
        for tensor in ends:
            tensor.register_hook(lambda _: self.backward().pre_backward(this))

    @uncompiled
    def _end(self) -> None:
        self._ahead.prefetch([])
        self._known, self._now, self._last = self._now, [], None
        self.running = False

    def abandon(self) -> None:
        """Reset: drop the forward pass, free all units but those that the user keeps."""
        self._now, self._last, self.running = [], None, False
        self._ahead.forget()
        for group in self.groups:
            group.readers.clear()
            kept = group.unsharded and (group.pinned or not group.reshards_after_backward)
            if kept and group.version == group.gathered_version:
                group.to_sharded()
            else:
                group.reshard()

    # ---- backward --------------------------------------------------------------------------

    def backward(self) -> BackwardPass:
        """The one that autograd computes."""
        if self._backward is None:
            backward = BackwardPass(self.groups, self._ahead, self._on_gradients)

            def finish() -> None:
                backward.root_post_backward()
                self._forget(backward)

            # If the pass fails, autograd drops `finish` instead of calling it.
            self._lost = weakref.ref(finish, lambda _: self._forget(backward, failed=True))
            Variable._execution_engine.queue_callback(finish)
            self._backward = backward
        return self._backward

    def _on_gradients(self, this: UnitPass) -> Callable[[Gradients], None]:
        """What autograd calls when it has gone back through this pass of a unit."""

        return lambda gradients: self.backward().post_backward(this, gradients)

    def _forget(self, backward: BackwardPass, failed: bool = False) -> None:
        """It is over."""
        backward.close_all()
        self._lost = self._backward = None
        self._ahead.prefetch([])
        for group in self.groups:
            if failed:
                group.forget()
            if group.reshards_after_backward or failed:
                group.reshard()


def cast(values: Any, dtype: torch.dtype | None) -> Any:
    """Floating tensors, nested as they are, in this dtype; None changes nothing."""
    if dtype is None:
        return values

    def to(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if floating else value

    return tree_map(to, values)
