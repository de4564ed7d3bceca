"""One process in place of the ranks: the gradient and the step that it would have made (lesson:
wrong_in_silence)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from minidist.instruments.watching.mixture import Share, explain, find, percent, seen_by, some
from minidist.instruments.watching.snapshot import Key, Whole, bare_name
from minidist.rank import device

Loss = Callable[[nn.Module, Any], tuple[torch.Tensor, Any]]

# How far gradients and steps may be from those of one process, relatively, by what is computed in.
# Sums in another order differ in the last digits; in bfloat16 there are three.
TOLERANCES = {
    torch.float64: 1e-8,
    torch.float32: 1e-3,
    torch.bfloat16: 5e-2,
    torch.float16: 5e-2,
}


class Reference:
    """A step of one process, from the weights and states before it."""

    def __init__(self, bare: nn.Module, before: Whole, like: nn.Module) -> None:
        self.before, self.model = before, bare
        modes = {bare_name(name): module.training for name, module in like.named_modules()}
        for name, module in bare.named_modules():
            module.training = modes.get(bare_name(name), like.training)
        known = [n for n in self.model.state_dict() if bare_name(n) in before.weights]
        own = {name: before.weights[bare_name(name)] for name in known}
        self.model.load_state_dict(own, strict=False)
        self.names = {bare_name(name): p for name, p in self.model.named_parameters()}
        self.shares: list[Share] = []
        self.noise = 0.0

    def difference(self, after: Whole) -> list[str]:
        """What the model has and the bare one has not, or the reverse."""
        missing = [name for name in self.names if name not in after.weights]
        known = {bare_name(name) for name in self.model.state_dict()}
        more = [name for name in after.weights if name not in known]
        return [f"the model has no {name}, which the bare one has" for name in missing[:1]] + [
            f"the model has {name}, which the bare one has not" for name in more[:1]
        ]

    def add(self, label: str, loss: Loss, batch: Any) -> None:
        """The gradient of a micro-batch, as on its rank."""
        self.model.zero_grad()
        here = device(self.model)
        found = loss(self.model, tree_map_only(torch.Tensor, lambda x: x.to(here), batch))
        if not (isinstance(found, tuple) and len(found) == 2):
            raise TypeError("loss must give the sum over the examples, and their number")
        total, number = found
        total.backward()
        count = float(number)
        own = {n: p.grad.cpu() / count for n, p in self.names.items() if p.grad is not None}
        self.shares.append(Share(label, own, count))

    def weigh(self, clip: float | None) -> torch.Tensor:
        """Give the model the gradient of all examples, clipped; returns each share's weight."""
        count = sum(share.count for share in self.shares)
        weights = [share.count / count for share in self.shares]
        for name, p in self.names.items():
            own = [
                w * s.gradients[name]
                for w, s in zip(weights, self.shares, strict=True)
                if name in s.gradients
            ]
            p.grad = torch.stack(own).sum(0).to(p) if own else None
        largest = float("inf") if clip is None else clip
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), largest))
        if not norm < float("inf"):
            raise ValueError("the gradients are not finite, in one process either")
        self.norm = min(norm, largest)
        scale = min(1.0, largest / (norm + 1e-6))
        return scale * torch.tensor(weights, dtype=torch.float64)

    def gradients(
        self,
        after: Whole,
        options: Mapping[str, Mapping[str, Any]],
        ranks: Sequence[Sequence[Key]],
        wanted: torch.Tensor,
        tolerance: float,
    ) -> list[str]:
        """What is wrong with the gradients that the optimizer saw. options, ranks: by parameter,
        those of the optimizer; by rank, the pieces that it has."""
        found = {}
        count = sum(p.numel() for p in self.names.values())
        for name, p in self.names.items():
            w0, w1 = self.before.weights[name], after.weights[name]
            states = self.before.states.get(name, {}), after.states.get(name, {})
            seen = seen_by(options.get(name, {}), *states, w0, w1)
            if seen is None or p.grad is None:
                continue  # a gradient that should not be there moves weights: see `step`
            (g, lost), right = seen, p.grad.cpu()
            # Some are zero but for rounding, as that of a bias before batch norm. So the measure is
            # at least a hundredth of what is usual for as many elements.
            least = 1e-2 * self.norm * (p.numel() / count) ** 0.5
            size = (right.norm() + least).clamp_min(1e-300)
            off = float((g - right).norm() / size)
            self.noise = max(self.noise, off)
            allowed = tolerance + lost / float(size)
            if off <= allowed:
                p.grad = g.to(p)  # so that rounding is no difference between the steps
            else:
                found[name] = find(name, g, right, self.shares, ranks, allowed)
        return explain(found, wanted, self.shares, len(self.names)) if found else []

    def step(self, optimizer: torch.optim.Optimizer, after: Whole, tolerance: float) -> list[str]:
        """What is wrong with the weights after the step, where gradients are right."""
        for name, p in self.names.items():
            states = self.before.states.get(name, {})
            if states:
                optimizer.state[p] = {
                    k: v.to(p.device, copy=True) if v.ndim else v.clone() for k, v in states.items()
                }
        optimizer.step()
        wrong = {}
        for name, p in self.names.items():
            w0, w1, right = self.before.weights[name], after.weights[name], p.detach().cpu()
            moved = (right - w0).norm()
            lost = torch.finfo(p.dtype).eps * w0.norm() / moved.clamp_min(1e-300)
            off = float((w1 - right).norm() / moved.clamp_min(1e-300))
            if not torch.equal(w1, right) and not off <= tolerance + float(lost):
                wrong[name] = off
        still = [n for n in wrong if torch.equal(self.before.weights[n], after.weights[n])]
        if still:
            return [f"{', '.join(still[:3])} did not move"]
        if not wrong:
            return []
        by = f"{some([*wrong], 0)} moved otherwise, by {percent(max(wrong.values()))} of the step"
        return [f"the gradients are right, the step is not: {by}"]
