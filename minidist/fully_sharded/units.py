"""A unit: the parameters that are gathered, used and freed together. Lesson: fully_sharded"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from minidist.fully_sharded.flat_parameter import Arrived, FlatParameter
from minidist.fully_sharded.torch_arguments import Options

if TYPE_CHECKING:
    from minidist.fully_sharded.unit_schedule import Schedule

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
    schedule: "Schedule"
    before: Any = None  # what came before it in the last forward pass
    summoned = False  # its modules have full parameters, by `summon_full_params`

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
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The ranks that have a shard each, and with hybrid sharding those that have the same."""
        return self.options.groups

    @property
    def mesh(self) -> DeviceMesh:
        """A mesh, of which the last axis has the ranks that have a shard each."""
        return self.options.mesh or DeviceMesh.from_group(self.groups[0], self.device.type)


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that begins with this module, if one does."""
    return vars(module).get("fsdp_unit")


def units_in(module: nn.Module) -> list[Unit]:
    """All units that begin within it, the outer ones first."""
    return [unit for unit in map(unit_of, module.modules()) if unit is not None]


def root_of(module: nn.Module, what: str) -> "Schedule":
    """The schedule of a root. Raises RuntimeError if the module is none."""
    unit = unit_of(module)
    if unit is None or unit.schedule.root is not unit:
        raise RuntimeError(f"call {what} of the root, the outermost module that is sharded")
    return unit.schedule
