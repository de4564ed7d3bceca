"""What all ranks of a group must have alike, and problems that all of them must hear of."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map


def raise_on_every_rank(group: dist.ProcessGroup, problem: Exception | None) -> None:
    """Every rank of the group calls this. If any rank has a problem, all of them raise that of the
    first such rank: a ValueError or a TypeError as such, any other as RuntimeError."""
    raise_along([group], problem)


def raise_along(groups: Sequence[dist.ProcessGroup], problem: Exception | None) -> None:
    """The same for the ranks of a mesh, each of which is in one group along every axis."""
    pass_on_along(groups, _named(problem))


@contextmanager
def together(*groups: dist.ProcessGroup) -> Iterator[None]:
    """What one rank raises within the block, all ranks of its group raise after it, or of all
    groups along the axes of a mesh. In the block no rank waits for another."""
    problem = None
    try:
        yield
    except Exception as error:
        problem = error
    raise_along(groups, problem)


def pass_on(group: dist.ProcessGroup, problem: Exception | None) -> None:
    """The same for a problem that another group has raised already, by these functions: its message
    names the rank."""
    pass_on_along([group], problem)


def pass_on_along(groups: Sequence[dist.ProcessGroup], problem: Exception | None) -> None:
    """The same along every axis of a mesh: those of the next group must hear it too."""
    for group in groups:
        mine = None if problem is None else (_kind(problem), str(problem))
        if failed := next(filter(None, gather(group, mine)), None):
            kind, words = failed
            cause = problem and problem.__cause__
            problem = kind(words)
            problem.__cause__ = cause
    if problem is not None:
        raise problem


def require_same(group: dist.ProcessGroup, arguments: dict[str, Any]) -> None:
    """Raises ValueError, on every rank of the group, that names the first argument that is not the
    same as rank 0's."""
    everyone = gather(group, arguments)
    for rank, theirs in enumerate(everyone):
        for name, value in everyone[0].items():
            if theirs[name] != value:
                first, other = (dist.get_global_rank(group, r) for r in (0, rank))
                raise ValueError(
                    f"the ranks disagree about {name}: rank {first} says {value}, "
                    f"rank {other} says {theirs[name]}"
                )


def gather(group: dist.ProcessGroup, mine: Any) -> list[Any]:
    """What every rank has, by rank."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def whole_state(group: dist.ProcessGroup, own: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """What each rank has of a `state_dict`, put together on the CPU of every rank, by `names`."""
    everything: dict[str, Any] = {}
    for part in gather(group, tree_map(_to_cpu, own)):
        everything |= part
    return {name: everything[name] for name in names}


def _to_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _named(problem: Exception | None) -> Exception | None:
    """With the number of this rank, and of a kind that `raise_on_every_rank` raises."""
    if problem is None:
        return None
    named = _kind(problem)(f"rank {dist.get_rank()}: {_words(problem)}")
    named.__cause__ = problem
    return named


def _kind(problem: Exception) -> type[Exception]:
    return next((k for k in (ValueError, TypeError) if isinstance(problem, k)), RuntimeError)


def _words(problem: Exception) -> str:
    known = type(problem) in (ValueError, TypeError, RuntimeError)
    words = str(problem) if known else f"{type(problem).__name__}: {problem}"
    return " ".join([words, *getattr(problem, "__notes__", ())])
