"""States of a sharded model, and of its optimizer, as one process has them. Lesson: fully_sharded

Of `fully_shard` all states are DTensors, so torch's own functions do the same. Checkpoints on disk:
`minidist.saving`.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from minidist.common import agree
from minidist.common.optimizer_states import elementwise, renamed, require_states_of
from minidist.fully_sharded.flat_shard import rows_of
from minidist.fully_sharded.fsdp_module import groups_in

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


class StateTypes(nn.Module):
    """Of `FullyShardedDataParallel`: its states, as torch's class has them."""

    _state_type = StateDictType.FULL_STATE_DICT
    load_optim_state_dict = load_optim_state_dict
    optim_state_dict_to_load = optim_state_dict_to_load

    def set_state_dict_type(self, state_dict_type: StateDictType, *configs: Any) -> StateDictType:
        """What `state_dict` has from now on, and `optim_state_dict`: whole tensors on the CPU, as
        at the beginning (FULL_STATE_DICT), or DTensors of this rank's rows (SHARDED_STATE_DICT).
        The configurations save memory in torch, and change nothing here. Returns what it was.
        Raises ValueError for LOCAL_STATE_DICT."""
        if state_dict_type is StateDictType.LOCAL_STATE_DICT:
            raise ValueError("LOCAL_STATE_DICT fits this number of ranks only: SHARDED_STATE_DICT")
        before = StateDictType.FULL_STATE_DICT
        for module in self.modules():
            if isinstance(module, StateTypes):
                before, module._state_type = module._state_type, state_dict_type
        return before

    @contextmanager
    def state_dict_type(self, state_dict_type: StateDictType, *configs: Any) -> Iterator[None]:
        """`set_state_dict_type` for a block."""
        before = StateTypes.set_state_dict_type(self, state_dict_type)
        try:
            yield
        finally:
            StateTypes.set_state_dict_type(self, before)

    def optim_state_dict(
        self, optimizer: Optimizer, sharded: bool | None = None, by_name: bool = False
    ) -> State:
        """See the function `optim_state_dict`. sharded: None is as `state_dict` is."""
        if sharded is None:
            sharded = self._state_type is StateDictType.SHARDED_STATE_DICT
        return optim_state_dict(self, optimizer, sharded, by_name)


def make_whole(model: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """After `state_dict`: DTensors become whole tensors, tied ones one tensor."""
    if model._state_type is not StateDictType.FULL_STATE_DICT or any(
        group.summoned for group in groups_in(model)
    ):  # summoned, perhaps on one rank alone: the others would wait for it
        return
    wholes = dict[int, torch.Tensor]()
    for name, value in state.items():
        if name.startswith(prefix) and isinstance(value, DTensor):
            key = value._local_tensor.untyped_storage()._cdata
            if key not in wholes:
                with torch.inference_mode(False), torch.no_grad():
                    wholes[key] = value.full_tensor().to("cpu", copy=True)
            state[name] = wholes[key]


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
