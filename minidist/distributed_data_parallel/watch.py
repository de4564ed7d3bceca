"""Backward passes, as a wrapper meets them: each gradient as it is complete, and the end."""

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

from minidist.common.tensors_in import tensors_in


class GradientWatch(ABC):
    """Follows the backward passes that give gradients to `parameters`, by name.

    A pass is averaged if its forward pass asked for it by `expect`: then each gradient goes to
    `add` and, when all are there, those that did not come to `finish`, before `backward()` returns.
    allow_unused: whether gradients may be missing.
    """

    _lock = threading.RLock()  # autograd has a thread for each device
    _in_pass: ClassVar[list["GradientWatch"]] = []  # all whose backward pass is on its way

    def __init__(self, parameters: dict[str, nn.Parameter], allow_unused: bool) -> None:
        self.parameters, self._names = list(parameters.values()), list(parameters)
        self.positions = {parameter: i for i, parameter in enumerate(self.parameters)}
        self.arrived: dict[nn.Parameter, None] = {}  # in this pass, in this order
        self._allow_unused = allow_unused
        self._sync = False  # whether to average the passes after the last forward pass
        self._awaited = False  # whether the first of those has yet to end
        self._pass: weakref.ref[Callable[[], None]] | None = None
        self._makes_graph = False  # the backward pass that is on its way
        self.strays = 0  # gradients that came by no forward pass of the wrapper
        self._register_hooks()

    @abstractmethod
    def add(self, parameter: nn.Parameter) -> None:
        """This gradient is complete, and is to be averaged."""

    @abstractmethod
    def keep(self, parameter: nn.Parameter) -> None:
        """This gradient is complete, and waits for a later pass: `no_sync`."""

    @abstractmethod
    def finish(self, unused: list[nn.Parameter]) -> None:
        """All other gradients are there: average the rest, and wait until all are averaged."""

    @abstractmethod
    def forget(self) -> None:
        """A backward pass has ended, or has failed on its way."""

    # ---- before ----------------------------------------------------------------------------

    def expect(self, sync: bool) -> None:
        """A forward pass begins, and `sync` says whether to average after it."""
        if not self._is_hooked(self.parameters[0]):  # the module was converted, and back
            self._register_hooks()
        # Not less than before: one backward pass may be for several forward passes.
        self._sync = self._awaited = sync or self._awaited
        self._reset()

    def watch(self, output: Any) -> None:
        """The forward pass has ended: learn when a backward pass comes to the tensors that it
        gave. They hold us: the gradients are averaged even if the wrapper is dropped."""
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda _: self._begin())

    def _register_hooks(self) -> None:
        """Of each parameter, on the node that adds up its gradient: that runs after all hooks of
        the parameter itself. These hooks hold us weakly, and go when we go."""
        me = weakref.ref(self)

        def arrive(parameter: nn.Parameter, *_: Any) -> None:
            if (watch := me()) is not None:
                watch._arrive(parameter)

        # A parameter does not hold its node.
        self._nodes = [get_gradient_edge(p).node for p in self.parameters]
        pairs = zip(self.parameters, self._nodes, strict=True)
        hooks: list[Any] = [node.register_hook(partial(arrive, p)) for p, node in pairs]
        weakref.finalize(self, lambda: [hook.remove() for hook in hooks])

    def _is_hooked(self, parameter: nn.Parameter) -> bool:
        """Whether it has the node that it had. Another dtype or device makes it a new one."""
        kept = self._nodes[self.positions[parameter]]
        return not parameter.requires_grad or get_gradient_edge(parameter).node is kept

    # ---- during ----------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """Whether a backward pass is on its way."""
        return self._pass is not None

    @property
    def awaits(self) -> bool:
        """Whether the gradients that come next are averaged."""
        return self._awaited or self.begun

    def _begin(self) -> None:
        # At once: a hook may run in a backward pass within this one, which ends before it.
        with self._lock:
            if self._pass is None:
                self._makes_graph = torch.is_grad_enabled()

                def end() -> None:
                    self._end()

                # If the pass fails, autograd drops `end` instead of calling it.
                self._pass = weakref.ref(end, lambda _: self._reset())
                self._in_pass.append(self)
                Variable._execution_engine.queue_callback(end)

    def _arrive(self, parameter: nn.Parameter) -> None:
        with self._lock:
            others = [w for w in self._in_pass if w is not self and parameter in w.positions]
            if others and self.begun and any(watch._sync for watch in [self, *others]):
                raise RuntimeError(
                    f"parameter {self._name(parameter)} is in two wrappers, and this backward pass "
                    "is of both: its gradient would be averaged twice. Wrap a model once, as a "
                    "whole"
                )
            if (self._awaited and not others) or (self.begun and self._sync):
                self._require_complete(parameter)
                self._begin()
                self.arrived[parameter] = None
                self.add(parameter)
            elif self.begun and not torch.is_grad_enabled():
                self.keep(parameter)
            elif not others:  # of the bare module
                self.strays += 1

    def _require_complete(self, parameter: nn.Parameter) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError("gradients of gradients are not averaged: create_graph=True")
        if parameter.grad is None:
            raise RuntimeError(
                f"the gradient of {self._name(parameter)} was taken away by "
                "another hook before it was averaged, such as that of receive_in_backward"
            )
        if parameter in self.arrived:
            raise RuntimeError(
                f"the gradient of {self._name(parameter)} arrived twice in one "
                "backward pass. Parts of a model that are recomputed one by one must not share "
                "parameters."
            )

    # ---- after -----------------------------------------------------------------------------

    def _end(self) -> None:
        try:
            # Without an arrival it is torch.autograd.grad, which wants none of our gradients. What
            # it gives with create_graph may yet become the loss.
            self._awaited = self._awaited and self._makes_graph and not self.arrived
            if self._sync and (self.arrived or self._allow_unused):
                unused = [p for p in self.parameters if p not in self.arrived]
                if unhooked := [p for p in unused if not self._is_hooked(p)]:
                    raise RuntimeError(
                        f"{self._name(unhooked[0])} has been converted or moved, and back, since "
                        "the model was wrapped: convert the whole model, or wrap it then"
                    )
                if unused and not self._allow_unused:
                    raise RuntimeError(self._complaint(unused))
                self.finish(unused)
        finally:
            self._reset()

    def _reset(self) -> None:
        self._pass, self.arrived = None, {}
        if self in self._in_pass:
            self._in_pass.remove(self)
        self.forget()

    def _name(self, parameter: nn.Parameter) -> str:
        return self._names[self.positions[parameter]]

    def _complaint(self, unused: list[nn.Parameter]) -> str:
        names = list(map(self._name, unused))
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        return (
            f"this backward pass gave no gradient to {', '.join(names[:5])}{more}, for which the "
            "other ranks wait. Was a part of the model not used, or has it been frozen or replaced "
            "since it was wrapped? With find_unused_parameters=True a parameter may be left out."
        )
