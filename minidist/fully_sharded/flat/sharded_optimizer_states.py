"""The state of an optimizer of local shards, as one process has it: by the numbers of parameters,
or by their names.

A state is elementwise, of the shape of its parameter, or a number for the whole of it, such as the
count of steps. Lesson: fully_sharded
"""

import copy
from typing import Any

import torch
from torch import nn

from minidist.common import agree
from minidist.fully_sharded.flat.flat_parameter import FlatParameter, ShardedParameter
from minidist.fully_sharded.flat.sharded_states import as_rows, part, wholes
from minidist.fully_sharded.flat.units import root_of
from minidist.zero.optimizer_states import States, elementwise, renamed, require_states_of

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
    numbers, schedule = numbers_of(optimizer), root_of(model, "optim_state_dict")
    found = {  # what is ignored is whole; of the others, what is no tensor like the parameter
        number: dict(optimizer.state[p]) for p, number in numbers.items() if p in optimizer.state
    }
    for flat in schedule.flats:
        ours = [each for each in flat.parameters if numbers.get(each.local) in found]
        for name in dict.fromkeys(key for each in ours for key in found[numbers[each.local]]):
            for each, whole in _join(flat, ours, optimizer, name):
                mesh = schedule.root.mesh if sharded else None
                found[numbers[each.local]][name] = as_rows(whole, mesh) if mesh else whole
    by_number = {**optimizer.state_dict(), "state": dict(sorted(found.items()))}
    return renamed(by_number, names_of(model, numbers)) if by_name else by_number


def _join(
    flat: FlatParameter, ours: list[ShardedParameter], optimizer: Optimizer, name: str
) -> list[tuple[ShardedParameter, torch.Tensor]]:
    """The whole of one elementwise state, for each parameter that has it."""
    states = [(each, optimizer.state[each.local].get(name)) for each in ours]
    states = [(each, value) for each, value in states if elementwise(name, value, each.local)]
    if not states:
        return []
    own = torch.zeros_like(flat.shard, dtype=states[0][1].dtype)
    for each, value in states:
        own[each.in_shard] = value.flatten()
    joined = dict(zip(flat.parameters, wholes(flat, own), strict=True))
    return [(each, joined[each]) for each, _ in states]


def load_optim_state_dict(model: nn.Module, optimizer: Optimizer, state_dict: State) -> None:
    """Load this rank's part into the optimizer, of what `optim_state_dict` gives, or the optimizer
    of one process, by number or by name. Raises ValueError, on every rank, and changes nothing, if
    it is of another model. All ranks must call it."""
    optimizer.load_state_dict(optim_state_dict_to_load(model, optimizer, state_dict))


def optim_state_dict_to_load(model: nn.Module, optimizer: Optimizer, state_dict: State) -> State:
    """The same, for the optimizer's own `load_state_dict`."""
    numbers, schedule = numbers_of(optimizer), root_of(model, "load_optim_state_dict")
    with agree.together(*schedule.root.options.groups):
        state_dict = by_number(model, optimizer, state_dict)
        require_fitting(model, optimizer, state_dict)
    own: States = dict(state_dict["state"])
    for each in (each for flat in schedule.flats for each in flat.parameters):
        number = numbers.get(each.local)
        if number in own:
            own[number] = {
                name: part(each, value).clone()
                if elementwise(name, value, each.full)
                else copy.deepcopy(value)  # whose state it was may go on with it
                for name, value in own[number].items()
            }
    return {**state_dict, "state": own}


def require_fitting(model: nn.Module, optimizer: Optimizer, state: State) -> None:
    """Raises ValueError if the optimizer is not that of the model's parameters, or if the state is
    that of others."""
    flats = root_of(model, "load_optim_state_dict").flats
    full: dict[torch.Tensor, torch.Tensor] = {p: p for p in model.parameters()}
    full |= {each.local: each.full for flat in flats for each in flat.parameters}
    numbers = numbers_of(optimizer)
    if any(parameter not in full for parameter in numbers):
        raise ValueError("the optimizer has parameters that are not the sharded module's")
    require_groups(optimizer, state)
    require_states_of([full[parameter] for parameter in numbers], state["state"])


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
