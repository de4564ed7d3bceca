"""The `state_dict` of a sharded module, whole or in shards, and full parameters for a moment.

Lesson: fully_sharded
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from minidist.common import agree
from minidist.fully_sharded.flat.backward_pass import in_backward
from minidist.fully_sharded.flat.flat_parameter import FlatParameter, ShardedParameter
from minidist.fully_sharded.flat.units import Form, Unit, root_of, units_in
from minidist.zero.partition import in_memory_order

NO_ASSIGN = "shards cannot take the place of what they are loaded from: assign"


def wholes(flat: FlatParameter, own: torch.Tensor | None = None) -> Iterator[torch.Tensor]:
    """Of each parameter the whole, on the CPU: its value, or what else each rank has (S,) of a
    tensor like it. All ranks call this."""
    full = flat.gather(own).cpu()
    return (view.clone() for view in flat.views(full))


def shapes(flat: FlatParameter) -> Iterator[torch.Tensor]:
    """Of each parameter the shape alone."""
    return (each.full for each in flat.parameters)


def rows(mesh: DeviceMesh, flat: FlatParameter) -> Iterator[torch.Tensor]:
    """Of each parameter this rank's rows, as a DTensor, as torch's fully_shard has them."""
    return (as_rows(whole, mesh) for whole in wholes(flat))


def as_rows(whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's rows of a whole tensor: a DTensor. A number has no rows."""
    if whole.ndim == 0:
        return whole
    ranks, rank = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    whole = whole.contiguous()
    rows = [*whole.chunk(ranks), *[whole[:0]] * ranks][rank]
    own = rows.to(mesh.device_type, copy=True)
    placements: list[Placement] = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    return DTensor.from_local(
        own, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def part(each: ShardedParameter, value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor like the parameter, in the shape of its local shard. All ranks
    call this for a DTensor."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return in_memory_order(value, each.full)[each.span].view_as(each.local)


# ---- state_dict -------------------------------------------------------------------------------


def attach(unit: Unit) -> None:
    """Have the module's own `state_dict` and `load_state_dict` work. Those of a part raise."""
    unit.module.register_state_dict_post_hook(partial(_save, unit))
    before = unit.module.register_load_state_dict_pre_hook(partial(_load, unit))
    # If the module is a wrapper, its own hooks add and remove a prefix. Ours need the names without
    # the prefix: so this one runs first, and the one for saving last.
    hooks: Any = unit.module._load_state_dict_pre_hooks
    hooks.move_to_end(before.id, last=False)
    for module in {m for flat in unit.flats for each in flat.parameters for m, _ in each.places}:
        if module is not unit.module:
            module.register_state_dict_pre_hook(_refuse_part)


@contextmanager
def formed(model: nn.Module, form: Callable[[Unit], Form]) -> Iterator[None]:
    """Within the block, `state_dict` has what `form(unit)` makes of a unit's parameters."""
    before = [(unit, unit.form) for unit in units_in(model)]
    try:
        for unit, _ in before:
            unit.form = form(unit)
        yield
    finally:
        for unit, form_before in before:
            unit.form = form_before


def in_rows(unit: Unit) -> Form:
    """For `formed`: `rows`, along the unit's mesh."""
    return partial(rows, unit.mesh)


def require_fitting(model: nn.Module, state: Any, strict: bool, assign: bool) -> None:
    """Raises ValueError, on every rank, if this is the state of another model."""
    with formed(model, lambda _: shapes):
        wanted = model.state_dict()
    problem = ""
    for name, value in wanted.items():
        theirs = state.get(name)
        if theirs is None and strict:
            problem = problem or f"it has no {name}"
        elif theirs is not None and isinstance(value, torch.Tensor) and theirs.shape != value.shape:
            has = f"its {name} has shape {tuple(theirs.shape)}"
            problem = problem or f"{has}, and the model's {tuple(value.shape)}"
    for name in state:
        if name not in wanted and strict:
            problem = problem or f"it has {name} as well"
    error = ValueError(f"this state_dict is of another model: {problem}") if problem else None
    error = ValueError(NO_ASSIGN) if assign else error
    agree.raise_along(root_of(model, "load_state_dict").root.options.groups, error)


def _save(unit: Unit, _: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
    """What `unit.form` makes of the parameters, in the place of this rank's local shards."""
    for flat in unit.flats:
        for each, value in zip(flat.parameters, unit.form(flat), strict=True):
            for name in each.names:
                state[prefix + name] = value


def _load(
    unit: Unit, _: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *__: Any
) -> None:
    """This rank's part in the place of whole parameters. torch says what does not fit."""
    if metadata.get("assign_to_params_buffers"):
        raise ValueError(NO_ASSIGN)
    for each in (each for flat in unit.flats for each in flat.parameters):
        for name in (prefix + name for name in each.names):
            if name in state and state[name].shape == each.full.shape:
                state[name] = part(each, state[name])


def _refuse_part(module: nn.Module, prefix: str, _: bool) -> None:
    if not prefix:
        raise RuntimeError(
            f"this {type(module).__name__} has only this rank's shards of its parameters: call "
            "state_dict() of the sharded module around it"
        )


# ---- full parameters --------------------------------------------------------------------------


@contextmanager
def summon_full_params(model: nn.Module, writeback: bool = True) -> Iterator[None]:
    """Within the block the module has its full parameters, in their own dtype, for any use but
    training: rank 0 alone may call it. After it, each rank keeps its shard of what they have
    become, if `writeback`: so change them alike on all ranks. All ranks must enter it."""
    units = units_in(model)
    schedule = units[0].schedule
    if schedule.running or in_backward():
        raise RuntimeError("summon_full_params within a forward or backward pass")
    schedule.abandon()
    try:
        for unit in units:
            unit.summoned = True
            for flat in unit.flats:
                flat.summoned = flat.gather()
                flat.put(list(map(_copy, flat.views(flat.summoned), flat.parameters)))
        yield
    finally:
        for unit in units:
            unit.summoned = False
            for flat in unit.flats:
                summoned, flat.summoned = flat.summoned, None
                if summoned is not None and writeback:
                    flat.shard.copy_(flat.own_shard(summoned))
                flat.put([each.local for each in flat.parameters])


def _copy(view: torch.Tensor, each: ShardedParameter) -> nn.Parameter:
    full = nn.Parameter(view, each.local.requires_grad)
    if full.requires_grad:
        full.register_hook(_refuse_backward)
    return full


def _refuse_backward(_: torch.Tensor) -> None:
    raise RuntimeError(
        "backward() of a forward pass within summon_full_params: its parameters are copies, and "
        "no rank would get the gradients. Train outside of the block"
    )
