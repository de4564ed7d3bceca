"""Checkpoints for any number of ranks: optimizer states are joined to what one process would have,
and divided again for other ranks.

A state is elementwise, of the shape of its parameter, or a number for the whole of it, such as the
count of steps.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from minidist.common.agree import gather
from minidist.zero.shards import Piece

States = dict[int, dict[str, Any]]  # by the number of the parameter: its states, by name

# These look at one element at a time. Adafactor and Muon look at rows and columns, LARS and LAMB at
# norms, LBFGS at all parameters, and a subclass at whatever its step does.
ELEMENTWISE: set[type[Optimizer]] = {
    *(optim.SGD, optim.ASGD, optim.RMSprop, optim.Rprop, optim.Adagrad, optim.Adadelta),
    *(optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam),
}


def is_elementwise(optimizer_class: type[Optimizer]) -> bool:
    """Whether its step looks at one element at a time. A subclass must say so itself."""
    return optimizer_class in ELEMENTWISE or bool(vars(optimizer_class).get("elementwise"))


def gathered(
    parameters: Sequence[nn.Parameter],
    pieces: dict[torch.Tensor, Piece],
    own_states: Mapping[torch.Tensor, dict[str, Any]],
    group: dist.ProcessGroup,
    to: int | None,
) -> States | None:
    """The states of whole parameters, on the CPU of rank `to` of the group, or of all ranks; None
    elsewhere. `own_states`: of this rank's pieces, by the whole parameter. All ranks call it."""
    own = {
        number: (pieces[p].span, tree_map_only(torch.Tensor, torch.Tensor.cpu, own_states[p]))
        for number, p in enumerate(parameters)
        if p in pieces and p in own_states
    }
    if to is None:
        ranks: Any = gather(group, own)
    else:
        ranks = [None] * dist.get_world_size(group) if dist.get_rank(group) == to else None
        dist.gather_object(own, ranks, group=group, group_dst=to)
    if ranks is None:
        return None
    whole: States = {}
    for owned in ranks:
        for number, (span, states) in owned.items():
            parameter, found = parameters[number], whole.setdefault(number, {})
            for name, value in states.items():
                if isinstance(value, torch.Tensor) and value.ndim:
                    like = torch.empty_like(parameter, dtype=value.dtype, device="cpu")
                    into = found.setdefault(name, like)
                    into.as_strided((into.numel(),), (1,))[span] = value
                else:
                    found[name] = value
    return dict(sorted(whole.items()))


def own_part(
    state_dict: dict[str, Any],
    parameters: Sequence[nn.Parameter],
    pieces: dict[torch.Tensor, Piece],
) -> dict[str, Any]:
    """This rank's part of a whole state_dict: the states of its pieces, by the numbers of their
    parameters. Raises ValueError if it is of other parameters."""
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    state_dict = renamed(state_dict, {key: number for number, key in enumerate(keys)})
    whole: States = state_dict["state"]
    require_states_of(parameters, whole)
    states = {
        number: {
            name: pieces[p].of(value).clone() if elementwise(name, value, p) else value
            for name, value in whole[number].items()
        }
        for number, p in enumerate(parameters)
        if p in pieces and number in whole
    }
    return {**state_dict, "state": states}


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


def renamed(state_dict: dict[str, Any], new: dict[Any, Any]) -> dict[str, Any]:
    """The same, with other keys for its parameters, such as names for numbers."""
    groups = [
        {**group, "params": [new[key] for key in group["params"]]}
        for group in state_dict["param_groups"]
    ]
    states = {new.get(key, key): value for key, value in state_dict["state"].items()}
    return {**state_dict, "state": states, "param_groups": groups}


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
