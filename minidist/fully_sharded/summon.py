"""Full parameters outside of training: `summon_full_params`. Lesson: fsdp_in_practice"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minidist.common.wrapper import in_backward
from minidist.fully_sharded.flat_shard import ShardedParameter, rows_of
from minidist.fully_sharded.param_group import ParamGroup


@contextmanager
def summoned(
    groups: list[ParamGroup],
    writeback: bool,
    rank0_only: bool,
    device: torch.device | None,
    with_grads: bool,
) -> Iterator[None]:
    """Within the block the modules of these units have full parameters, on this device; None is
    where their shards are."""
    if rank0_only and writeback:
        raise ValueError("rank0_only: one rank alone cannot change what all have: writeback")
    if any(group.module.fsdp_state.running for group in groups) or in_backward():
        raise RuntimeError("summon_full_params within a forward or backward pass")
    if any(group.summoned for group in groups):
        raise RuntimeError("summon_full_params within summon_full_params")
    before: dict[ParamGroup, int] = {}
    try:
        for group in groups:
            group.module.fsdp_state.abandon()
            group.reshard()
            before[group] = group.version
            _summon(group, not rank0_only or dist.get_rank() == 0, device, with_grads)
        yield
    finally:
        stepped = writeback and any(group.version != seen for group, seen in before.items())
        ended = [each for group in groups for each in _dismiss(group)]
        for parameter, full in ended if writeback and not stepped else ():
            _write_back(parameter, full)
    if stepped:
        raise RuntimeError(
            "shards have changed within summon_full_params, as an optimizer's step changes them, "
            "and the full parameters would overwrite them. Step outside of the block"
        )


def _summon(group: ParamGroup, here: bool, device: torch.device | None, with_grads: bool) -> None:
    """Give the modules whole parameters, copies. All ranks do this; only some keep them."""
    group.summoned = True
    for each in group.parameters:
        sharded: Any = each.sharded
        with torch.inference_mode(False), torch.no_grad():  # in which torch can detach no DTensor
            whole = _copy(sharded.full_tensor(), device)
            full = nn.Parameter(whole, sharded.requires_grad)
            if with_grads and sharded.grad is not None:
                full.grad = _copy(sharded.grad.full_tensor(), device)
        if full.requires_grad:
            full.register_hook(_refuse_backward)
        if here:
            each.set_on_modules(full)


def _dismiss(group: ParamGroup) -> Iterator[tuple[ShardedParameter, nn.Parameter]]:
    """The modules have their DTensors again. Gives what they had instead."""
    for each in group.parameters if group.summoned else ():
        module, name = each.places[0]
        full = module._parameters[name]
        each.set_on_modules(each.sharded)
        if full is not None and full is not each.sharded:
            yield each, full
    group.summoned = False


def _write_back(each: ShardedParameter, full: nn.Parameter) -> None:
    """Take this rank's rows."""
    with torch.inference_mode(False), torch.no_grad():
        each.local.copy_(rows_of(full.detach(), each.sharded)._local_tensor)
        if full.grad is not None:
            each.sharded.grad = rows_of(full.grad, each.sharded)


def _copy(whole: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    return whole.to(device or whole.device, copy=True)


def _refuse_backward(_: torch.Tensor) -> None:
    raise RuntimeError(
        "backward() of a forward pass within summon_full_params: its parameters are copies, and "
        "no rank would get the gradients. Train outside of the block"
    )
