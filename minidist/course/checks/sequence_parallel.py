"""The puzzles and the exercise of the lesson sequence_parallel."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minidist.course.checks.verdict import (
    NotYet,
    check,
    function,
    puzzle,
    require_right,
    same,
    shown,
)
from minidist.instruments.measure import MemoryTracker

B, OWN, C, F = 3, 4, 16, 2  # rows, tokens of a rank, features, hidden features of a rank


whole_outweighs = puzzle(__name__, "whole_outweighs")
SUMMED = {  # which parameters need the sum of their gradients: "" if so; else why not
    "a": "",
    "b": "b is cut as its layer is, and that layer sees all tokens",
    "c": "",
    "d": "",
    "e": "e is cut, and its layer sees all tokens",
}


@check
def needs_the_sum(answer: object) -> None:
    """The letters of the parameters whose gradients are summed over the ranks."""
    try:
        letters = {str(letter).strip().lower() for letter in answer} - {"", ","}  # type: ignore[attr-defined]
    except Exception:  # whatever an odd object raises
        letters = set()
    if not letters or letters - SUMMED.keys():
        what = "letters from a to e, such as ['a', 'b']"
        raise NotYet(f"give {what}, not {shown(answer)}.")
    for letter in sorted(letters):
        if SUMMED[letter]:
            raise NotYet(f"{SUMMED[letter]}.")
    if len(letters) < 3:
        raise NotYet("one more is whole, and each rank uses it on a part only.")


@check
def gather_matmul(answer: object) -> None:
    """The tokens of all ranks, times this rank's columns; only this rank's tokens are kept."""
    given = function(answer)
    for world_size in 2, 3:
        require_right(_trial, given, world_size=world_size, of_rank=": ")


class _Called(nn.Module):
    def __init__(self, answer: Callable[..., Any], columns: torch.Tensor) -> None:
        super().__init__()
        self.answer, self.columns = answer, nn.Parameter(columns)

    def forward(self, x: torch.Tensor) -> Any:
        return self.answer(x, self.columns)


def _trial(answer: Callable[..., Any]) -> str:
    """What is wrong on this rank, if anything."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    kind: Any = dict(dtype=torch.float64)
    own_x = torch.randn(world_size, B, OWN, C, **kind)
    columns = torch.randn(world_size, C, F, **kind)
    grads = torch.randn(world_size, B, world_size * OWN, F, **kind)
    whole = torch.cat(list(own_x), 1)  # (B, T, C)
    tokens = slice(rank * OWN, (rank + 1) * OWN)

    kept = []
    for _ in range(3):  # a thread of gloo may free late what it has sent
        leaf, model = own_x[rank].clone().requires_grad_(), _Called(answer, columns[rank].clone())
        with MemoryTracker(model) as memory:
            x = leaf * 1  # so that its bytes are seen, too
            y = model(x)
            if not isinstance(y, torch.Tensor):
                return f"it returns {shown(y)}, not a tensor"
            if y.shape != grads[rank].shape:
                return f"the output has shape {tuple(y.shape)}, not {tuple(grads[rank].shape)}"
            if not y.requires_grad:
                return "the output has no gradient: autograd has lost x and A"
            y.backward(grads[rank])
        backward = next(phase for phase in memory.phases if phase.name == "backward")
        live = {name: nbytes[backward.start] for name, nbytes in memory.history.items()}
        kept.append((sum(live.values()) - live["parameters"] - y.nbytes - x.nbytes) / x.nbytes)
    if not same(y, whole @ columns[rank]):
        return "the output is not that of all tokens, in the order of the ranks, times A"

    parts = torch.stack([grad @ A.T for grad, A in zip(grads, columns, strict=True)])
    right, mine = parts.sum(0)[:, tokens], parts[rank][:, tokens]
    if wrong := _differs("x", leaf.grad, right, mine, "what the other ranks add"):
        return wrong
    rows, mine = whole.flatten(0, 1), own_x[rank].flatten(0, 1)
    right, mine = rows.T @ grads[rank].flatten(0, 1), mine.T @ grads[rank][:, tokens].flatten(0, 1)
    if wrong := _differs("A", model.columns.grad, right, mine, "the tokens of the other ranks"):
        return wrong
    more = min(kept)
    if more > 1.5:  # a copy of its own tokens may be there; those of two other ranks may not
        return f"all is right, but besides x it keeps {more:.1f} times the size of x for backward"
    return ""


def _differs(name: str, found: Any, right: torch.Tensor, mine: torch.Tensor, others: str) -> str:
    if found is None:
        return f"{name} gets no gradient"
    if same(found, right):
        return ""
    if same(found, mine):
        return f"the gradient of {name} lacks {others}"
    return f"the gradient of {name} is not that of one process"
