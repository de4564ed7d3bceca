"""Accumulation: backward passes whose gradients stay on their rank until a later one."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import ismethod
from typing import Any

import torch
from torch import nn

from minidist.common.tensors_in import tensors_in
from minidist.common.wrapper import Wrapper


@contextmanager
def graphs_that_stay() -> Iterator[Callable[[], bool]]:
    """Whether something that was computed within the block can still be trained: in an attribute,
    or wherever it is. What is given answers it, after the block."""
    saved = weakref.WeakSet[_Saved]()

    def pack(x: torch.Tensor) -> _Saved:
        saved.add(one := _Saved(x.detach()))  # or it would hold its own graph
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.x):
        yield lambda: bool(saved) and (gc.collect(), bool(saved))[1]


class _Saved:
    """A tensor that backward needs, as long as it may come."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Synchronized(Wrapper):
    """A wrapper that averages gradients over the ranks, if `require_backward_grad_sync` is True at
    the forward pass. Scripts for torch's DistributedDataParallel set it, or use `no_sync`."""

    require_backward_grad_sync = True
    _reducer: Any = None  # averages what comes by a forward pass of the wrapper, and that alone

    def _forwarded(self, name: str, found: Any) -> Any:
        """A method of the module raises RuntimeError if gradients go past the wrapper; a layer or
        parameter does so in the backward pass."""
        if self._reducer is None:
            return found
        if isinstance(found, nn.Module | nn.Parameter):
            self._reducer.reached[name] = found
        if not ismethod(found) or not isinstance(found.__self__, nn.Module):
            return found

        @wraps(found)
        def call(*inputs: Any, **kwargs: Any) -> Any:
            reducer = self._reducer
            if reducer.awaits or not self.require_backward_grad_sync:
                return found(*inputs, **kwargs)
            strays = reducer.strays
            with graphs_that_stay() as stays:
                output = found(*inputs, **kwargs)
            graph = torch.is_grad_enabled() and any(t.grad_fn for t in tensors_in(output))
            if graph or reducer.strays > strays or stays():
                raise RuntimeError(self._past(f"{name}()", f"module.{name}()"))
            return output

        return call

    def _past(self, what: str, alone: str) -> str:
        who = type(self).__name__
        return (
            f"{what} trains past the {who}, which averages what its own forward pass has computed: "
            f"call the {who} itself, or {alone} to train on one rank"
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do not average after the forward passes within the block: their gradients add up on each
        rank. The backward pass of the next forward pass outside averages the sums."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before
