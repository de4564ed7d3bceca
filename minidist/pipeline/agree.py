"""What all ranks of a pipeline must have alike, and problems that all of them must hear of."""

from typing import Any

import torch.distributed as dist


def raise_on_every_rank(group: dist.ProcessGroup, problem: Exception | None) -> None:
    """Every rank of the group calls this. Raises on each of them the first rank's problem, if any
    has one: a ValueError or a TypeError as such, all others as RuntimeError."""
    mine = None if problem is None else (_kind(problem), _words(problem))
    for rank, told in enumerate(gather(group, mine)):
        if told is not None:
            kind, words = told
            raise kind(f"rank {dist.get_global_rank(group, rank)}: {words}") from problem


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


def _kind(problem: Exception) -> type[Exception]:
    return next((k for k in (ValueError, TypeError) if isinstance(problem, k)), RuntimeError)


def _words(problem: Exception) -> str:
    known = type(problem) in (ValueError, TypeError, RuntimeError)
    words = str(problem) if known else f"{type(problem).__name__}: {problem}"
    return " ".join([words, *getattr(problem, "__notes__", ())])
