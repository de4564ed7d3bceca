"""From what ranks and one process have left: what parts first, by how much, and why."""

from collections.abc import Sequence
from typing import Any

import torch

from minidist.doctor.runs import Process

Step = dict[str, Any]
Whole = dict[str, torch.Tensor]
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-2}
LOW = 0.1  # where numbers of 16 bits are computed with
NEGLIGIBLE = 1e-6  # of the largest gradient: noise alone


def whole(ranks: Sequence[Step], what: str) -> tuple[Whole, dict[str, tuple[int, float]]]:
    """Whole tensors from the pieces of all ranks; and those of which two ranks have the same piece
    with other values: by name the rank, and how far it is from the first that has it."""
    found: Whole = {}
    first: dict[Any, torch.Tensor] = {}
    differ: dict[str, tuple[int, float]] = {}
    for rank, step in enumerate(ranks):
        for name, (shape, pieces) in step[what].items():
            for at, x in pieces.items():
                theirs = first.setdefault((name, at, x.shape), x)
                off = far(x, theirs)
                if not off <= 1e-6:
                    differ.setdefault(name, (rank, off))
                if theirs is x:
                    full = found.setdefault(name, torch.zeros(shape, dtype=x.dtype))
                    full[tuple(slice(a, a + n) for a, n in zip(at, x.shape, strict=True))] = x
    return found, differ


def far(x: torch.Tensor, y: torch.Tensor) -> float:
    """Relative to y."""
    return ((x.double() - y.double()).norm() / y.double().norm().clamp_min(1e-300)).item()


def names(of: Sequence[str]) -> str:
    return of[0] + (f" and {len(of) - 1} more" if len(of) > 1 else "")


def sources(ranks: Sequence[Step]) -> list[int]:
    """The ranks with examples of their own: where layers are shared, the first."""
    return [0] if any(step["sharded"] for step in ranks) else [*range(len(ranks))]


# ---- what is seen without one process ----------------------------------------------------------


def among_ranks(ranks: Sequence[Step], number: int) -> str:
    """What is wrong with this step, in words, or nothing."""
    outside = [name for step in ranks for name in step["outside"]]
    if outside:
        return (
            f"{names(list(dict.fromkeys(outside)))} gets a gradient and is in no optimizer's groups"
        )
    _, differ = whole(ranks, "before")
    if differ and number == 1:
        name, (rank, off) = next(iter(differ.items()))
        return (
            f"{names([*differ])} of rank {rank} begins {100 * off:.2g} % away from that of rank 0: "
            "nobody sends rank 0's weights"
        )
    if len(sources(ranks)) > 1 and (words := _rows(ranks) or _draws(ranks)):
        return words
    if (kept := ranks[0]["kept"]) and number > 1:
        return f"the gradient of {kept} still has that of step {number - 1} in it: nobody zeroes it"
    for rank, step in enumerate(ranks):
        if words := _options(step, ranks[0]):
            return f"rank {rank} steps with {words} on rank 0"
    norms = [step["norms"] for step in ranks]
    if number > 1 and any(each != norms[0] for each in norms):
        return "the running means of batch norm are others on each rank: nobody sends rank 0's"
    return ""


def _options(step: Step, other: Step) -> str:
    """The first option of an optimizer that differs."""
    for own, theirs in zip(step["options"], other["options"], strict=False):
        for key in own.keys() & theirs.keys():
            if own[key] != theirs[key]:
                return f"{key} = {own[key]:g}, and {theirs[key]:g}"
    return ""


def _rows(ranks: Sequence[Step]) -> str:
    rows = []
    for step in ranks:
        first = [next((x for x in each if x is not None), ()) for each in step["inputs"]]
        rows.append([row.numpy().tobytes() for x in first for row in x.cpu().float()])
    for rank, own in enumerate(rows[1:], start=1):
        twice = sum(row in rows[0] for row in own)
        if 2 * twice > len(own):
            return (
                f"{twice} of the {len(own)} examples of rank {rank} are rank 0's as well: "
                "no DistributedSampler, or the same seed"
            )
    return ""


def _draws(ranks: Sequence[Step]) -> str:
    draws = [step["draws"][0] for step in ranks if step["draws"]]
    if len(set(draws)) < len(draws):
        return "ranks with other examples draw the same dropout masks: the same seed"
    return ""


# ---- beside one process ------------------------------------------------------------------------


def beside(
    ranks: Sequence[Step], one: Step, tolerance: float | None
) -> tuple[list[str], str, float]:
    """The tensors that part in this step, of what kind, and by which part of the step."""
    before, _ = whole(ranks, "before")
    after, differ = whole(ranks, "after")
    grads, local = whole(ranks, "grads")
    own = {what: whole([one], what)[0] for what in ("before", "after", "grads")}
    largest = max(
        (g.double().square().mean().sqrt().item() for g in own["grads"].values()), default=0.0
    )
    found: dict[str, dict[str, float]] = {"gradient": {}, "step": {}}
    for name, w1 in own["after"].items():
        g1, allowed = own["grads"].get(name), tolerance or TOLERANCES.get(w1.dtype, LOW)
        if tolerance is None and one["low"]:
            allowed = LOW
        seen, noise, trained = grads.get(name), 0.0, torch.ones_like(w1, dtype=torch.bool)
        if g1 is not None:
            size = g1.double().square().mean().sqrt().item()
            if size < NEGLIGIBLE * largest:
                continue
            if seen is not None and not local:
                off = far(seen, g1)
                if not off <= allowed:
                    found["gradient"][name] = off
                noise = (seen - g1).double().square().mean().sqrt().item()
            # Adam moves what has next to no gradient by its noise.
            trained = g1.abs() > max(30 * noise, 1e-3 * size, NEGLIGIBLE * largest)
        moved = (w1 - own["before"][name])[trained].double().norm()
        off = ((after[name] - w1)[trained].double().norm() / moved.clamp_min(1e-300)).item()
        digits = (
            4 * torch.finfo(w1.dtype).eps * w1[trained].double().norm() / moved.clamp_min(1e-300)
        )
        if name in differ or not off <= allowed + digits:
            found["step"][name] = off
    kind = "gradient" if found["gradient"] else "step"
    return [*found[kind]], kind, max(found[kind].values(), default=0.0)


def cause(
    ranks: Sequence[Step], one: Step, parted: list[str], kind: str, solos: list[Process]
) -> str:
    """Why they part. solos: of each rank with examples of its own, one process that had those."""
    if words := _options(ranks[0], one):
        return f"the optimizer has {words} in one process"
    number = len(solos[0].steps) if solos else 0
    name = max(parted, key=lambda each: one["after"][each][0].numel())
    columns, labels = [], []
    for rank, solo in enumerate(solos):
        backwards = solo.steps[number - 1]["backwards"]
        for part, made in enumerate(backwards):
            if name in made:
                columns.append(whole([{"made": made}], "made")[0][name])
                labels.append(f"rank {rank}" + f" part {part}" * (len(backwards) > 1))
    own, wanted = whole([one], "grads")[0], None
    if columns and name in own:
        wanted, rest = mixture(own[name], columns)
    seen, local = whole(ranks, "grads")
    if name not in seen or wanted is None or rest > 1e-2:
        return "the gradients cannot be told apart by rank"
    where = " on rank 0" if local else ""
    weights, rest = mixture(seen[name], columns)
    if weights is None:
        return "the gradients cannot be told apart by rank"
    if rest > 3e-2:
        return f"the gradient{where} is no mixture of the ranks' ({100 * rest:.0f} % is something else)"
    if kind == "step" and not local and far(weights, wanted) < 1e-2:
        return "the gradients are right, but the weights moved otherwise"
    return f"the gradient{where} is {_in_words(weights, wanted, labels, len(ranks))}"


def mixture(g: torch.Tensor, columns: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, float]:
    a = torch.stack([each.flatten() for each in columns], 1).double()
    b = g.flatten().double()[:, None]
    if len(a) < 2 * len(columns) or not (a.isfinite().all() and b.isfinite().all()):
        return None, 1.0
    x = torch.linalg.lstsq(a, b, driver="gelsd").solution
    return x[:, 0], ((a @ x - b).norm() / b.norm().clamp_min(1e-300)).item()


def _in_words(
    weights: torch.Tensor, wanted: torch.Tensor, labels: list[str], world_size: int
) -> str:
    ratio = weights / wanted
    if ratio.max() - ratio.min() < 2e-2 * ratio.abs().max():
        times, parts = ratio.mean().item(), len(labels) // world_size
        guesses = {
            world_size: "the ranks' sum, not their mean?",
            1 / world_size: "divided by the number of ranks twice?",
            parts: "not divided by the number of micro-batches?",
            1 / parts: "divided by the number of micro-batches twice?",
        }
        why = [words for value, words in guesses.items() if abs(times / value - 1) < 2e-2]
        return f"{times:.4g} times one process's" + (f" ({why[0]})" if why else "")
    shares = [
        f"{label} {w:.3g} for {v:.3g}"
        for label, w, v in zip(labels, weights.tolist(), wanted.tolist(), strict=True)
    ]
    lost = [abs(each) < 1e-3 for each in (weights / weights.abs().max()).tolist()]
    why = (
        "some examples are not averaged over the ranks"
        if any(lost)
        else "averaged by other weights, or clipped before"
    )
    return f"made of {', '.join(shares)} ({why}?)"
