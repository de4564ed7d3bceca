"""Where autograd will come into a unit's part of the graph: tensors that a forward pass has made.

A module may return anything, or leave a loss in an attribute. Lesson: fully_sharded
"""

from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from minidist.fully_sharded.units import Unit

DEPTH = 4  # of objects within objects, in which tensors are looked for
_OF_TORCH = frozenset(nn.Module().__dict__)  # attributes that every module has
_NO_CONTAINERS = (
    *(int, float, complex, str, bytes, type(None), type, nn.Module),
    *(FunctionType, MethodType, ModuleType, torch.dtype, torch.device, torch.Size),
)


def made(unit: Unit, since: int, output: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of the output, and of the attributes of the unit's modules: what a forward pass that began at
    autograd's node `since` has put into its graph."""
    attributes = [
        value
        for module in unit.modules
        for name, value in module.__dict__.items()
        if name not in _OF_TORCH and name not in module._parameters
        if name not in ("_flat_weights", "fsdp_unit")
    ]
    found = [*output, *tensors_in(attributes, depth=0)]
    return [t for t in found if t.grad_fn is not None and t.grad_fn._sequence_nr() >= since]


def has_graph(unit: Unit, inputs: Any) -> bool:
    """Whether autograd may have seen the unit compute."""
    return any(flat.trains for flat in unit.flats) or any(
        tensor.requires_grad for tensor in tensors_in(inputs)
    )


def gives_parameters(unit: Unit, output: list[torch.Tensor]) -> bool:
    """Whether the output is, in part, a view of the parameters."""
    ours = [flat.full.untyped_storage().data_ptr() for flat in unit.flats if flat.gathered]
    strided = (tensor for tensor in output if tensor.layout is torch.strided)
    return any(tensor.untyped_storage().data_ptr() in ours for tensor in strided)


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
                yield from tensors_in([getattr(leaf, name, None) for name in names], depth - 1)
