"""When units are gathered and freed: the forward pass.

    gather 1 | compute 1 | compute 2 | compute 3
               gather 2    gather 3

At any time few units are gathered: the one that computes, those around it, such as the root, and
the next one. The order is that of the forward pass before. The way back: `backward_pass`.
Zhao et al., "PyTorch FSDP" (arXiv 2304.11277), sections 3.3 and 4. Lesson: fully_sharded
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.profiler import record_function
from torch.utils._pytree import tree_map

from minidist.common.replicas import broadcast_state
from minidist.common.tensors_in import tensors_in
from minidist.common.uncompiled import uncompiled
from minidist.common.wrapper import in_backward, kinds_of, require_as_found
from minidist.fully_sharded.backward_pass import Ahead, BackwardPass, UnitPass
from minidist.fully_sharded.param_group import Gradients, ParamGroup


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
        found = list(tensors_in(output))
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

    def backward(self) -> "BackwardPass":
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

    def _forget(self, backward: "BackwardPass", failed: bool = False) -> None:
        """It is over. Nothing stays gathered."""
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
