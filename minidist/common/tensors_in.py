"""The tensors in what a module takes or gives: where a strategy meets autograd."""

from collections import deque
from collections.abc import Iterator
from itertools import islice
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


def tensors_in(value: Any, depth: int = DEPTH, most: int | None = None) -> Iterator[torch.Tensor]:
    """All tensors in it, also within lists, dicts and objects. `most`: of a container, look at so
    many elements, the last ones."""
    for leaf in tree_leaves(value if most is None else _last(value, most)):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, set | frozenset):
            yield from tensors_in(list(leaf), depth, most)
        elif depth and not isinstance(leaf, _NO_CONTAINERS):
            slots = getattr(type(leaf), "__slots__", ())
            slots = [slots] if isinstance(slots, str) else slots
            if names := {*getattr(leaf, "__dict__", ()), *slots}:
                held = [getattr(leaf, name, None) for name in names]
                yield from tensors_in(held, depth - 1, most)


def _last(value: Any, most: int) -> Any:
    """Containers within it, too, but no subclasses, which may have attributes."""
    if type(value) is dict:
        value = list(value.values())
    if type(value) not in (list, tuple, deque):
        return value
    return [_last(each, most) for each in islice(reversed(value), most)]


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts, in torch's order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a DTensor; any other tensor as it is. No rank waits for another."""
    # Not by the class: to import that takes a third of the time that torch itself takes.
    own: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return own
