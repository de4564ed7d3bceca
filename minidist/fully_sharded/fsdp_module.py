"""What a module is, besides its own class, when a unit begins with it: torch's `FSDPModule`.

Lesson: fully_sharded
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from minidist.common.dtensor import parameter_like
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

    # ---- as torch has them -----------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> "UnshardHandle | None":
        """Gather this unit's parameters before its forward pass does. async_op: only begin, and
        return a handle with `wait()`. Then the modules compute with them, until the forward pass
        ends, or `reshard`."""
        self.fsdp_group.unshard()
        self.fsdp_group.pinned = True
        handle = UnshardHandle(self.fsdp_group)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this unit's full parameters, unless its forward or backward pass goes on."""
        self.fsdp_group.reshard()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """False: the backward passes that follow reduce nothing. The `.grad` of a parameter is then
        this rank's own part of the mean, whole, a DTensor with the placement Partial, and the next
        pass with True reduces the sum. Set it alike on all ranks."""
        for group in self._groups(recurse):
            group.syncs = requires_gradient_sync

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether the parameters are freed after the forward pass."""
        for group in self._groups(recurse):
            group.reshards = reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether the parameters are freed after the backward pass. If not, the next forward pass
        uses them as they are, unless an optimizer has changed their shards since."""
        for group in self._groups(recurse):
            group.reshards_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list["FSDPModule"]) -> None:
        """What to gather while this unit computes forward, in place of the next unit."""
        self.fsdp_group.next_forward = [module.fsdp_group for module in modules]

    def set_modules_to_backward_prefetch(self, modules: list["FSDPModule"]) -> None:
        """What to gather while this unit computes backward, in place of the next unit."""
        self.fsdp_group.next_backward = [module.fsdp_group for module in modules]

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this unit's sums of gradients by it, in place of the number of ranks."""
        self.fsdp_group.divisor = factor

    @property
    def unsharded(self) -> torch.Tensor:
        """Where this unit's full parameters are while they are gathered; without memory while they
        are not."""
        return self.fsdp_group.full

    @property
    def flat_shard(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """What this rank keeps of the unit; and the parameters' rows, of which it consists."""
        return self.fsdp_group.shard, [each.local for each in self.fsdp_group.parameters]

    def _groups(self, recurse: bool) -> list[ParamGroup]:
        return groups_in(self) if recurse else [self.fsdp_group]

    # ---- saved, moved, copied --------------------------------------------------------------

    @contextmanager
    def summon_full_params(self) -> Iterator[None]:
        """Within the block the modules have whole parameters, to read and to write. There is no
        forward pass in it. After it each rank keeps its rows of what they have become. All ranks
        enter it."""
        every = [each for group in groups_in(self) for each in group.parameters]
        whole = [nn.Parameter(p.sharded.full_tensor(), p.sharded.requires_grad) for p in every]
        for group in groups_in(self):
            group.reshard()
        try:
            for each, full in zip(every, whole, strict=True):
                each.set_on_modules(full)
            yield
        finally:
            for each, full in zip(every, whole, strict=True):
                each.set_on_modules(each.sharded)
                each.local.copy_(each.rows_of(full.detach())._local_tensor)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if self.fsdp_state.running or in_backward():
            raise RuntimeError("a sharded module cannot be moved or converted while it computes")
        self.fsdp_group.reshard()
        super()._apply(fn, recurse)  # those within it do the same
        self.fsdp_group.adopt()
        self.fsdp_state.watch()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """One on the same ranks, with shards of its own, without gradients: for averaged weights.
        No rank needs the others for it."""
        if self.fsdp_state.running or in_backward():
            raise RuntimeError("a sharded module cannot be copied while it computes")
        for group in groups_in(self):
            group.reshard()
            memo |= {id(each): each for each in (group.options, group.group, group.cut)}
            for each in group.parameters:
                if id(each.sharded) not in memo:  # it may be another module's, too
                    own = DTensor(each.local.clone(), each.sharded._spec, requires_grad=False)
                    memo[id(each.sharded)] = parameter_like(each.sharded, own)
        new = memo[id(self)] = type(self).__new__(type(self))
        for name, value in vars(self).items():
            if name != "fsdp_state":
                new.__dict__[name] = copy.deepcopy(value, memo)
        share_state(new)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises TypeError."""
        raise TypeError(
            "a fully sharded module has process groups and only a rank's shards, so torch.save "
            "cannot write it. Save by md.saving; or call torch's get_model_state_dict with "
            "full_state_dict=True on every rank, and save that"
        )


class UnshardHandle:
    """Of `FSDPModule.unshard(async_op=True)`."""

    def __init__(self, group: ParamGroup) -> None:
        self._group = group

    def wait(self) -> None:
        """Until the full parameters are there, and give them to the modules."""
        self._group.wait_for_unshard()


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Have this method of a sharded module gather its parameters, as a forward pass does: torch's
    function. Does nothing for a module that is not sharded, as torch's. Raises AttributeError if
    there is no such method."""
    method: Callable[..., Any] = getattr(type(module), method_name)

    def within(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        return self.fsdp_state.run(self.fsdp_group, partial(method, self), inputs, kwargs)

    if group_of(module) is not None:
        setattr(module, method_name, MethodType(within, module))  # a deep copy binds it again


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
