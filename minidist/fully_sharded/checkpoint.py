"""Checkpoints on disk: each rank writes its rows, and any number of ranks reads them.

The files are those of `torch.distributed.checkpoint`, which finds out what to read from which of
them. It does not know whether they belong together. So each rank also writes the number of the save
that its file is of. Lesson: fully_sharded
"""

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from minidist.common import agree
from minidist.fully_sharded import sharded_optimizer_states as optimizer_states
from minidist.fully_sharded.sharded_states import as_rows, formed, in_rows
from minidist.fully_sharded.units import Unit, root_of

T = TypeVar("T")
Flat = dict[str, Any]


def save(
    folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Write a sharded model and its optimizer into a folder that all ranks see. All ranks must call
    it. Lesson: fully_sharded

    Parameters are under the names of the bare module, after "model."; the optimizer's states under
    "optimizer.state.<number of the parameter>.". Raises RuntimeError on every rank if one fails.
    """
    root = root_of(model, "save").root
    with formed(model, in_rows):
        state: Flat = {f"model.{name}": value for name, value in model.state_dict().items()}
    if optimizer is not None:
        found = optimizer_states.optim_state_dict(model, optimizer, sharded=True)
        for number, states in found["state"].items():
            state |= {f"optimizer.state.{number}.{name}": v for name, v in states.items()}
        state["optimizer.param_groups"] = json.dumps(found["param_groups"])
    save_number = uuid.uuid4().int >> 65
    for group in root.options.groups:
        save_number = agree.gather(group, save_number)[0]
    state[f"save.{dist.get_rank()}"] = torch.tensor(save_number)
    _together(root, lambda: dcp.save(state, checkpoint_id=folder, process_group=_all(root)))


def load(
    folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Read what `save` has written, by any number of ranks. All ranks must call it.
    Lesson: fully_sharded

    Raises on every rank, and changes nothing: ValueError if the files are of different saves, or of
    another model; RuntimeError if one is missing or broken.
    """
    root = root_of(model, "load").root
    described = _together(root, lambda: dcp.FileSystemReader(folder).read_metadata())
    sharded = {f"model.{name}" for name, _ in model.named_parameters(remove_duplicate=False)}
    state = {
        name: _room(entry, name in sharded or name.startswith("optimizer."), root)
        for name, entry in described.state_dict_metadata.items()
    }
    _together(root, lambda: dcp.load(state, checkpoint_id=folder, process_group=_all(root)))
    _together(root, lambda: _require_one_save(folder, state))
    whole: Flat = {
        "state": {},
        "param_groups": json.loads(state.get("optimizer.param_groups", "[]")),
    }
    for name, value in _under("optimizer.state.", state).items():
        number, key = name.split(".", 1)
        whole["state"].setdefault(int(number), {})[key] = value
    if optimizer is not None:
        _together(root, lambda: optimizer_states.require_fitting(model, optimizer, whole))
    model.load_state_dict(_under("model.", state))
    if optimizer is not None:
        optimizer_states.load_optim_state_dict(model, optimizer, whole)


def _room(entry: Any, sharded: bool, root: Unit) -> Any:
    """Where to read what is in a checkpoint: this rank's rows if it is sharded, else all."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    device = "meta" if sharded else "cpu"
    whole = torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
    return as_rows(whole, root.mesh) if sharded else whole


def _require_one_save(folder: str | Path, state: Flat) -> None:
    saves = {name: int(number) for name, number in state.items() if name.startswith("save.")}
    if len(set(saves.values())) != 1:
        raise ValueError(f"the files in {folder} are of different saves, or of none: {saves}")


def _under(prefix: str, state: Flat) -> Flat:
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def _all(root: Unit) -> dist.ProcessGroup | None:
    """The group of all ranks: of a mesh, all there are."""
    return root.options.groups[0] if len(root.options.groups) == 1 else None


def _together(root: Unit, work: Callable[[], T]) -> T:
    """Have a failure raised on every rank."""
    result: Any = None
    problem: Exception | None = None
    try:
        result = work()
    except CheckpointException as error:  # of all ranks; no Exception to Python
        problem = RuntimeError(str(next(iter(error.failures.values()))[0]))
    except Exception as error:
        problem = error
    agree.raise_along(root.options.groups, problem)
    answer: T = result
    return answer
