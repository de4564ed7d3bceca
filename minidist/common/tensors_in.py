"""The tensors in what a module takes or gives: where a strategy meets autograd."""

from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

DEPTH = 4  # of objects within objects, in which tensors are looked for
_NO_CONTAINERS = (
    *(int, float, complex, str, bytes, type(None), type, nn.Module),
    *(FunctionType, MethodType, ModuleType, torch.dtype, torch.device, torch.Size),
)


def tensors_in(value: Any, depth: int = DEPTH) -> Iterator[torch.Tensor]:
    """All tensors in it, also within lists, dicts and objects."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, set | frozenset):
            yield from tensors_in(list(leaf), depth)
        elif depth and not isinstance(leaf, _NO_CONTAINERS):
            slots = getattr(type(leaf), "__slots__", ())
            slots = [slots] if isinstance(slots, str) else slots
            if names := {*getattr(leaf, "__dict__", ()), *slots}:
                held = [getattr(leaf, name, None) for name in names]
                yield from tensors_in(held, depth - 1)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts, in torch's order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a DTensor; any other tensor as it is. No rank waits for another."""
    # Not by the class: to import that takes a third of the time that torch itself takes.
    own: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return own
