"""Accumulation: backward passes whose gradients stay on their rank until a later one."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import ismethod
from typing import Any

import torch
from torch import nn

from minidist.common.tensors_in import tensors_in
from minidist.common.wrapper import Wrapper


def graphs_in(value: Any) -> set[Any]:
    """The graphs by which something in it can be trained; of a module: something in a buffer or an
    attribute of it, or of its parts."""
    held = [value]
    if isinstance(value, nn.Module):
        tables = map(vars, value.modules())
        held = [each for own in tables for name, each in own.items() if name not in _OF_TORCH]
    return {tensor.grad_fn for each in held for tensor in tensors_in(each, 1, MOST)} - {None}


MOST = 1_000  # elements of a container: a history that a module keeps may have millions
_OF_TORCH = vars(nn.Module()).keys() - {"_buffers"}


class Synchronized(Wrapper):
    """A wrapper that averages gradients over the ranks, if `require_backward_grad_sync` is True at
    the forward pass. Scripts for torch's DistributedDataParallel set it, or use `no_sync`."""

    require_backward_grad_sync = True
    _reducer: Any = None  # averages what comes by a forward pass of the wrapper, and that alone

    def _forwarded(self, name: str, found: Any) -> Any:
        """What a part of the module computes goes past the wrapper. A method raises RuntimeError if
        it trains, or makes what could; a layer, a parameter, or a method that is called between a
        forward pass and its backward pass raises in a backward pass that it alone leads to. What a
        method was handed it has not made."""
        if self._reducer is None:
            return found
        if isinstance(found, nn.Module | nn.Parameter):
            self._reducer.reached[name] = found
        if not ismethod(found) or not isinstance(found.__self__, nn.Module):
            return found

        @wraps(found)
        def call(*inputs: Any, **kwargs: Any) -> Any:
            reducer = self._reducer
            if not self.require_backward_grad_sync:
                return found(*inputs, **kwargs)
            beside, strays = reducer.awaits, reducer.strays
            walks = torch.is_grad_enabled() and not beside
            given = graphs_in([inputs, kwargs])
            before = graphs_in(self.module) if walks else set()
            output = found(*inputs, **kwargs)
            graphs = graphs_in(output) - given
            made = (graphs | graphs_in(self.module)) - before - given if walks else set()
            if made or (reducer.strays > strays and not beside):
                raise RuntimeError(self._past(f"{name}()", f"module.{name}()"))
            if reducer.awaits or not beside:
                reducer.note(f"{name}()", graphs)
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
