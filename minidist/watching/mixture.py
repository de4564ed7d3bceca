"""From which micro-batches, and with which weights, is the gradient that an optimizer saw? (lesson:
wrong_in_silence)"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minidist.watching.naive import mixture
from minidist.watching.snapshot import Key, box

State = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Share:
    """A micro-batch of a rank: the gradient of the mean over its examples, by names."""

    label: str
    gradients: Mapping[str, torch.Tensor]
    count: float


def seen_by(
    options: Mapping[str, Any], before: State, after: State, w0: torch.Tensor, w1: torch.Tensor
) -> tuple[torch.Tensor, float] | None:
    """The gradient that SGD or Adam saw of a parameter, from what it left, and by how much rounding
    can have changed it, relatively. None if it saw none, or is another optimizer."""
    kept = all(torch.equal(value, before[k]) for k, value in after.items() if k in before)
    if options.get("maximize") or options.get("dampening") or (kept and torch.equal(w0, w1)):
        return None
    eps, lost = torch.finfo(w0.dtype).eps, 0.0
    if "exp_avg" in after:
        beta = options["betas"][0]
        g = (after["exp_avg"] - beta * before.get("exp_avg", 0)) / (1 - beta)
    elif "momentum_buffer" in after:
        g = after["momentum_buffer"] - options["momentum"] * before.get("momentum_buffer", 0)
    elif options.get("momentum") == 0:
        # A small step of a large weight loses digits.
        g = (w0 - w1) / options["lr"]
        lost = float(eps * w0.norm() / options["lr"] / g.norm().clamp_min(1e-300))
    else:
        return None
    if not options.get("decoupled_weight_decay"):
        g = g - options.get("weight_decay", 0) * w0
    return g, lost


def where_wrong(
    entry: str, g: torch.Tensor, wanted: torch.Tensor, ranks: Sequence[Iterable[Key]], off: float
) -> tuple[torch.Tensor, str]:
    """Which elements are those of a wrong part of a gradient, and words for the ranks that have it;
    all of them, and no words, if every part is wrong. ranks: the pieces of each. off: how much is
    wrong."""
    at = torch.zeros_like(g, dtype=torch.bool)
    wrong, right = set(), set()
    for rank, keys in enumerate(ranks):
        for piece, offsets, sizes in keys:
            if piece == entry:
                here = box(offsets, sizes)
                bad = bool((g[here] - wanted[here]).norm() > off * wanted[here].norm())
                (wrong if bad else right).add(rank)
                at[here] |= bad
    if not wrong or not right - wrong:
        return torch.ones_like(at), ""
    return at, f" in the part of rank {', '.join(map(str, sorted(wrong)))}"


@dataclass(frozen=True)
class Finding:
    """A parameter's wrong gradient: the weight of each share in it, if it has elements enough to
    tell; what part is something else; and words for where."""

    weights: torch.Tensor | None
    left: float
    place: str


def find(
    g: torch.Tensor, name: str, shares: Sequence[Share], at: torch.Tensor, place: str
) -> Finding:
    """Whose gradients are in g, where `at` says."""
    columns = [
        s.gradients[name][at] if name in s.gradients else torch.zeros_like(g[at]) for s in shares
    ]
    if g[at].numel() < 2 * len(shares) or not g.isfinite().all():
        return Finding(None, 1.0, place)
    return Finding(*mixture(g[at], columns), place)


def explain(
    found: Mapping[str, Finding], wanted: torch.Tensor, shares: Sequence[Share], count: int
) -> list[str]:
    """In words: what the gradients are made of, and what they should be. wanted: the weights (n,).
    count: of all parameters."""
    names: dict[str, list[str]] = {}
    for name, finding in found.items():
        if finding.weights is not None:
            words = finding.place + _words(finding.weights, finding.left, wanted, shares)
            names.setdefault(words, []).append(name)
    return [f"the gradients of {_some(of, count)}{words}" for words, of in names.items()] or [
        f"the gradients of {_some([*found], count)} are wrong"
    ]


def _some(names: Sequence[str], count: int) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return "all parameters" if len(names) == count else ", ".join(names[:3]) + more


def _words(
    weights: torch.Tensor, left: float, wanted: torch.Tensor, shares: Sequence[Share]
) -> str:
    if left > 1e-2:
        return " are no mixture of the ranks' gradients: something else is in them"
    ratio = weights / wanted
    if ratio.abs().max() < 1e-6:
        return " did not arrive"
    if ratio.max() - ratio.min() < 1e-2 * ratio.abs().max():
        times = ratio.mean().item()
        return f" are {times:.4g} times what they should be{_cause(times, len(wanted))}"
    listed = ", ".join(
        f"{share.label}: {round(w, 5) + 0.0:.3g} for {round(v, 5):.3g}"
        for share, w, v in zip(shares[:8], weights.tolist(), wanted.tolist(), strict=False)
    )
    listed += ", …" if len(shares) > 8 else ""
    if weights.max() - weights.min() < 1e-2 * weights.max():
        listed += ": a mean of means, over different numbers of examples?"
    elif abs(ratio.max() - len(shares)) < 1e-2 and ratio.abs().sum() - len(shares) < 1e-2:
        listed += ": was nothing averaged?"
    return f" weigh {listed}"


def _cause(times: float, shares: int) -> str:
    known = {
        float(shares): ": a sum where a mean should be?",
        1 / shares: ": divided once too often?",
        -1.0: ": the wrong sign?",
    }
    return next((words for x, words in known.items() if abs(times / x - 1) < 1e-2), "")
