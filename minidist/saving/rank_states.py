"""What each rank has for itself: its random numbers, its data, its scheduler (lesson:
surviving_failures).

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
from torch.utils._pytree import tree_flatten


def copied(name: str, state: Any) -> Any:
    """A state as it is now, on the CPU: the run that goes on may have no GPU. Raises TypeError that
    names it if it has more in it than tensors and plain values: no `load` could read it."""
    file = io.BytesIO()
    try:
        torch.save(state, file)
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        words = f"the state of {name} has more in it than tensors and plain values"
        raise TypeError(words) from error


def state_of(name: str, each: Any) -> Any:
    """Its `state_dict()`, copied. Raises TypeError that names it if it has none."""
    if not hasattr(each, "state_dict"):
        raise TypeError(f"{name} has no state_dict() to save: it is {each!r:.60}")
    return copied(name, each.state_dict())


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
        seed = int(torch.randint(2**32 - 1, ())) + rank // len(ranks)
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in found:
            numpy.random.seed(seed % 2**32)


def state_for(name: str, ranks: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> Any:
    """Of those that all ranks have saved, the state for this one. Raises ValueError if there is
    none: where the ranks' differ, another number of ranks cannot share them out."""
    if any(name not in states for states in ranks):
        raise ValueError(f"it has no state of {name}")
    if len(ranks) == world_size:
        return ranks[rank][name]
    if not all(_same(states[name], ranks[0][name]) for states in ranks):
        raise ValueError(
            f"the state of {name} is another one on each of {len(ranks)} ranks, so {world_size} "
            "ranks cannot take it. (The state of md.saving.Batches is the same on all ranks)"
        )
    return ranks[0][name]


def _same(a: Any, b: Any) -> bool:
    (ours, tree), (theirs, other) = tree_flatten(a), tree_flatten(b)
    return tree == other and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        for x, y in zip(ours, theirs, strict=True)
    )
