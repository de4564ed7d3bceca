"""What each rank has for itself: its random numbers, its data, its scheduler (lesson: scaling_out).

With as many ranks as before, each takes its own again. With another number of ranks, all take what
was the same on all. Random numbers are others on each rank: rank r takes those of rank r, or a new
stream if there was none.
"""

import io
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.serialization import get_unsafe_globals_in_checkpoint
from torch.utils._pytree import tree_map


def capture() -> dict[str, Any]:
    """The random numbers of this process: of torch, Python, and NumPy if it is in use."""
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    if "numpy.random" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        found["numpy"] = [name, keys.tolist(), *rest]
    return found


def restore(ranks: Sequence[Mapping[str, Any]], rank: int) -> None:
    """Go on with the random numbers of what `capture` gave on each rank."""
    found = ranks[rank % len(ranks)]
    torch.set_rng_state(found["torch"])
    random.setstate(found["python"])
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state(found["cuda"])
    if "numpy" in found:
        import numpy

        numpy.random.set_state(tuple(found["numpy"]))
    if rank >= len(ranks):  # a stream that no rank had
        seed = int(torch.randint(2**32 - 1, ())) + rank
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in found:
            numpy.random.seed(seed % 2**32)


def states_of(others: Mapping[str, Any]) -> dict[str, Any]:
    """The state of each. Raises TypeError that names one which has none."""
    for name, each in others.items():
        if not hasattr(each, "state_dict"):
            raise TypeError(f"{name} has no state_dict() to save: it is {each!r:.60}")
    return {name: each.state_dict() for name, each in others.items()}


def require_loadable(parts: Mapping[str, Any]) -> None:
    """Raises TypeError that names which part has more in it than tensors and plain values: it would
    be written, and no `load` could read it."""
    for name, part in parts.items():
        file = io.BytesIO()
        try:
            torch.save(tree_map(_but_tensors, part), file)
            file.seek(0)
            strange = get_unsafe_globals_in_checkpoint(file)
        except Exception as error:
            raise TypeError(f"{name} cannot be written: {error}") from error
        if strange:
            raise TypeError(
                f"{name} has more in it than tensors and plain values: {', '.join(strange)}"
            )


def _but_tensors(value: Any) -> Any:
    """A tensor always loads, and the check is made at every save: it takes none along."""
    return None if type(value) in (torch.Tensor, nn.Parameter) else value


def state_for(name: str, ranks: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> Any:
    """Of those that all ranks have saved, the state for this one. Raises ValueError if there is
    none: where the ranks' differ, another number of ranks cannot share them out."""
    if any(name not in states for states in ranks):
        raise ValueError(f"it has no state of {name}")
    if len(ranks) != world_size and not all(_same(r[name], ranks[0][name]) for r in ranks):
        raise ValueError(
            f"the state of {name} is another one on each of {len(ranks)} ranks, so {world_size} "
            "ranks cannot take it. (The state of md.saving.Batches is the same on all ranks)"
        )
    return ranks[rank if len(ranks) == world_size else 0][name]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and bool(a == b)
