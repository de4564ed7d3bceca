"""From what ranks and one process have left: what parts first, by how much, and why."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from minidist.instruments.watching.mixture import Share, explain, find, percent
from minidist.instruments.watching.naive import mixture
from minidist.instruments.watching.snapshot import MODEL, Pieces, whole

Step = dict[str, Any]
Tensors = dict[str, torch.Tensor]
TOLERANCES = {torch.float64: (1e-7, 1e-6), torch.float32: (1e-3, 1e-2)}  # gradients, movements
LOW = 5e-2, 1e-1  # where numbers of 16 bits are computed with
NEGLIGIBLE = 1e-6  # of the largest gradient: noise alone


class UnclearError(Exception):
    """The doctor cannot say, and says why."""


def joined(ranks: Sequence[Step], what: str) -> tuple[Tensors, dict[str, tuple[int, float]]]:
    """Whole tensors from the pieces of all ranks; and those of which two ranks have the same piece
    with other values: by name the rank, and how far it is from the first that has it."""
    pieces: Pieces = {}
    differ: dict[str, tuple[int, float]] = {}
    for rank, step in enumerate(ranks):
        for key, x in step[what].items():
            off = far(x, pieces.setdefault(key, x))
            if not off <= 1e-6:
                differ.setdefault(key[0], (rank, off))
    return whole(pieces), differ


def size(x: torch.Tensor) -> float:
    """The root of the mean square."""
    return x.double().square().mean().sqrt().item() if x.numel() else 0.0


def far(x: torch.Tensor, y: torch.Tensor) -> float:
    """Relative to y."""
    return ((x.double() - y.double()).norm() / y.double().norm().clamp_min(1e-300)).item()


def names(of: Sequence[str]) -> str:
    return of[0] + (f" (and {len(of) - 1} more)" if len(of) > 1 else "")


def sources(ranks: Sequence[Step]) -> list[int]:
    """The ranks with examples of their own. Where ranks share layers, some have the same ones."""
    if not any(step["shares"] for step in ranks):
        return [*range(len(ranks))]
    each = [step["rows"] for step in ranks]
    return [rank for rank, own in enumerate(each) if own not in each[:rank]]


# ---- what is seen without one process ----------------------------------------------------------


def among_ranks(ranks: Sequence[Step], last: Sequence[Step], number: int) -> str:
    """What is wrong with this step, in words, or nothing. last: the last one, when all optimizers
    are known."""
    for step, end in zip(ranks, last, strict=True):
        outside = [name for name in step["outside"] if name in end["outside"]]
        if still := [name for name in outside if _still(step, name)]:
            return f"{names(still)} with a gradient, in no optimizer's groups, did not move"
    _, differ = joined(ranks, "before")
    if differ and number == 1:
        name, (rank, off) = next(iter(differ.items()))
        return (
            f"{names([*differ])} of rank {rank} begin with other weights than rank 0's, by "
            f"{percent(off)}: nobody sends rank 0's"
        )
    if words := _rows({rank: ranks[rank] for rank in sources(ranks)}):
        return words
    if (kept := [*ranks[0]["kept"]]) and number > 1:
        left = f"the gradient of {kept[0]} still has that of step {number - 1} in it"
        return f"{left}: nobody zeroes it"
    for rank, step in enumerate(ranks):
        if words := _options(step, ranks[0]):
            return f"rank {rank} steps with {words} on rank 0"
    norms = [step["norms"][:1] for step in ranks]  # before no_sync
    if number > 1 and any(each != norms[0] for each in norms):
        return "the running means of batch norm are others on each rank: nobody sends rank 0's"
    return ""


def _still(step: Step, name: str) -> bool:
    own = [key for key in step["before"] if key[0] == name]
    return all(torch.equal(step["before"][key], step["after"][key]) for key in own)


def _options(step: Step, other: Step) -> str:
    """The first option of an optimizer that differs."""
    for own, theirs in zip(step["options"], other["options"], strict=False):
        for key in own.keys() & theirs.keys():
            if own[key] != theirs[key]:
                return f"{key} = {_short(own[key])}, and {_short(theirs[key])}"
    return ""


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _rows(ranks: Mapping[int, Step]) -> str:
    """Of those that have examples of their own."""
    for rank, step in ranks.items():
        own, first = step["rows"], {*ranks[0]["rows"]}
        if rank and 2 * (twice := sum(row in first for row in own)) > len(own):
            words = f"{twice} of the {len(own)} examples of rank {rank} are rank 0's as well"
            return f"{words}: no DistributedSampler, or the same seed"
    draws = [step["draws"][0] for step in ranks.values() if step["draws"]]
    same = "ranks with other examples draw the same dropout masks: the same seed"
    return same if len(set(draws)) < len(draws) else ""


# ---- beside one process ------------------------------------------------------------------------


def beside(ranks: Sequence[Step], one: Step) -> tuple[list[str], str, float]:
    """The tensors that part in this step; of what kind; and how far, relative to the step."""
    after, differ = joined(ranks, "after")
    grads, local = joined(ranks, "grads")
    begin, end, wanted = (joined([one], what)[0] for what in ("before", "after", "grads"))
    largest = max(map(size, wanted.values()), default=0.0)
    found: dict[str, dict[str, float]] = {"gradient": {}, "movement": {}}
    for name, w1 in end.items():
        of_gradient, of_movement = LOW if one["low"] else TOLERANCES.get(w1.dtype, LOW)
        g, g1 = grads.get(name), wanted.get(name)
        trained = torch.ones_like(w1, dtype=torch.bool)
        if g1 is not None:
            if size(g1) < NEGLIGIBLE * largest:
                continue
            noise = 1e-3 * size(g1)
            if g is not None and not local:  # all have what the optimizer saw
                noise = max(30 * size(g - g1), noise)
                if not size(g - g1) <= of_gradient * size(g1) + NEGLIGIBLE * largest:
                    found["gradient"][name] = far(g, g1)
            # Adam moves what has next to no gradient by its noise.
            trained = g1.abs() > max(noise, NEGLIGIBLE * largest)
        moved = size((w1 - begin[name])[trained])
        rounding = 4 * torch.finfo(w1.dtype).eps * size(w1[trained])
        off = size((after[name] - w1)[trained])
        if name in differ or not off <= of_movement * moved + rounding:
            found["movement"][name] = off / max(moved, 1e-300)
    kind = "gradient" if found["gradient"] else "movement"
    return [*found[kind]], kind, max(found[kind].values(), default=0.0)


def cause(ranks: Sequence[Step], one: Step, parted: list[str], solos: Sequence[Step]) -> str:
    """Why they part. solos: of each rank with examples of its own, one process that had those."""
    if words := _options(ranks[0], one):
        return f"the optimizer has {words} in one process"
    seen, local = joined(ranks, "grads")
    own, _ = joined([one], "grads")
    shares = []
    for rank, solo in zip(sources(ranks), solos, strict=False):
        before: Tensors = {}
        for part, held in enumerate(solo["backwards"]):
            now, _ = joined([{"held": held}], "held")
            label = f"rank {rank}" + f" part {part}" * (len(solo["backwards"]) > 1)
            shares.append(Share(label, {n: g - before.get(n, 0) for n, g in now.items()}, 1))
            before = now
    told = [n for n in parted if n in seen and all(n in s.gradients for s in shares)]
    if not shares or not told:
        return "why, the gradients do not tell"
    largest = max(told, key=lambda name: own[name].numel())
    wanted, left = mixture(own[largest], [share.gradients[largest] for share in shares])
    if left > 1e-2:
        raise UnclearError(
            "In one process examples act on each other, or they are not the first dimension."
        )
    keys = [[(MODEL + n, *piece) for n, *piece in step["grads"]] for step in ranks]
    found = {n: find(n, seen[n], own[n], shares, keys, 1e-3) for n in told}
    words = "; ".join(explain(found, wanted, shares, len(own)))
    return f"on rank 0 {words}" if local else words
