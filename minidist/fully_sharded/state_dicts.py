"""What a wrapper can save, load, lend and copy. Lesson: fully_sharded"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import StateDictType

from minidist.common import agree
from minidist.common.wrapper import Wrapper
from minidist.fully_sharded import states
from minidist.fully_sharded.flat import FlatParameter
from minidist.fully_sharded.journey import in_backward
from minidist.fully_sharded.schedule import Schedule
from minidist.fully_sharded.unit import Unit


class StateDicts(Wrapper):
    """The part of `FullyShardedDataParallel` that is about states. Lesson 9."""

    unit: Unit
    groups: tuple[dist.ProcessGroup, ...]
    process_group: dist.ProcessGroup
    mesh: DeviceMesh | None
    _schedule: Schedule
    _is_root: bool
    _device: torch.device

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.register_load_state_dict_pre_hook(states.cut_hook)

    def _watch_states(self) -> None:
        """The module's own state_dict is whole, too; that of a part of a unit raises."""
        self.module.register_state_dict_post_hook(partial(states.whole_hook, self.unit))
        for module in {
            place[0] for flat in self.unit.flats for s in flat.slots for place in s.places
        }:
            if module is not self.module:
                module.register_state_dict_pre_hook(states.refuse_hook)

    def units(self) -> Iterator[Any]:
        """This wrapper, and all within it."""
        return (each for each in self.modules() if isinstance(each, StateDicts))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of the bare module, whole, on the CPU of every rank. All ranks must call it."""
        return super().state_dict(*args, **kwargs)

    def sharded_state_dict(self) -> dict[str, Any]:
        """The same with a DTensor for each parameter, of which each rank has some rows: for
        torch.distributed.checkpoint. No rank holds more than one unit on the way."""
        mesh = self.mesh_of_shards()
        with self._formed(lambda flat: states.rows(flat, mesh)):
            return dict(self.state_dict())

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Take this rank's part of a whole state, the same on every rank, or of a sharded one. All
        ranks must call it. Raises ValueError, on every rank, and changes nothing, if it is of
        another model."""
        with self._formed(states.shapes):
            wanted = self.state_dict()
        problem = _misfit(wanted, state_dict, strict)
        if assign:
            problem = ValueError(
                "shards cannot take the place of what they are loaded from: assign"
            )
        self.raise_on_every_rank(problem)
        return super().load_state_dict(state_dict, strict)

    def optim_state_dict(
        self, optimizer: torch.optim.Optimizer, sharded: bool = False
    ) -> dict[str, Any]:
        """The optimizer's state_dict as one process would have it, for this or any other strategy;
        or `sharded`, as `sharded_state_dict()`. All ranks must call it."""
        mesh = self.mesh_of_shards() if sharded else None
        whole = states.of_optimizer(
            optimizer,
            self._schedule.flats,
            lambda value: value if mesh is None else states.as_rows(value, mesh),
        )
        return {**optimizer.state_dict(), "state": whole}

    def load_optim_state_dict(
        self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
    ) -> None:
        """Load this rank's part into the optimizer, of what `optim_state_dict` gives, or the
        optimizer of one process. Raises ValueError, on every rank, and changes nothing, if it is of
        another model. All ranks must call it."""
        optimizer.load_state_dict(self.optim_state_dict_to_load(optimizer, state_dict))

    def optim_state_dict_to_load(
        self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """The same, for the optimizer's own `load_state_dict`."""
        flats, problem = list(self._schedule.flats), None
        try:
            states.require_fitting(optimizer, flats, self.parameters(), state_dict)
        except Exception as error:
            problem = error
        self.raise_on_every_rank(problem)
        own = states.for_optimizer(optimizer, flats, state_dict["state"])
        return {**state_dict, "state": own}

    @contextmanager
    def state_dict_type(
        self, state_dict_type: StateDictType, *configs: Any, **more: Any
    ) -> Iterator[None]:
        """As torch has it: within the block, `state_dict` is whole (FULL_STATE_DICT, as without),
        or in shards. Its configurations save memory in torch, and change nothing here. Raises
        ValueError for LOCAL_STATE_DICT."""
        if state_dict_type is StateDictType.LOCAL_STATE_DICT:
            raise ValueError("LOCAL_STATE_DICT fits this number of ranks only: SHARDED_STATE_DICT")
        mesh = self.mesh_of_shards()
        sharded = state_dict_type is StateDictType.SHARDED_STATE_DICT
        with self._formed((lambda flat: states.rows(flat, mesh)) if sharded else states.wholes):
            yield

    @contextmanager
    def _formed(self, form: Callable[[FlatParameter], Iterator[torch.Tensor]]) -> Iterator[None]:
        """Within the block `state_dict` has what `form` makes of the parameters."""
        units = [each.unit for each in self.units()]
        before = [unit.form for unit in units]
        try:
            for unit in units:
                unit.form = form
            yield
        finally:
            for unit, form_before in zip(units, before, strict=True):
                unit.form = form_before

    def mesh_of_shards(self) -> DeviceMesh:
        """The ranks that have a shard each, as the last axis of a mesh."""
        if self.mesh is not None:
            return self.mesh
        return DeviceMesh.from_group(self.process_group, self._device.type)

    def raise_on_every_rank(self, problem: Exception | None) -> None:
        """The first rank's problem, if any has one."""
        agree.raise_along(self.groups, problem)

    # ---- full parameters, and copies -------------------------------------------------------

    @contextmanager
    def summon_full_params(self, writeback: bool = True) -> Iterator[None]:
        """Within the block the module has its full parameters, in their own dtype, for any use but
        training: rank 0 alone may call it. After it, each rank keeps its shard of what they have
        become, if `writeback`: so change them alike on all ranks. All ranks must enter it."""
        if self._schedule.running or in_backward():
            raise RuntimeError("summon_full_params within a forward or backward pass")
        units = [each.unit for each in self.units()]
        self._schedule.abandon()
        try:
            for unit in units:
                states.lend(unit)
            yield
        finally:
            for unit in units:
                states.take_back(unit, writeback)

    def __deepcopy__(self, memo: dict[int, Any]) -> "StateDicts":
        """One on the same ranks, with shards of its own, without gradients: for averaged weights.
        No rank needs the others for it."""
        if id(self.process_group) not in memo:
            self._require_root("copy.deepcopy").abandon()
            memo |= {id(each): each for each in (*self.groups, self.mesh)}
            for flat in self._schedule.flats:
                flat.copied(memo)
        new = memo[id(self)] = type(self).__new__(type(self))
        for name, value in self.__dict__.items():
            new.__dict__[name] = copy.deepcopy(value, memo)
        if self._is_root:
            for flat in new._schedule.flats:
                flat.move(memo)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises TypeError."""
        raise TypeError(
            "a FullyShardedDataParallel has process groups and only a rank's shards, so torch.save "
            "cannot write it: save its state_dict()"
        )

    def _require_root(self, what: str) -> Schedule:
        if not self._is_root:
            raise RuntimeError(f"call {what} of the root, the outermost wrapper")
        return self._schedule


def _misfit(wanted: Any, state: Any, strict: bool) -> Exception | None:
    for name, value in wanted.items():
        if name not in state:
            if strict:
                return ValueError(f"this state_dict is of another model: it has no {name}")
        elif isinstance(value, torch.Tensor) and state[name].shape != value.shape:
            return ValueError(
                f"this state_dict is of another model: its {name} has shape "
                f"{tuple(state[name].shape)}, and the model's {tuple(value.shape)}"
            )
    more = [name for name in state if name not in wanted]
    if more and strict:
        return ValueError(f"this state_dict is of another model: it has {more[0]} as well")
    return None
