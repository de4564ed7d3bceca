"""Where autograd will come into a unit's part of the graph: tensors that a forward pass has made.

A module may return anything, or leave a loss in an attribute. Lesson: fully_sharded
"""

from typing import Any

import torch
from torch import nn

from minidist.common.tensors_in import tensors_in
from minidist.fully_sharded.flat.units import Unit

_OF_TORCH = frozenset(nn.Module().__dict__)  # attributes that every module has


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
    # Not by address: on "meta" all storages have the same one.
    ours = [flat.full.untyped_storage()._cdata for flat in unit.flats if flat.gathered]
    strided = (tensor for tensor in output if tensor.layout is torch.strided)
    return any(tensor.untyped_storage()._cdata in ours for tensor in strided)
