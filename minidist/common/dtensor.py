"""Parameters as DTensors, with which modules compute as plain tensors.

Lessons: feature_splitting, fully_sharded
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


def distributed(
    parameter: nn.Parameter,
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: torch.Size,
) -> nn.Parameter:
    """A DTensor in a parameter's place, with its attributes and hooks. local: what this rank has
    of it; shape: of the whole. No message."""
    made = parameter_like(parameter, of_local(local, mesh, placements, shape))
    made._backward_hooks = parameter._backward_hooks
    made._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
    return made


def of_local(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size
) -> DTensor:
    """What the ranks have together, of this shape. No message. `DTensor.from_local` would move a
    rank's part to the mesh's device: offloaded rows are to stay on the CPU."""
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), meta)
    return DTensor(local.detach(), spec, requires_grad=False)


def parameter_like(parameter: nn.Parameter, value: torch.Tensor) -> nn.Parameter:
    """A parameter of this value, with the attributes of another."""
    made = nn.Parameter(value, parameter.requires_grad)
    made.__dict__.update({k: v for k, v in vars(parameter).items() if k not in vars(made)})
    return made


def relist(module: nn.Module) -> None:
    """nn.LSTM and the like have their parameters in a list as well."""
    if hasattr(module, "_flat_weights_names"):
        names: Any = module._flat_weights_names
        module._flat_weights = [getattr(module, name) for name in names]  # type: ignore[assignment]
