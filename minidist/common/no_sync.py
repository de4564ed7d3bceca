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


def with_graph(module: nn.Module) -> list[torch.Tensor]:
    """The tensors in attributes of a module and its parts by which something can be trained."""
    kept = [x for m in module.modules() for x in vars(m).values() if isinstance(x, _HOLDERS)]
    return [x for x in tensors_in(kept, depth=0) if x.grad_fn is not None]


_HOLDERS = torch.Tensor, list, tuple, dict


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
                output = found(*inputs, **kwargs)
                if reducer.awaits:
                    reducer.watch(output)  # it may have a backward pass of its own
                return output
            strays, before = reducer.strays, set(map(id, with_graph(self.module)))
            output = found(*inputs, **kwargs)
            graph = torch.is_grad_enabled() and any(t.grad_fn for t in tensors_in(output))
            graph = graph or any(id(x) not in before for x in with_graph(self.module))
            if graph or reducer.strays > strays:
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
