"""States of whole models, and their parts (lesson 9): they tell neither ranks nor units."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from minidist.fully_sharded.flat import FlatParameter, Slot
from minidist.zero.partition import in_memory_order


def wholes(flat: FlatParameter, own: torch.Tensor | None = None) -> Iterator[torch.Tensor]:
    """Of each parameter the whole, on the CPU: its value, or what else each rank has (S,) of a
    tensor like it. All ranks call this."""
    whole = flat.gather(own).cpu()
    return (view.clone() for view in flat.views(whole))


def part(slot: Slot, value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor like the parameter: (n,). Of a sharded one, all ranks call
    this."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return in_memory_order(value, slot.piece.whole)[slot.piece.span]


def whole_hook(wrapper: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Whole parameters in the place of this rank's pieces."""
    for flat in wrapper.unit.flats:
        for slot, whole in zip(flat.slots, wholes(flat), strict=True):
            for name in slot.names:
                state[prefix + name] = whole


def cut_hook(wrapper: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """This rank's pieces in the place of whole parameters. What does not fit stays; it is told."""
    for flat in wrapper.unit.flats:
        for slot in flat.slots:
            for name in (f"{prefix}module.{name}" for name in slot.names):
                if name in state and state[name].shape == slot.piece.whole.shape:
                    state[name] = part(slot, state[name])


def lend(flat: FlatParameter) -> None:
    """Put the whole parameters where the modules have their pieces."""
    flat.lent = flat.gather()
    for slot, view in zip(flat.slots, flat.views(flat.lent), strict=True):
        whole = nn.Parameter(view, flat.trained)
        for module, name in slot.places:
            module._parameters[name] = whole


def take_back(flat: FlatParameter, writeback: bool) -> None:
    """The opposite of `lend`. Keep this rank's shard of what has become of them."""
    if flat.lent is None:
        return
    lent, flat.lent = flat.lent, None
    if writeback:
        flat.shard.copy_(lent.view(-1, len(flat.shard))[flat.rank])
    for slot in flat.slots:
        for module, name in slot.places:
            module._parameters[name] = slot.piece.own
