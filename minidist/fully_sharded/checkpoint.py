"""The state of an optimizer of sharded parameters, as one process has it. Lesson: fully_sharded

Of `fully_shard` all states are DTensors, so torch's own functions do the same. Checkpoints on disk:
`minidist.saving`.
"""

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from minidist.common import agree
from minidist.fully_sharded.flat_shard import rows_of
from minidist.fully_sharded.fsdp_module import groups_in
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
    state = optimizer.state_dict()
    if not sharded:
        state = tree_map_only(DTensor, lambda tensor: tensor.full_tensor().cpu(), state)
    return renamed(state, names_of(model, numbers_of(optimizer))) if by_name else state


def load_optim_state_dict(model: nn.Module, optimizer: Optimizer, state_dict: State) -> None:
    """Load this rank's part into the optimizer, of what `optim_state_dict` gives, or the optimizer
    of one process, by number or by name. Raises ValueError, on every rank, and changes nothing, if
    it is of another model. All ranks must call it."""
    optimizer.load_state_dict(optim_state_dict_to_load(model, optimizer, state_dict))


def optim_state_dict_to_load(model: nn.Module, optimizer: Optimizer, state_dict: State) -> State:
    """The same, for the optimizer's own `load_state_dict`."""
    groups, numbers = groups_in(model), numbers_of(optimizer)
    with agree.together(*(groups[0].options.groups if groups else ())):
        if not numbers.keys() <= set(model.parameters()):
            raise ValueError("the optimizer has parameters that are not the sharded module's")
        state_dict = by_number(model, optimizer, state_dict)
        require_groups(optimizer, state_dict)
        require_states_of(list(numbers), state_dict["state"])
    states = dict(state_dict["state"])
    for parameter, number in numbers.items():
        if number in states:
            states[number] = {
                name: _rows(name, value, parameter) for name, value in states[number].items()
            }
    return {**state_dict, "state": states}


def _rows(name: str, value: Any, parameter: torch.Tensor) -> Any:
    whole = elementwise(name, value, parameter) and not isinstance(value, DTensor)
    if whole and isinstance(parameter, DTensor):
        return rows_of(value, parameter)
    return copy.deepcopy(value)  # whose state it was may go on with it


def require_groups(optimizer: Optimizer, state: State) -> None:
    """Raises ValueError if the state is of other groups than the optimizer's."""
    ours, theirs = (
        [len(group["params"]) for group in groups]
        for groups in (optimizer.param_groups, state["param_groups"])
    )
    if ours != theirs:
        raise ValueError(
            f"this state_dict is of another model: its groups have {theirs} parameters, and the "
            f"optimizer's {ours}"
        )


def names_of(model: nn.Module, numbers: dict[torch.Tensor, int]) -> dict[Any, Any]:
    return {numbers[p]: name for name, p in model.named_parameters() if p in numbers}


def by_number(model: nn.Module, optimizer: Optimizer, state: State) -> State:
    """The same, if its parameters have names. Raises ValueError if they are not the optimizer's."""
    theirs = [list(group["params"]) for group in state["param_groups"]]
    if not any(isinstance(name, str) for group in theirs for name in group):
        return state
    numbers = numbers_of(optimizer)
    names = names_of(model, numbers)
    ours = [[names.get(numbers[p]) for p in group["params"]] for group in optimizer.param_groups]
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if different := sorted(map(str, {*mine} ^ {*other})):
            raise ValueError(
                f"this state_dict is of another model: its group {number} and the optimizer's "
                f"differ in {', '.join(different)}"
            )
    inner = renamed(state, {name: number for number, name in names.items()})
    # An optimizer takes the parameters of a group one after another.
    groups = [{**group, "params": sorted(group["params"])} for group in inner["param_groups"]]
    return {**inner, "param_groups": groups}


def numbers_of(optimizer: Optimizer) -> dict[torch.Tensor, int]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {parameter: number for number, parameter in enumerate(parameters)}
