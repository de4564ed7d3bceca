"""A unit: the parameters that are gathered, used and freed together. Lesson: fully_sharded"""

import copy
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_states
from torch.distributed.device_mesh import DeviceMesh

from minidist.fully_sharded.flat.flat_parameter import Arrived, FlatParameter
from minidist.fully_sharded.flat.torch_arguments import Options

if TYPE_CHECKING:
    from minidist.fully_sharded.flat.unit_schedule import Schedule

# Torch's functions for states of optimizers.
OF_OPTIMIZERS = {
    of.__code__
    for of in (
        torch_states.get_optimizer_state_dict,
        torch_states.set_optimizer_state_dict,
        torch_states.get_state_dict,
        torch_states.set_state_dict,
    )
}
Form = Callable[[FlatParameter], Iterator[torch.Tensor]]


@dataclass(eq=False)
class Unit:
    """The parameters of `modules`: `module`, and all within it that are in no inner unit. They are
    in one flat parameter for each dtype, trained and frozen ones apart."""

    module: nn.Module
    modules: Sequence[nn.Module]
    flats: list[FlatParameter]
    options: Options
    device: torch.device
    form: Form  # what a state_dict has of a flat parameter's parameters
    reshards: bool  # whether they are freed after the forward pass
    schedule: "Schedule" = None  # type: ignore[assignment]
    before: Any = None  # what came before it in the last forward pass
    summoned: bool = False  # its modules have full parameters, by `summon_full_params`

    def start(self) -> None:
        """Begin to gather its parameters."""
        for flat in self.flats:
            flat.start()

    def show(self, arrived: Arrived) -> None:
        """Give the full parameters to the modules."""
        self.start()
        for flat in self.flats:
            flat.show(arrived)

    def free(self, keep: bool = False) -> None:
        """Give back the memory of those parameters that no pass reads, or `keep` it."""
        for flat in self.flats:
            if not flat.readers:
                flat.hide(keep)

    @property
    def mesh(self) -> DeviceMesh:
        """A mesh, of which the last axis has the ranks that have a shard each."""
        return self.options.mesh or DeviceMesh.from_group(self.options.groups[0], self.device.type)


class FSDPModule(nn.Module):
    """What a module is, besides its own class, when a unit begins with it."""

    fsdp_unit: Unit

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Its own, between gathering its parameters and freeing them."""
        return self.fsdp_unit.schedule.run(self.fsdp_unit, super().__call__, inputs, kwargs)

    def set_requires_gradient_sync(self, sync: bool) -> None:
        """False: gradients of the forward passes that follow add up on each rank, whole, until a
        pass with True reduces the sums. Of the root, for all within it."""
        root_of(self, "set_requires_gradient_sync").sync = sync

    def set_reshard_after_forward(self, reshards: bool, recurse: bool = True) -> None:
        """Whether the parameters are freed after the forward pass."""
        for unit in units_in(self) if recurse else [self.fsdp_unit]:
            unit.reshards = reshards

    @property
    def unsharded(self) -> list[torch.Tensor]:
        """Where this unit's full parameters are while they are gathered, one flat tensor (N S,) for
        each dtype; without memory while they are not."""
        return [flat.full for flat in self.fsdp_unit.flats]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if any(fn(flat.shard) is not flat.shard for flat in self.fsdp_unit.flats):
            raise RuntimeError(
                "shards cannot be moved or converted. Move or convert the module first, and "
                "wrap it then"
            )
        return super()._apply(fn, recurse)

    def _fqn_modifiers(self) -> dict[str, str]:
        """For torch.distributed.checkpoint.state_dict: children that add nothing to names. Raises
        RuntimeError for its functions of optimizers, which would take a rank's shard for all."""
        if any(frame.f_code in OF_OPTIMIZERS for frame, _ in traceback.walk_stack(None)):
            raise RuntimeError(
                "torch.distributed.checkpoint.state_dict does not know these shards of an "
                "optimizer's states: call optim_state_dict and load_optim_state_dict of "
                "minidist.fully_sharded"
            )
        return {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """One on the same ranks, with shards of its own, without gradients: for averaged weights.
        No rank needs the others for it."""
        if id(self.fsdp_unit.options) not in memo:
            root_of(self, "copy.deepcopy").abandon()
            for unit in units_in(self):
                shared = (unit.options, unit.form)
                memo |= {id(each): each for each in shared}
        new = memo[id(self)] = type(self).__new__(type(self))
        for name, value in vars(self).items():
            new.__dict__[name] = copy.deepcopy(value, memo)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises TypeError."""
        raise TypeError(
            "a fully sharded module has process groups and only a rank's shards, so torch.save "
            "cannot write it: save its state_dict()"
        )


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that begins with this module, if one does."""
    return vars(module).get("fsdp_unit")


def units_in(module: nn.Module) -> list[Unit]:
    """All units that begin within it, the outer ones first."""
    return [unit for unit in map(unit_of, module.modules()) if unit is not None]


def root_of(module: Any, what: str) -> "Schedule":
    """The schedule of a root, or of a wrapper around it. Raises RuntimeError if this is none."""
    unit: Unit | None = getattr(module, "fsdp_unit", None)
    if unit is None or unit.schedule.root is not unit:
        raise RuntimeError(f"call {what} of the root, the outermost module that is sharded")
    return unit.schedule
