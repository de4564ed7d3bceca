"""Parameters as DTensors, with which modules compute as plain tensors.

Lessons: feature_splitting, fully_sharded
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement


def distributed(
    parameter: nn.Parameter,
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: torch.Size,
) -> nn.Parameter:
    """A DTensor in a parameter's place, with its attributes and hooks. local: what this rank has
    of it; shape: of the whole. No message."""
    stride = torch.empty(shape, device="meta").stride()
    whole = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    made = parameter_like(parameter, whole)
    made._backward_hooks = parameter._backward_hooks
    made._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
    return made


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
