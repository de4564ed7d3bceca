"""Which states of an optimizer belong to which parameters, and by which names."""

from collections.abc import Sequence
from typing import Any

import torch

States = dict[int, dict[str, Any]]  # by the number of the parameter: its states, by name


def require_states_of(
    parameters: Sequence[torch.Tensor], whole: States, factored: bool = False
) -> None:
    """Raises ValueError if these are the states of other parameters. factored: they may have the
    shape of their parameter together, as Adafactor's of rows and of columns."""
    for number, states in whole.items():
        parameter = parameters[number] if number < len(parameters) else torch.empty(0)
        for name, value in states.items():
            together = factored and _broadcast(states) == parameter.shape
            fits = together or elementwise(name, value, parameter)
            if isinstance(value, torch.Tensor) and value.ndim and not fits:
                raise ValueError(
                    f"this state_dict is of another model: {name} of parameter {number} has shape "
                    f"{tuple(value.shape)}, and the parameter {tuple(parameter.shape)}"
                )


def elementwise(name: str, value: Any, parameter: torch.Tensor) -> bool:
    """Whether this state of the parameter has a number for each of its elements."""
    # All are of one shape if the parameter has only one element.
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and name != "step"


def _broadcast(states: dict[str, Any]) -> torch.Size | None:
    """The shape of all these tensors together. None: they have none."""
    try:
        return torch.broadcast_shapes(
            *(value.shape for value in states.values() if isinstance(value, torch.Tensor))
        )
    except RuntimeError:
        return None
