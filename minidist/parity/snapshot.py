"""What a training step leaves: weights, buffers and optimizer states; and how far two of them are
apart (lesson: distributed_data_parallel)."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.utils._pytree import tree_map_only

State = dict[str, torch.Tensor]


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU, and it stays as it is."""
    return tensor.detach().cpu().clone()


def buffers_of(model: nn.Module) -> State:
    """What is in its checkpoint and not trained."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {k: copy_of(v) for k, v in model.state_dict().items() if k not in parameters}


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Weights, buffers and optimizer states, by the names of the bare module."""
    state = dict(model.state_dict())
    consume_prefix_in_state_dict_if_present(state, "module.")
    states = _states_of(optimizer)
    bare = getattr(model, "module", model)
    for name, parameter in bare.named_parameters():
        for key, value in states.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                state[f"{key} of {name}"] = value
    return {name: copy_of(value) for name, value in state.items()}


def _states_of(optimizer: torch.optim.Optimizer) -> Any:
    """Of each parameter, whole also where a rank has only a part of it."""
    whole = tree_map_only(DTensor, DTensor.full_tensor, optimizer.state_dict())
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {parameters[i]: state for i, state in whole["state"].items()}


def differences(ours: State, wanted: State) -> Iterator[tuple[str, float]]:
    """Each tensor's difference, and words for it."""
    for name, b in wanted.items():
        a = ours.get(name)
        if a is None:
            yield f"{name} is missing", math.inf
        elif a.shape != b.shape:
            yield f"{name} has shape {tuple(a.shape)}, not {tuple(b.shape)}", math.inf
        else:
            yield differs(name, relative_difference(a, b))
    for name in ours:
        if name not in wanted:
            yield f"{name} is there, and one process has none", math.inf


def differs(what: str, difference: float) -> tuple[str, float]:
    """A difference, and words for it."""
    return f"{what} differs from one process, relatively by {difference:.1e}", difference


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """max|a - b| / max|b|: 0 if all elements are equal, inf if one is not a number. (Not
    nan: Python's max may leave it out, and no comparison with it holds.)

    Raises ValueError if the shapes differ, which broadcasting would hide.
    Lesson: distributed_data_parallel.
    """
    if a.shape != b.shape:
        raise ValueError(f"tensors of shapes {tuple(a.shape)} and {tuple(b.shape)} do not compare")
    if a.numel() == 0 or torch.equal(a, b):
        return 0.0
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    apart = ((a - b).abs().max() / b.abs().max()).item()
    return math.inf if math.isnan(apart) else apart
