"""Parameters that a strategy has replaced by shards, where an optimizer still has them."""

from collections.abc import Iterable

import torch
from torch import nn


class Abandoned(nn.Parameter):
    """A parameter that a strategy has replaced by shards. An optimizer that was made before would
    pass over it at each step without a word."""

    why: str

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """Raises RuntimeError."""
        raise RuntimeError(f"this parameter was replaced: {self.why}")


def abandon(parameter: nn.Parameter, why: str) -> None:
    """Free a parameter that the module no longer has. Its `.grad` then raises an error: `why`."""
    parameter.data = parameter.data.new_empty(0)
    parameter.grad = None
    parameter.__class__ = Abandoned
    parameter.why = why  # type: ignore[attr-defined]


def abandon_replaced(before: Iterable[nn.Parameter], module: nn.Module, why: str) -> None:
    """Abandon those parameters that `module` had before and no longer has."""
    kept = set(module.parameters())
    for parameter in before:
        if parameter not in kept:
            abandon(parameter, why)
