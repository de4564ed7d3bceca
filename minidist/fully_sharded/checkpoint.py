"""The state of an optimizer of sharded parameters, as one process has it. Lesson: fully_sharded

Of `fully_shard` all states are DTensors, so torch's own functions do the same. Checkpoints on disk:
`minidist.saving`.
"""

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from minidist.common import agree
from minidist.fully_sharded.flat import sharded_optimizer_states as flat
from minidist.fully_sharded.fully_shard import groups_in
from minidist.zero.optimizer_states import elementwise, renamed, require_states_of

State = dict[str, Any]
Optimizer = torch.optim.Optimizer


def optim_state_dict(
    model: nn.Module, optimizer: Optimizer, sharded: bool = False, by_name: bool = False
) -> State:
    """The optimizer's state_dict as one process would have it, for this or any other strategy. All
    ranks must call it.

    sharded: with DTensors of each rank's rows.
    by_name: with the names of parameters in the place of their numbers, as torch has it: in its
        FSDP's `optim_state_dict`, and in `get_optimizer_state_dict`.
    """
    if not groups_in(model):
        return flat.optim_state_dict(model, optimizer, sharded, by_name)
    state = optimizer.state_dict()
    if not sharded:
        state = tree_map_only(DTensor, lambda tensor: tensor.full_tensor().cpu(), state)
    return renamed(state, flat.names_of(model, flat.numbers_of(optimizer))) if by_name else state


def load_optim_state_dict(model: nn.Module, optimizer: Optimizer, state_dict: State) -> None:
    """Load this rank's part into the optimizer, of what `optim_state_dict` gives, or the optimizer
    of one process, by number or by name. Raises ValueError, on every rank, and changes nothing, if
    it is of another model. All ranks must call it."""
    groups = groups_in(model)
    if not groups:
        return flat.load_optim_state_dict(model, optimizer, state_dict)
    numbers = flat.numbers_of(optimizer)
    with agree.together(*groups[0].options.groups):
        if not numbers.keys() <= set(model.parameters()):
            raise ValueError("the optimizer has parameters that are not the sharded module's")
        state_dict = flat.by_number(model, optimizer, state_dict)
        flat.require_groups(optimizer, state_dict)
        require_states_of(list(numbers), state_dict["state"])
    states = dict(state_dict["state"])
    for parameter, number in numbers.items():
        if number in states:
            states[number] = {
                name: _rows(name, value, parameter) for name, value in states[number].items()
            }
    optimizer.load_state_dict({**state_dict, "state": states})


def _rows(name: str, value: Any, parameter: torch.Tensor) -> Any:
    whole = elementwise(name, value, parameter) and not isinstance(value, DTensor)
    if whole and isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        return distribute_tensor(value, mesh, placements, src_data_rank=None)
    return copy.deepcopy(value)  # whose state it was may go on with it
