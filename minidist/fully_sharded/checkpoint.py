"""Checkpoints on disk (lesson 9): each rank writes its rows, and any number of ranks reads them.

The files are those of `torch.distributed.checkpoint`, which finds out what to read from which of
them. It does not know whether they belong together. So each rank also writes the number of the save
that its file is of.
"""

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from minidist.common import agree
from minidist.fully_sharded.module import FullyShardedDataParallel
from minidist.fully_sharded.states import as_rows, require_fitting

T = TypeVar("T")
Flat = dict[str, Any]


def save(
    folder: str | Path,
    model: FullyShardedDataParallel,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Write model and optimizer into a folder that all ranks see. All ranks must call it. Lesson 9.

    Parameters are under the names of the bare module, after "model."; the optimizer's states under
    "optimizer.state.<number of the parameter>.". Raises RuntimeError on every rank if one fails.
    """
    state: Flat = {f"model.{name}": value for name, value in model.sharded_state_dict().items()}
    if optimizer is not None:
        found = model.optim_state_dict(optimizer, sharded=True)
        state |= {
            f"optimizer.state.{number}.{name}": value
            for number, states in found["state"].items()
            for name, value in states.items()
        }
        state["optimizer.param_groups"] = json.dumps(found["param_groups"])
    number = agree.gather(model.process_group, uuid.uuid4().int >> 65)[0]
    for group in model.groups[1:]:
        number = agree.gather(group, number)[0]
    state[f"save.{dist.get_rank()}"] = torch.tensor(number)
    _together(model, lambda: dcp.save(state, checkpoint_id=folder, process_group=_all(model)))


def load(
    folder: str | Path,
    model: FullyShardedDataParallel,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Read what `save` has written, by any number of ranks. All ranks must call it. Lesson 9.

    Raises on every rank, and changes nothing: ValueError if the files are of different saves, or of
    another model; RuntimeError if one is missing or broken.
    """
    described = _together(model, lambda: dcp.FileSystemReader(folder).read_metadata())
    state = {
        name: _room(name, entry, model) for name, entry in described.state_dict_metadata.items()
    }
    _together(model, lambda: dcp.load(state, checkpoint_id=folder, process_group=_all(model)))
    _together(model, lambda: _require_one_save(folder, state))
    whole: Flat = {"state": {}}
    if optimizer is not None:
        for name, value in _under("optimizer.state.", state).items():
            number, key = name.split(".", 1)
            whole["state"].setdefault(int(number), {})[key] = value
        whole["param_groups"] = json.loads(state.get("optimizer.param_groups", "[]"))
        flats = list(model._schedule.flats)
        _together(model, lambda: require_fitting(optimizer, flats, model.parameters(), whole))
    model.load_state_dict(_under("model.", state))
    if optimizer is not None:
        model.load_optim_state_dict(optimizer, whole)


def _room(name: str, entry: Any, model: FullyShardedDataParallel) -> Any:
    """Where to read what is in a checkpoint: of a parameter and what is like it, this rank's rows;
    of a buffer or a number, all."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    dtype, parameters = entry.properties.dtype, dict(model.named_parameters(remove_duplicate=False))
    if name.startswith("optimizer.") or name.removeprefix("model.") in parameters:
        whole = torch.empty(entry.size, dtype=dtype, device="meta")
        return as_rows(whole, model.mesh_of_shards())
    return torch.empty(entry.size, dtype=dtype)


def _require_one_save(folder: str | Path, state: Flat) -> None:
    saves = {name: int(number) for name, number in state.items() if name.startswith("save.")}
    if len(set(saves.values())) != 1:
        raise ValueError(f"the files in {folder} are of different saves, or of none: {saves}")


def _under(prefix: str, state: Flat) -> Flat:
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def _all(model: FullyShardedDataParallel) -> dist.ProcessGroup | None:
    """The group of all ranks: of a mesh, all there are."""
    return model.process_group if len(model.groups) == 1 else None


def _together(model: FullyShardedDataParallel, work: Callable[[], T]) -> T:
    """Have a failure raised on every rank."""
    result: Any = None
    problem: Exception | None = None
    try:
        result = work()
    except CheckpointException as error:  # of all ranks; no Exception to Python
        problem = RuntimeError(str(next(iter(error.failures.values()))[0]))
    except Exception as error:
        problem = error
    model.raise_on_every_rank(problem)
    answer: T = result
    return answer
