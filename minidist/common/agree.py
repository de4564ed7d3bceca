"""What all ranks of a group must have alike, and problems that all of them must hear of."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from minidist.common.groups import message_device


@contextmanager
def together(*groups: dist.ProcessGroup) -> Iterator[None]:
    """What one rank of the group, or of a mesh with its group along each axis, raises within the
    block, all ranks raise after it: that of the first such rank, with its number, a ValueError or a
    TypeError as such, any other as RuntimeError. In the block no rank waits for another."""
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    if not any(on_any_rank([problem is not None], *groups)):  # most times none has one
        return
    found: Any = None
    if problem is not None:
        known = type(problem) in (ValueError, TypeError, RuntimeError)
        words = str(problem) if known else f"{type(problem).__name__}: {problem}"
        words = " ".join([words, *getattr(problem, "__notes__", ())])
        found = _kind(problem), f"rank {dist.get_rank()}: {words}"
    for group in groups:  # those of the next one must hear it too
        found = next(filter(None, gather(group, found)), None)
    kind, words = found
    raise kind(words) from problem


def on_any_rank(true_here: Sequence[bool], *groups: dist.ProcessGroup) -> list[bool]:
    """What is true on one rank at least, by one all_reduce for each group."""
    found = list(true_here)
    for group in groups:
        if dist.get_world_size(group) > 1:
            flags = torch.tensor(found, dtype=torch.uint8, device=message_device(group))
            dist.all_reduce(flags, dist.ReduceOp.MAX, group)
            found = flags.bool().tolist()
    return found


def require_same(group: dist.ProcessGroup, arguments: dict[str, Any]) -> None:
    """Raises ValueError, on every rank, that names the first argument that is not rank 0's."""
    everyone = gather(group, arguments)
    for rank, theirs in enumerate(everyone):
        for name, value in everyone[0].items():
            if theirs[name] != value:
                first, other = (dist.get_global_rank(group, r) for r in (0, rank))
                said = f"rank {first} says {value}, rank {other} says {theirs[name]}"
                raise ValueError(f"the ranks disagree about {name}: {said}")


def gather(group: dist.ProcessGroup, mine: Any) -> list[Any]:
    """What every rank has, by rank."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def whole_state(group: dist.ProcessGroup, own: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """What each rank has of a `state_dict`, put together on the CPU of every rank, by `names`."""
    everything: dict[str, Any] = {}
    for part in gather(group, tree_map_only(torch.Tensor, torch.Tensor.cpu, own)):
        everything |= part
    return {name: everything[name] for name in names}


def _kind(problem: Exception) -> type[Exception]:
    return next((k for k in (ValueError, TypeError) if isinstance(problem, k)), RuntimeError)
