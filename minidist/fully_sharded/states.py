"""States of whole models, and their parts (lesson 9): they tell neither ranks nor units."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from minidist.fully_sharded.flat import FlatParameter, Slot
from minidist.fully_sharded.unit import Unit, enlist
from minidist.zero.optimizer_states import States, require_states_of
from minidist.zero.partition import in_memory_order


def wholes(flat: FlatParameter, own: torch.Tensor | None = None) -> Iterator[torch.Tensor]:
    """Of each parameter the whole, on the CPU: its value, or what else each rank has (S,) of a
    tensor like it. All ranks call this."""
    whole = flat.gather(own).cpu()
    return (view.clone() for view in flat.views(whole))


def part(slot: Slot, value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor like the parameter, in the shape of its piece. Of a sharded one,
    all ranks call this."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return in_memory_order(value, slot.piece.whole)[slot.piece.span].view_as(slot.piece.own)


def shapes(flat: FlatParameter) -> Iterator[torch.Tensor]:
    """Of each parameter the shape alone."""
    return (slot.piece.whole.detach() for slot in flat.slots)


def rows(flat: FlatParameter, mesh: DeviceMesh) -> Iterator[torch.Tensor]:
    """Of each parameter this rank's rows, as a DTensor, as torch's own fully_shard has them."""
    return (as_rows(whole, mesh) for whole in wholes(flat))


def as_rows(whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's rows of a whole tensor that it has: a DTensor; of one on the device "meta", room
    for them. A number has no rows."""
    if whole.ndim == 0:
        return torch.empty_like(whole, device="cpu") if whole.is_meta else whole
    ranks, rank = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    whole = whole.contiguous()
    rows = [*whole.chunk(ranks), *[whole[:0]] * ranks][rank]
    own = torch.empty_like(rows, device=mesh.device_type)
    if not whole.is_meta:
        own.copy_(rows)
    placements: list[Placement] = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    return DTensor.from_local(
        own, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def whole_hook(unit: Unit, _: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
    """What `unit.form` makes of the parameters, in the place of this rank's pieces."""
    for flat in unit.flats:
        for slot, value in zip(flat.slots, (unit.form or wholes)(flat), strict=True):
            for name in slot.names:
                state[prefix + name] = value


def refuse_hook(module: nn.Module, prefix: str, _: bool) -> None:
    """Raises RuntimeError for the state of a part of a unit, on its own."""
    if not prefix:
        raise RuntimeError(
            f"this {type(module).__name__} has only this rank's shards of its parameters: call "
            "state_dict() of the FullyShardedDataParallel around it"
        )


def cut_hook(wrapper: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """This rank's pieces in the place of whole parameters. What does not fit stays; it is told."""
    for flat in wrapper.unit.flats:
        for slot in flat.slots:
            for name in (f"{prefix}module.{name}" for name in slot.names):
                if name in state and state[name].shape == slot.piece.whole.shape:
                    state[name] = part(slot, state[name])


def lend(unit: Unit) -> None:
    """Put the full parameters where the modules have their pieces."""
    unit.lent = True
    for flat in unit.flats:
        flat.lent = flat.gather()
        for slot, view in zip(flat.slots, flat.views(flat.lent), strict=True):
            whole = nn.Parameter(view, slot.piece.own.requires_grad)
            if whole.requires_grad:
                whole.register_hook(_refuse)
            for module, name in slot.places:
                module._parameters[name] = whole
                enlist(module)


def take_back(unit: Unit, writeback: bool) -> None:
    """The opposite of `lend`. Keep this rank's shard of what has become of them."""
    unit.lent = False
    for flat in unit.flats:
        if flat.lent is None:
            continue
        lent, flat.lent = flat.lent, None
        if writeback:
            flat.shard.copy_(flat.own_shard(lent))
        for slot in flat.slots:
            for module, name in slot.places:
                module._parameters[name] = slot.piece.own
                enlist(module)


def _refuse(_: torch.Tensor) -> None:
    raise RuntimeError(
        "backward() of a forward pass within summon_full_params: its parameters are copies, and "
        "no rank would get the gradients. Train outside of the block"
    )


# ---- states of an optimizer, by the number of the parameter --------------------------------------


def of_optimizer(
    optimizer: torch.optim.Optimizer,
    flats: Iterable[FlatParameter],
    form: Callable[[torch.Tensor], torch.Tensor],
) -> States:
    """The states of whole parameters, as `form` makes them. All ranks call this."""
    numbers, flats = _numbers(optimizer), list(flats)
    ours = {slot.piece.own for flat in flats for slot in flat.slots}
    found: States = {  # what was ignored is whole
        number: dict(optimizer.state[parameter])
        for parameter, number in numbers.items()
        if parameter not in ours and parameter in optimizer.state
    }
    for flat in flats:
        pieces = [slot.piece for slot in flat.slots if slot.piece.own in optimizer.state]
        for piece in pieces:
            found[numbers[piece.own]] = {}
        for name in dict.fromkeys(key for p in pieces for key in optimizer.state[p.own]):
            values = {p.own: optimizer.state[p.own][name] for p in pieces}
            own = torch.zeros_like(flat.shard)
            for piece in pieces:
                if _elementwise(name, values[piece.own], piece.own):
                    own = own.to(values[piece.own].dtype)
                    own[piece.place] = values[piece.own].flatten()
                else:
                    found[numbers[piece.own]][name] = values.pop(piece.own)
            if not values:
                continue
            for slot, whole in zip(flat.slots, wholes(flat, own), strict=True):
                if slot.piece.own in values:
                    found[numbers[slot.piece.own]][name] = form(whole)
    return dict(sorted(found.items()))


def for_optimizer(
    optimizer: torch.optim.Optimizer, flats: Iterable[FlatParameter], whole: States
) -> States:
    """This rank's part of them. All ranks call this."""
    numbers, own = _numbers(optimizer), dict(whole)
    for slot in (slot for flat in flats for slot in flat.slots):
        number = numbers.get(slot.piece.own)
        if number in whole:
            own[number] = {
                name: part(slot, value) if _elementwise(name, value, slot.piece.whole) else value
                for name, value in whole[number].items()
            }
    return own


def require_fitting(
    optimizer: torch.optim.Optimizer,
    flats: Iterable[FlatParameter],
    parameters: Iterable[torch.Tensor],
    state: dict[str, Any],
) -> None:
    """Raises ValueError if the optimizer is not that of these parameters, or the state is that of
    other ones."""
    by_piece: dict[torch.Tensor, torch.Tensor] = {each: each for each in parameters} | {
        slot.piece.own: slot.piece.whole for flat in flats for slot in flat.slots
    }
    numbers = _numbers(optimizer)
    if any(piece not in by_piece for piece in numbers):
        raise ValueError("the optimizer has parameters that are not the wrapper's")
    ours, theirs = (
        [len(group["params"]) for group in groups]
        for groups in (optimizer.param_groups, state["param_groups"])
    )
    if ours != theirs:
        raise ValueError(
            f"this state_dict is of another model: its groups have {theirs} parameters, and the "
            f"optimizer's {ours}"
        )
    require_states_of([by_piece[piece] for piece in numbers], state["state"])


def _numbers(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, int]:
    pieces = [piece for group in optimizer.param_groups for piece in group["params"]]
    return {piece: number for number, piece in enumerate(pieces)}


def _elementwise(name: str, value: Any, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and name != "step"
