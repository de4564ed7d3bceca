"""What a module is, besides its own class, when a unit begins with it: torch's `FSDPModule`.

Lesson: fully_sharded
"""

from typing import Any

import torch
from torch import nn

from minidist.common.wrapper import in_backward
from minidist.fully_sharded.param_group import ParamGroup
from minidist.fully_sharded.state import State


class FSDPModule(nn.Module):
    """What a module is, besides its own class, when a unit begins with it. Lesson: fully_sharded"""

    fsdp_group: ParamGroup
    fsdp_state: State

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Its own, between gathering its parameters and freeing them."""
        return self.fsdp_state.run(self.fsdp_group, super().__call__, inputs, kwargs)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """False: the backward passes that follow reduce nothing. The `.grad` of a parameter is then
        this rank's own part of the mean, whole, a DTensor with the placement Partial, and the next
        pass with True reduces the sum. Set it alike on all ranks."""
        for group in groups_in(self):
            group.syncs = requires_gradient_sync

    @property
    def unsharded(self) -> torch.Tensor:
        """Where this unit's full parameters are while they are gathered; without memory while they
        are not."""
        return self.fsdp_group.full

    @property
    def flat_shard(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """What this rank keeps of the unit; and the parameters' rows, of which it consists."""
        return self.fsdp_group.shard, [each.local for each in self.fsdp_group.parameters]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if self.fsdp_state.running or in_backward():
            raise RuntimeError("a sharded module cannot be moved or converted while it computes")
        self.fsdp_group.reshard()
        super()._apply(fn, recurse)  # those within it do the same
        self.fsdp_group.adopt()
        self.fsdp_state.watch()
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises TypeError, for copy.deepcopy as well."""
        raise TypeError(
            "a fully sharded module has process groups and only a rank's shards, so it cannot be "
            "copied, nor written by torch.save. Save by md.saving; or call torch's "
            "get_model_state_dict with full_state_dict=True on every rank, and save that"
        )


def group_of(module: nn.Module) -> ParamGroup | None:
    """The parameters of the unit that begins with this module, if one does."""
    return vars(module).get("fsdp_group")


def groups_in(module: nn.Module) -> list[ParamGroup]:
    """Those of all units that begin within it, the outer ones first."""
    return [group for group in map(group_of, module.modules()) if group is not None]


def share_state(module: nn.Module) -> None:
    """The outermost unit so far is the root."""
    state = State(groups_in(module))
    for group in state.groups:
        group.module.__dict__["fsdp_state"] = state
