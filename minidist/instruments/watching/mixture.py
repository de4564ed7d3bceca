"""From which micro-batches, and with which weights, is the gradient that an optimizer saw? (lesson:
wrong_in_silence)"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minidist.instruments.watching.naive import mixture
from minidist.instruments.watching.snapshot import MODEL, Key, box

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
    """The gradient that SGD or Adam saw of a parameter, from what it left, and the norm of what
    rounding can have changed in it. None if it saw none, or is another optimizer."""
    kept = all(torch.equal(value, before[k]) for k, value in after.items() if k in before)
    if options.get("maximize") or options.get("dampening") or (kept and torch.equal(w0, w1)):
        return None
    if "exp_avg" in after and "decoupled_weight_decay" not in options:
        return None  # another's Adam, whose decay may be either
    is_sgd = "dampening" in options  # of torch's optimizers no other has it
    if "exp_avg_sq" in after:
        beta = options["betas"][0]
        g = (after["exp_avg"] - beta * before.get("exp_avg", 0)) / (1 - beta)
        source = after["exp_avg"].norm() / (1 - beta)
    elif is_sgd and "momentum_buffer" in after:
        g = after["momentum_buffer"] - options["momentum"] * before.get("momentum_buffer", 0)
        source = after["momentum_buffer"].norm()
    elif is_sgd and options["momentum"] == 0:
        g = (w0 - w1) / options["lr"]
        source = w0.norm() / options["lr"]
    else:
        return None
    if not options.get("decoupled_weight_decay"):
        g = g - options.get("weight_decay", 0) * w0
    # A small difference of large numbers has lost digits.
    return g, float(torch.finfo(w0.dtype).eps * source)


@dataclass(frozen=True)
class Finding:
    """A wrong gradient: the weight of each share in it; which part of it is something else; and
    words for whose part it is. No weights, if they do not explain what is wrong."""

    weights: torch.Tensor | None
    left: float = 1.0
    place: str = ""


def find(
    name: str,
    g: torch.Tensor,
    wanted: torch.Tensor,
    shares: Sequence[Share],
    ranks: Sequence[Iterable[Key]],
    allowed: float,
) -> list[Finding]:
    """Whose gradients are in g: in all of it, or in each part of it that is wrong, if another
    rank's is right, or wrong otherwise. ranks: the pieces of each. allowed: the largest difference
    that is no fault."""

    def off(at: Any) -> float:
        return float((g[at] - wanted[at]).norm() / wanted[at].norm().clamp_min(1e-300))

    def fit(at: Any, place: str = "") -> Finding:
        if not g[at].any():
            return Finding(torch.zeros(len(shares), dtype=torch.float64), 0.0, place)
        columns = [s.gradients.get(name, torch.zeros_like(g))[at] for s in shares]
        if g[at].numel() < 2 * len(shares) or not g[at].isfinite().all():
            return Finding(None, 1.0, place)
        weights, left = mixture(g[at], columns)
        return Finding(weights if left < 0.1 * off(at) else None, left, place)

    holders: dict[tuple[Any, Any], list[int]] = {}
    for rank, keys in enumerate(ranks):
        for entry, offsets, sizes in keys:
            if entry == MODEL + name:
                holders.setdefault((offsets, sizes), []).append(rank)
    parts: dict[str, torch.Tensor] = {}  # by whose it is
    for piece, of in holders.items():
        if off(here := box(*piece)) > allowed:
            place = f" in the part of rank {', '.join(map(str, of))}"
            parts.setdefault(place, torch.zeros_like(g, dtype=torch.bool))[here] = True
    whole = fit(...)
    everywhere = len(parts) == len({tuple(of) for of in holders.values()})
    if not parts or (everywhere and (len(parts) == 1 or whole.weights is not None)):
        return [whole]
    return [fit(at, place) for place, at in parts.items()]


def explain(
    found: Mapping[str, Sequence[Finding]],
    wanted: torch.Tensor,
    shares: Sequence[Share],
    count: int,
) -> list[str]:
    """In words: what the gradients are made of, and what they should be. wanted: the weights (n,).
    count: of all parameters."""
    names: dict[str, list[str]] = {}
    small = []  # of which nothing can be said
    for name, findings in found.items():
        for finding in findings:
            words = finding.place + " are no mixture of the ranks' gradients"
            if finding.weights is not None:
                words = finding.place + _words(finding.weights, wanted, shares)
            if finding.left < 1:
                names.setdefault(words, []).append(name)
            else:
                small.append(name)
    lines = names or {" are wrong": small}
    return [f"the gradients of {some(of, count)}{words}" for words, of in lines.items()][:8]


def percent(part: float) -> str:
    """Of two digits, and whole above a hundred."""
    return f"{100 * part:.2g} %" if part < 0.995 else f"{100 * part:.0f} %"


def some(names: Sequence[str], count: int) -> str:
    """Three of them. count: of all there are."""
    names = [*dict.fromkeys(names)]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return "all parameters" if len(names) == count else ", ".join(names[:3]) + more


def _words(weights: torch.Tensor, wanted: torch.Tensor, shares: Sequence[Share]) -> str:
    ratio = weights / wanted
    if ratio.abs().max() < 1e-6:
        return " did not arrive"
    if ratio.max() - ratio.min() < 1e-2 * ratio.abs().max():
        times = ratio.mean().item()
        return f" are {times:.6g} times what they should be{_cause(times, shares)}"
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


def _cause(times: float, shares: Sequence[Share]) -> str:
    """Of a factor that is the number of ranks, or of micro-batches, or of those of a rank."""
    ranks = len({share.label.partition(" part")[0] for share in shares})
    known = {-1.0: "the wrong sign"}
    for count in {ranks, len(shares), len(shares) // ranks} - {1}:
        known |= {float(count): "a sum where a mean should be", 1 / count: "divided twice"}
    return next((f": {words}?" for x, words in known.items() if abs(times / x - 1) < 1e-3), "")
