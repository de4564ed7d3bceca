"""Model and optimizer as one process has them, in boxes of each rank (lesson: scaling_out).

    model.<name>                    a parameter or buffer, by its name in the bare module; or a list
                                    of one module's extra state, or of what a hook makes for states
    optimizer.<state>.<name>        a state of that parameter, of its shape; or a number, its steps

A tied parameter has an entry under each of its names. The options of the optimizer's groups are no
entries; see `groups`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from minidist.common.tensors_in import local_of
from minidist.saving.boxes import Boxed, whole_box
from minidist.saving.places import Trained, places_of, trained_by, without_ddp
from minidist.zero import ZeroRedundancyOptimizer

Entries = dict[str, Any]  # a Boxed, or anything that torch.save writes
Groups = Sequence[dict[str, Any]]
Optimizer = torch.optim.Optimizer
MODEL, OPTIMIZER = "model.", "optimizer."


class WholeStates:
    """What this rank has of a model and its optimizer. No rank waits for another in here."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        self.model, self.optimizer = model, optimizer
        _require_no_more(optimizer)
        self._places, self._others = places_of(model)
        self._groups = [] if optimizer is None else trained_by(optimizer, self._places)
        self._rooms: list[tuple[int, str, str]] = []  # a parameter's number, a state, its entry

    # ---- to save ---------------------------------------------------------------------------

    def entries(self) -> Entries:
        """All of it. The tensors are the model's and the optimizer's own."""
        # In a list, as a tensor is to torch's plan one of the model's.
        found: Entries = {MODEL + n: [value] for n, (_, value) in self._others.items()}
        for place in self._places:
            found |= {MODEL + name: place.boxed() for name in place.names}
        for each in (each for own in self._groups for each in own):
            states = self.optimizer.state.get(each.place.own, {}) if self.optimizer else {}
            for state, value in states.items():
                entry = _boxed(state, value, each)
                found |= {f"{OPTIMIZER}{state}.{name}": entry for name in each.place.names}
        return found

    def groups(self) -> Groups:
        """Of each group of the optimizer its options, and the names of its parameters here."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [
            {"options": _options(group), "names": [n for each in own for n in each.place.names]}
            for group, own in zip(groups, self._groups, strict=True)
        ]

    def names(self) -> set[str]:
        """Of all entries of the model."""
        places = (name for place in self._places for name in place.names)
        return {MODEL + name for name in (*places, *self._others)}

    # ---- to load ---------------------------------------------------------------------------

    def require_fitting(self, saved: Metadata) -> None:
        """Raises ValueError if a parameter of this rank is not in what is saved, or with another
        shape or dtype."""
        for name in self._others:
            entry = saved.state_dict_metadata.get(MODEL + name)
            if entry is None or isinstance(entry, TensorStorageMetadata):
                raise ValueError(
                    f"it is of another model: it has no {name} as a hook or get_extra_state gives "
                    "it here"
                )
        for place in self._places:
            for name in place.names:
                entry = saved.state_dict_metadata.get(MODEL + name)
                if not isinstance(entry, TensorStorageMetadata):
                    raise ValueError(f"it is of another model: it has no {name}")
                theirs = tuple(entry.size), entry.properties.dtype
                ours = tuple(place.shape), place.own.dtype
                if theirs != ours:
                    raise ValueError(
                        f"it is of another model: {name} has shape {theirs[0]}, {theirs[1]}, and "
                        f"the model's has {ours[0]}, {ours[1]}"
                    )

    def rooms(self, saved: Metadata) -> Entries:
        """Where to read to: the model itself, and new states for the optimizer."""
        rooms: Entries = {n: None for n in self.names() if n in saved.state_dict_metadata}
        for place in self._places:
            rooms |= {MODEL + name: place.boxed() for name in place.names}
        states = _states(saved)
        self._rooms = []
        for each in (each for own in self._groups for each in own):
            for state, name in states.get(each.place.names[0], {}).items():
                rooms[name] = _room(state, saved.state_dict_metadata[name], each)
                self._rooms.append((each.number, state, name))
        return rooms

    def put(self, read: Entries, groups: Groups) -> None:
        """Give the optimizer what was read into its rooms. (The model has its own.)"""
        others = {own: read[MODEL + name][0] for name, (own, _) in self._others.items()}
        if others:
            loaded = without_ddp(self.model).load_state_dict(others, strict=False)
            if loaded is not None and loaded.unexpected_keys:
                raise ValueError(
                    f"the model has no place for {loaded.unexpected_keys[0]}, which a hook made at "
                    "its saving: it needs another for loading, register_load_state_dict_pre_hook"
                )
        if self.optimizer is None:
            return
        states: dict[int, Any] = {}
        owners = {each.number: each for own in self._groups for each in own}
        for number, state, name in self._rooms:
            value = read[name]
            taken = _taken(value, owners[number])
            if isinstance(self.optimizer, ZeroRedundancyOptimizer):
                taken = self.optimizer.whole(owners[number].place.own, taken)
            states.setdefault(number, {})[state] = taken
        packed = [
            _options(ours) | theirs["options"] | {"params": [each.number for each in own]}
            for ours, theirs, own in zip(
                self.optimizer.param_groups, groups, self._groups, strict=True
            )
        ]
        self.optimizer.load_state_dict({"state": states, "param_groups": packed})


def merged(ranks: Sequence[Groups]) -> Groups:
    """The groups of all ranks together, of which each may have other parameters."""
    return [
        {"options": of[0]["options"], "names": sorted({n for each in of for n in each["names"]})}
        for of in zip(*ranks, strict=True)
    ]


def require_groups(ours: Groups, theirs: Groups) -> None:
    """Raises ValueError if an optimizer's groups have other parameters or options than those that
    were saved."""
    if not theirs and ours:
        raise ValueError("it was saved without an optimizer")
    if len(ours) != len(theirs):
        raise ValueError(
            f"it is of another optimizer: of {len(theirs)} groups, and the one here has {len(ours)}"
        )
    for number, (own, saved) in enumerate(zip(ours, theirs, strict=True)):
        for name in sorted(set(own["names"]) ^ set(saved["names"])):
            has, here = ("has", "has not") if name in saved["names"] else ("has no", "has")
            raise ValueError(
                f"it is of another optimizer: its group {number} {has} {name}, and that of the one "
                f"here {here}"
            )
        # One side alone may have more: of a scheduler, or of a later torch.
        more, less = (
            a["options"].keys() - b["options"].keys() for a, b in ((saved, own), (own, saved))
        )
        if more and less:
            raise ValueError(
                f"it is of another optimizer: its group {number} has the option {min(more)}, and "
                f"that of the one here has {min(less)} instead"
            )


def _require_no_more(optimizer: Optimizer | None) -> None:
    """Raises TypeError for an optimizer whose `state_dict` has more than states of parameters. It
    would be lost."""
    if optimizer is None or isinstance(optimizer, ZeroRedundancyOptimizer):
        return
    if more := optimizer.state_dict().keys() - {"state", "param_groups"}:
        raise TypeError(
            f"{type(optimizer).__name__} has more than states of parameters: {', '.join(more)}. "
            "Pass it by a name of its own, not as `optimizer`: each rank then saves its own"
        )


def _boxed(state: str, value: Any, each: Trained) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = local_of(value)
    if state != "step" and value.shape == each.own.shape:
        return Boxed(value, each.place.shape, each.boxes)
    if value.ndim and each.own.shape != each.place.shape:
        raise ValueError(
            f"{state} of {each.place.names[0]} is not elementwise, so no other rank can take a "
            "part of it"
        )
    return Boxed(value, value.shape, whole_box(value.shape))


def _room(state: str, entry: Any, each: Trained) -> Boxed | None:
    if not isinstance(entry, TensorStorageMetadata):
        return None
    if state != "step" and entry.size == each.place.shape:
        own = torch.empty_like(each.own.detach(), dtype=entry.properties.dtype)
        return Boxed(own, entry.size, each.boxes)
    return Boxed(
        torch.empty(entry.size, dtype=entry.properties.dtype), entry.size, whole_box(entry.size)
    )


def _taken(value: Any, each: Trained) -> Any:
    """For the optimizer, what was read into a room."""
    if not isinstance(value, Boxed):
        return value
    parameter: Any = each.place.own
    if isinstance(parameter, DTensor) and value.own.shape == each.own.shape and value.shape:
        return DTensor(value.own, parameter._spec, requires_grad=False)
    return value.own


def _states(saved: Metadata) -> dict[str, dict[str, str]]:
    """Of each parameter's name the entry of each of its states."""
    found: dict[str, dict[str, str]] = {}
    for entry in saved.state_dict_metadata:
        if entry.startswith(OPTIMIZER):
            state, name = entry.removeprefix(OPTIMIZER).split(".", 1)
            found.setdefault(name, {})[state] = entry
    return found


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
