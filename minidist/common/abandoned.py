"""Parameters that a strategy has replaced by shards, where an optimizer still has them."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import nn


class Abandoned:
    """A parameter that a strategy has replaced by shards. An optimizer that was made before would
    pass over it at each step without a word."""

    __slots__ = ()
    why: str

    @property
    def grad(self) -> torch.Tensor | None:
        """Raises RuntimeError."""
        raise RuntimeError(f"this parameter was replaced: {self.why}")


@cache
def _abandoned(kind: type) -> type:
    return type("Abandoned", (Abandoned, kind), {"__slots__": ()})


def abandon(parameter: Any, why: str) -> None:
    """Free a parameter that the module no longer has, be it a DTensor. Its `.grad` then raises an
    error: `why`."""
    parameter.grad = None
    where = "_local_tensor" if hasattr(parameter, "_local_tensor") else "data"
    setattr(parameter, where, getattr(parameter, where).new_empty(0))
    parameter.__class__ = _abandoned(parameter.__class__)
    parameter.why = why


def abandon_replaced(before: Iterable[nn.Parameter], module: nn.Module, why: str) -> None:
    """Abandon those parameters that `module` had before and no longer has."""
    for parameter in set(before).difference(module.parameters()):
        abandon(parameter, why)
