"""What a training step leaves: weights, buffers and optimizer states; and how far two of them are
apart (lesson: distributed_data_parallel)."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from minidist.instruments.watching.snapshot import Key, Snapshot, box

State = dict[str, torch.Tensor]


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU, and it stays as it is."""
    return tensor.detach().cpu().clone()


def buffers_of(model: nn.Module) -> State:
    """What is in its checkpoint and not trained."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {k: copy_of(v) for k, v in model.state_dict().items() if k not in parameters}


def state_of(model: nn.Module, optimizer: Any, wanted: State) -> tuple[State, list[Key]]:
    """Weights, buffers and optimizer states, by the names of the bare module, and which pieces of
    them are this rank's. All other elements are those that are `wanted`."""
    # An optimizer around another one, as those of md.averaging, has more than states.
    here = Snapshot(model, getattr(optimizer, "optimizer", optimizer))
    found, keys = {name: tensor.clone() for name, tensor in wanted.items()}, []
    for (entry, offsets, sizes), piece in here.pieces.items():
        kind, name = entry.split(".", 1)
        if kind == "optimizer":
            name = "{} of {}".format(*name.split(".", 1))
        if name not in found or found[name].shape != here.shapes[entry]:
            found[name] = piece.new_empty(here.shapes[entry])
        found[name][box(offsets, sizes)] = piece
        keys.append((name, offsets, sizes))
    return found, keys


def missing(wanted: State, keys: Iterable[Key]) -> list[str]:
    """What the ranks together do not have: a tensor, or a part of one."""
    lacks = {name: torch.ones(tensor.shape, dtype=torch.bool) for name, tensor in wanted.items()}
    for name, offsets, sizes in keys:
        lacks[name][box(offsets, sizes)] = False
    counts = {name: int(each.sum()) for name, each in lacks.items()}
    return [f"{name} is missing: {n} elements are on no rank" for name, n in counts.items() if n]


def differences(ours: State, wanted: State) -> Iterator[tuple[str, float]]:
    """Each tensor's difference, and words for it."""
    for name, b in wanted.items():
        a = ours.get(name)
        if a is None:
            yield f"{name} is missing", math.inf
        elif a.shape != b.shape:
            yield f"{name} has shape {tuple(a.shape)}, not {tuple(b.shape)}", math.inf
        else:
            yield differs(name, relative_difference(a, b))
    for name in ours:
        if name not in wanted:
            yield f"{name} is there, and one process has none", math.inf


def differs(what: str, difference: float) -> tuple[str, float]:
    """A difference, and words for it."""
    return f"{what} differs from one process, relatively by {difference:.1e}", difference


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """max|a - b| / max|b|: 0 if all elements are equal, inf if one is not a number. (Not
    nan: Python's max may leave it out, and no comparison with it holds.)

    Raises ValueError if the shapes differ, which broadcasting would hide.
    Lesson: distributed_data_parallel.
    """
    if a.shape != b.shape:
        raise ValueError(f"tensors of shapes {tuple(a.shape)} and {tuple(b.shape)} do not compare")
    if a.numel() == 0 or torch.equal(a, b):
        return 0.0
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    apart = ((a - b).abs().max() / b.abs().max()).item()
    return math.inf if math.isnan(apart) else apart
