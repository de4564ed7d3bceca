"""Model and optimizer as one process has them, in parts (lesson: surviving_failures).

    model.<name>                    a parameter or buffer, by its name in the bare module
    optimizer.<state>.<name>        a state of that parameter, of its shape; or a number, its steps

A tied parameter has an entry under each of its names. The options of the optimizer's groups are no
entries; see `groups`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from minidist.mixed import MixedParallel
from minidist.saving.parts import Part, cuts_of, part_of
from minidist.saving.rank_states import copied
from minidist.zero import ZeroRedundancyOptimizer

Groups = Sequence[dict[str, Any]]
MODEL, OPTIMIZER = "model.", "optimizer."


class States:
    """What this rank has of a model and its optimizer. No rank waits for another in here."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Raises ValueError for an optimizer that is not the model's; TypeError for a model with
        more than tensors, or an optimizer with more than states of parameters."""
        self.optimizer, bare = optimizer, _without_ddp(model)
        bare = bare.module if isinstance(bare, MixedParallel) else bare
        state = bare.state_dict(keep_vars=True)  # first: FSDP may reshard before it
        own = {*model.parameters(), *model.buffers()}
        self._cuts = dict(cuts_of(model))
        self._names: dict[torch.Tensor, list[str]] = {}
        for name, value in state.items():
            if not isinstance(value, torch.Tensor) or value not in own:
                raise TypeError(f"{name} of the model is neither a parameter nor a buffer")
            self._names.setdefault(value, []).append(name.replace("_orig_mod.", ""))
        groups = [] if optimizer is None else optimizer.param_groups
        self._parameters = [parameter for group in groups for parameter in group["params"]]
        if any(parameter not in self._names for parameter in self._parameters):
            raise ValueError("the optimizer has a parameter that is not the model's")
        self._saved = {} if optimizer is None else optimizer.state_dict()
        if more := self._saved.keys() - {"state", "param_groups"}:
            raise TypeError(
                f"{type(optimizer).__name__} has more than states of parameters: "
                f"{', '.join(more)}. Pass it by a name of its own, not as `optimizer`"
            )

    # ---- to save ---------------------------------------------------------------------------

    def of_model(self) -> dict[str, Any]:
        """Its parts."""
        found: dict[str, Any] = {}
        for tensor, names in self._names.items():
            # Buffers, such as a batch norm's, may be others on each rank.
            part = part_of(tensor, self._cuts.get(tensor), isinstance(tensor, nn.Parameter))
            found |= {MODEL + name: part for name in names}
        return found

    def of_optimizer(self) -> dict[str, Any]:
        """The parts of its states; and numbers."""
        found: dict[str, Any] = {}
        for number, states in self._saved.get("state", {}).items():
            parameter = self._parameters[number]
            names = self._names[parameter]
            for state, value in states.items():
                entry = self._entry(state, value, parameter)
                found |= {f"{OPTIMIZER}{state}.{name}": entry for name in names}
        return found

    def _entry(self, state: str, value: Any, parameter: torch.Tensor) -> Any:
        cut = self._cuts.get(parameter)
        if not isinstance(value, torch.Tensor):
            return copied(state, value)
        if value.shape == parameter.shape:
            return part_of(value, cut)
        if value.ndim and (cut is not None or isinstance(parameter, DTensor)):
            raise ValueError(
                f"{state} of {self._names[parameter][0]} is not elementwise, so no other rank can "
                "take a part of it"
            )
        return part_of(value)

    def groups(self) -> Groups:
        """Of each group of the optimizer its options, and the names of its parameters here."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [
            {"options": _options(g), "names": [n for p in g["params"] for n in self._names[p]]}
            for g in groups
        ]

    # ---- to load ---------------------------------------------------------------------------

    def rooms(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Where to read to: the model itself, and new states for the optimizer. saved: what the
        checkpoint says of its entries. Raises ValueError if it is of another model."""
        rooms = self.of_model()
        for entry, own in rooms.items():
            _require_fitting(entry.removeprefix(MODEL), own, saved.get(entry))
        states: dict[str, list[str]] = {}
        for entry in saved:
            if entry.startswith(OPTIMIZER):
                state, name = entry.removeprefix(OPTIMIZER).split(".", 1)
                states.setdefault(name, []).append(state)
        self._rooms: dict[tuple[int, str], tuple[str, Any]] = {}
        for number, parameter in enumerate(self._parameters):
            name = self._names[parameter][0]
            for state in states.get(name, []):
                entry = f"{OPTIMIZER}{state}.{name}"
                like, cut, room = saved[entry], self._cuts.get(parameter), None
                if isinstance(like, TensorStorageMetadata):
                    dtype = like.properties.dtype
                    if like.size == rooms[MODEL + name].shape and state != "step":
                        room = self._empty_like(parameter, dtype)
                    else:
                        room, cut = torch.empty(like.size, dtype=dtype), None
                rooms[entry] = room if room is None else part_of(room, cut)
                self._rooms[number, state] = entry, room
        return rooms

    def _empty_like(self, parameter: Any, dtype: torch.dtype) -> torch.Tensor:
        """A new state of a parameter: what this rank has of it."""
        if not isinstance(self.optimizer, ZeroRedundancyOptimizer):
            return torch.empty_like(parameter.detach(), dtype=dtype)
        rows = self.optimizer.cut.own(parameter.detach())
        whole: torch.Tensor = self.optimizer.whole(parameter, torch.empty_like(rows, dtype=dtype))
        return whole

    def put(self, read: Mapping[str, Any], groups: Groups) -> None:
        """Give the optimizer what was read into its rooms. (The model's were its parameters.)"""
        if self.optimizer is None:
            return
        states: dict[int, dict[str, Any]] = {}
        for (number, state), (entry, room) in self._rooms.items():
            states.setdefault(number, {})[state] = read[entry] if room is None else room
        packed = [
            _options(ours) | theirs["options"] | {"params": ours["params"]}
            for ours, theirs in zip(self._saved["param_groups"], groups, strict=True)
        ]
        self.optimizer.load_state_dict({"state": states, "param_groups": packed})


def _require_fitting(name: str, own: Any, saved: Any) -> None:
    if saved is None or isinstance(own, Part) != isinstance(saved, TensorStorageMetadata):
        raise ValueError(f"it is of another model: it has no {name}")
    if isinstance(own, Part):
        theirs, ours = (saved.size, saved.properties.dtype), (own.shape, own.dtype)
        if theirs != ours:
            raise ValueError(
                f"it is of another model: {name} has shape {tuple(theirs[0])}, {theirs[1]}, and "
                f"the model's has {tuple(ours[0])}, {ours[1]}"
            )


def merged(ranks: Sequence[Groups]) -> Groups:
    """The groups of all ranks together, of which each may have other parameters."""
    return [
        {"options": of[0]["options"], "names": {name for each in of for name in each["names"]}}
        for of in zip(*ranks, strict=True)
    ]


def require_groups(ours: Groups, theirs: Groups) -> None:
    """Raises ValueError if an optimizer's groups have other parameters or options than those that
    were saved. (Of options one side may have more: of a scheduler, or of a later torch.)"""
    if not theirs:
        raise ValueError("it was saved without an optimizer")
    if len(ours) != len(theirs):
        raise ValueError(
            f"it is of another optimizer: of {len(theirs)} groups, and the one here has {len(ours)}"
        )
    for number, (own, saved) in enumerate(zip(ours, theirs, strict=True)):
        if differ := {*own["names"]} ^ {*saved["names"]}:
            raise ValueError(
                f"it is of another optimizer: only one of them has {min(differ)} in group {number}"
            )
        more, less = (
            {*saved["options"]} - {*own["options"]},
            {*own["options"]} - {*saved["options"]},
        )
        if more and less:
            raise ValueError(
                f"it is of another optimizer, with {min(more)}, and without {min(less)}"
            )


def _without_ddp(model: Any) -> Any:
    """Torch's DistributedDataParallel names a state by `module.`; it may be in a compiled one."""
    model = model._modules.get("_orig_mod", model)
    return model.module if isinstance(model, TorchDDP) else model


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
