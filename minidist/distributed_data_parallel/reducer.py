"""Averaging gradients while backward still computes.

Autograd finishes the gradients of the last layers first. As soon as a bucket has all of its
gradients it leaves, and travels while autograd goes on to the layers before.

After Li et al., "PyTorch Distributed" (arXiv 2006.15704), sections 3.2 and 4.2.
Lesson: distributed_data_parallel.
"""

import threading
import weakref
from collections.abc import Callable
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

from minidist.common.agree import on_any_rank
from minidist.common.no_sync import Synchronized
from minidist.common.tensors_in import tensors_in
from minidist.distributed_data_parallel.buckets import Buckets


class Reducer:
    """Averages the gradients of `parameters` (by name, in the order of registration) over the ranks
    of `group`, in `buckets`, for the forward passes of `wrapper`.

    A backward pass is averaged if its forward pass asked for it by `expect`: then each gradient is
    added to its bucket as it is complete, and at the end of the pass those that are missing.
    find_unused_parameters: whether some may be.
    """

    def __init__(
        self,
        wrapper: Synchronized,
        parameters: dict[str, nn.Parameter],
        group: dist.ProcessGroup,
        buckets: Buckets,
        find_unused_parameters: bool,
    ) -> None:
        self.parameters = list(parameters.values())
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._wrapper, self._group, self.buckets = weakref.ref(wrapper), group, buckets
        self._find_unused = find_unused_parameters
        # The order in which gradients arrived, until the ranks have made buckets by it.
        self._order: list[nn.Parameter] | None = None
        # Whether they have; or it is of no use, since each pass may have another order.
        self._ordered = find_unused_parameters

        self._lock = threading.RLock()  # autograd has a thread for each device
        self._sync = False  # whether to average the passes after the last forward pass
        self._awaited = False  # whether the first of those has yet to end
        self._pass: weakref.ref[Callable[[], None]] | None = None
        self._makes_graph = False  # the backward pass that is on its way
        self.arrived: dict[nn.Parameter, None] = {}  # in this pass, in this order
        self.answered = False  # the last forward pass of the others, by `answer`
        self.reached: dict[str, Any] = {}  # parts of the module that a user has, by the wrapper
        hook = GradientHook(self)
        self._hooks = {p: p.register_post_accumulate_grad_hook(hook) for p in self.parameters}
        weakref.finalize(self, remove, list(self._hooks.values()))

    # ---- before a backward pass ------------------------------------------------------------

    @property
    def may_rebuild(self) -> bool:
        """Whether the order in which gradients arrive has just become known."""
        return self._order is not None

    def order_on(self, source: int) -> list[nn.Parameter]:
        """The parameters in the order in which their gradients arrived on rank `source`, for all
        ranks to make buckets by it."""
        position = {parameter: i for i, parameter in enumerate(self.parameters)}
        order = torch.tensor([position[each] for each in self._order or self.parameters])
        order = order.to(self.parameters[0].device)
        dist.broadcast(order, group=self._group, group_src=source)
        self._order, self._ordered = None, True
        return [self.parameters[i] for i in order.tolist()]

    def expect(self, sync: bool, contributors: int | None = None) -> None:
        """A forward pass begins. `sync`: whether to average after it, over so many ranks."""
        for parameter, hook in self._hooks.items():
            # After all hooks of the user's, also of those that came later.
            hooks: Any = parameter._post_accumulate_grad_hooks
            if next(reversed(hooks)) != hook.id:
                hooks[hook.id] = hooks.pop(hook.id)
        if contributors is not None:
            self.buckets.scale = 1 / contributors
        # Keep an earlier pass's wish: one backward pass may be for several forward passes.
        self._sync = self._awaited = sync or self._awaited
        self._reset()

    def watch(self, output: Any) -> None:
        """The forward pass has ended: learn when a backward pass comes to the tensors that it
        gave. They hold us: the gradients are averaged even if the wrapper is dropped."""
        for tensor in [output] if isinstance(output, torch.Tensor) else tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda _: self._begin())

    # ---- during it -------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """Whether a backward pass is on its way."""
        return self._pass is not None

    def _begin(self) -> None:
        # At once: a hook may run in a backward pass within this one, which ends before it.
        with self._lock:
            if self._pass is None:
                self._makes_graph, end = torch.is_grad_enabled(), self._end
                # If the pass fails, autograd drops `end` instead of calling it.
                self._pass = weakref.ref(end, lambda _: self._fail())
                Variable._execution_engine.queue_callback(end)

    def _arrive(self, parameter: nn.Parameter) -> None:
        """Its gradient is complete."""
        with self._lock:
            hooks: Any = parameter._post_accumulate_grad_hooks
            if parameter.grad is None and all(map(_only_reads, hooks.values())):
                return  # nobody took it away: a Function of the user's gave None
            others = reducers_of(parameter) if len(hooks) > 1 else []
            others = [each for each in others if each is not self and each.begun]
            if others and self._pass and any(each._sync for each in [self, *others]):
                raise RuntimeError(
                    f"parameter {self._names[parameter]} is in two wrappers, and this backward "
                    "pass is of both: its gradient would be averaged twice. Wrap a model once, as "
                    "a whole"
                )
            if (self._awaited and not others) or (self._pass and self._sync):
                self._require_complete(parameter)
                if self._pass is None:
                    self._begin()
                self.arrived[parameter] = None
                self.buckets.add(parameter)
            elif self._pass and not torch.is_grad_enabled():  # it waits for a later pass: no_sync
                self.buckets.hold(parameter)
            else:
                self.buckets.stay(parameter)
                if not others:
                    self._stray(parameter)

    def _require_complete(self, parameter: nn.Parameter) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError("gradients of gradients are not averaged: create_graph=True")
        if parameter.grad is None:
            raise RuntimeError(
                f"the gradient of {self._names[parameter]} was taken away by "
                "another hook before it was averaged, such as that of receive_in_backward"
            )
        if parameter in self.arrived:
            raise RuntimeError(
                f"the gradient of {self._names[parameter]} arrived twice in one "
                "backward pass. Parts of a model that are recomputed one by one must not share "
                "parameters."
            )
        hooks: Any = parameter._post_accumulate_grad_hooks
        if len(hooks) > 1:
            later = list(hooks.values())[list(hooks).index(self._hooks[parameter].id) :]
            if not all(map(_only_reads, later)):
                raise RuntimeError(
                    f"a hook of {self._names[parameter]} was registered after the forward pass: it "
                    "would change a gradient that is on its way. Register it before"
                )

    def _stray(self, parameter: nn.Parameter) -> None:
        """A gradient by no forward pass of the wrapper. The bare module may have it; not a part
        that was reached through the wrapper, for which it looks averaged."""
        wrapper = self._wrapper()
        if wrapper is None or not wrapper.require_backward_grad_sync:
            return
        for name, part in self.reached.items():
            own = part.parameters() if isinstance(part, nn.Module) else [part]
            if any(each is parameter for each in own):
                who = type(wrapper).__name__
                raise RuntimeError(
                    f"{name} trains past the {who}, which averages what its own forward pass has "
                    f"computed: call the {who} itself, or do so within no_sync() to train on one "
                    "rank"
                )

    # ---- after it --------------------------------------------------------------------------

    def _end(self) -> None:
        try:
            # Without an arrival it is torch.autograd.grad, which wants none of our gradients. What
            # it gives with create_graph may yet become the loss.
            self._awaited = self._awaited and self._makes_graph and not self.arrived
            if self._sync and (self.arrived or self._find_unused):
                unused = [p for p in self.parameters if p not in self.arrived]
                if unused and not self._find_unused:
                    raise RuntimeError(self._complaint(unused))
                if not self._ordered:
                    self._order = list(self.arrived)
                self._finish(unused)
        finally:
            self._reset()

    def _finish(self, unused: list[nn.Parameter]) -> None:
        """Average the rest, and wait until all are averaged."""
        # In this pass, or in those before it that were not averaged.
        used = [p in self.arrived or p.grad is not None for p in self.parameters]
        for parameter in unused:
            self.buckets.add(parameter)
        if self._find_unused:
            used = on_any_rank(used, self._group)
        self.buckets.wait()
        self.buckets.give(compress(self.parameters, used))

    def _fail(self) -> None:
        self._awaited = False  # or the next pass would be averaged, within no_sync too
        self._reset()

    def _reset(self) -> None:
        """A backward pass has ended, or has failed on its way."""
        self._pass, self.arrived = None, {}
        self.buckets.empty()

    def answer(self) -> None:
        """Take part in the others' averaging without a backward pass, adding zeros. Gradients that
        are here stay as they are."""
        before = [None if p.grad is None else p.grad.clone() for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        self._finish(self.parameters)
        self._reset()
        for parameter, gradient in zip(self.parameters, before, strict=True):
            parameter.grad = gradient  # which was a view of a bucket, maybe
        self._sync = self._awaited = False  # no backward pass comes here

    def _complaint(self, unused: list[nn.Parameter]) -> str:
        names = [self._names[parameter] for parameter in unused]
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        return (
            f"this backward pass gave no gradient to {', '.join(names[:5])}{more}, for which the "
            "other ranks wait. Was a part of the model not used, or has it been frozen or replaced "
            "since it was wrapped? With find_unused_parameters=True a parameter may be left out."
        )


class GradientHook:
    """Of a parameter, so that it stays when the parameter is converted. Holds the reducer weakly,
    and goes when that goes."""

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = weakref.ref(reducer)

    def __call__(self, parameter: nn.Parameter) -> None:
        if (reducer := self.reducer()) is not None:
            reducer._arrive(parameter)


def reducers_of(parameter: nn.Parameter) -> list[Reducer]:
    """All that average its gradient."""
    hooks: Any = parameter._post_accumulate_grad_hooks or {}
    found = [hook.reducer() for hook in hooks.values() if isinstance(hook, GradientHook)]
    return [reducer for reducer in found if reducer is not None]


def remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


def _only_reads(hook: Any) -> bool:
    """Whether this hook of a parameter leaves the gradient as it is until that is averaged."""
    return isinstance(hook, GradientHook) or hasattr(hook, "only_reads")
