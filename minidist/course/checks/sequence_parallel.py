"""The puzzles and the exercise of the lesson sequence_parallel."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minidist.course.checks.verdict import check, function, hints, number, require_right, shown
from minidist.instruments.measure import MemoryTracker

B, OWN, C, F = 3, 4, 16, 2  # rows, tokens of a rank, features, hidden features of a rank


@check
@hints(
    "The two formulas are above: **Gathered**, and **Logits stay**.",
    "Write both down for B·T tokens, V columns and t ranks: one all_gather of all logits, "
    "against three all_reduces of a number for each token.",
    "Divide the first by the second. B·T and (t − 1)/t cancel. V stays above, and below it "
    "the three all_reduces, each of which sends twice.",
)
def gathered_logits(answer: object) -> str:
    """How many times as many bytes as three all_reduces of B·T numbers: 128,256 logits, 8 ranks."""
    number(
        answer,
        21_376,
        wrong={
            128_256 / 3: "an all_reduce sends twice as much as an all_gather of the same tensor",
            128_256 / 2: "there are three all_reduces",
            128_256: "there are three all_reduces, and each sends twice as much as an all_gather",
            128_256 / 48: "the ranks together have all 128,256 columns, and each must get them all",
            128_256 / 24: "the ranks together have all 128,256 columns, and each must get them all",
            1 / 21_376: "that is the other way round",
        },
    )
    return "7/8 · B·T · 128,256 numbers against 3 · 2 · 7/8 · B·T. Neither B·T nor t matters."


@check
@hints(
    "Take the last two lines of the table above.",
    "Leave out what has an a in it, and set t to 16. sbh stands in both lines, and cancels.",
    "Divide (10 + 24/t) by (34/t). Type it as an expression; then nothing is rounded.",
)
def of_sixteen(answer: object) -> str:
    """(10 + 24/t) / (34/t) for t = 16: what a rank keeps without and with sequence parallel."""
    number(
        answer,
        92 / 17,
        wrong={
            13 / 4.25: "that is for 8 ranks",
            19 / 4: "that is without dropout, whose masks the table has",
            34 / 11.5: "that compares one process with a rank of the first kind",
            16: "that compares one process with a rank of the second kind",
            17 / 92: "that is the other way round",
            11.5: "that is what a rank keeps without sequence parallel",
            34 / 16: "that is what a rank keeps with sequence parallel",
        },
    )
    return "10 + 24/16 = 11.5 bytes against 34/16 = 2.1: 5.4 times less. With 8 ranks it is 3.1."


@check
@hints(
    "The product saves its input for backward, and those are the tokens of all ranks. In an"
    " autograd function of your own, you say what is kept.",
    "Forward: gather, multiply, and save x and A alone. Only the gradient of A needs all "
    "tokens, so backward can get them in the way forward did.",
    "Backward: gather x again, for the gradient of A. The gradient of x comes from all "
    "ranks: multiply `gradient` by A transposed, and reduce_scatter it along the tokens.",
)
def gather_matmul(answer: object) -> str:
    """The tokens of all ranks, times this rank's columns; only this rank's tokens are kept."""
    given = function(answer)
    for world_size in 2, 3:
        require_right(_trial, given, world_size=world_size, of_rank=": ")
    return "output and gradients are those of one process, and a rank keeps its own tokens only."


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
    if not torch.allclose(y, whole @ columns[rank], rtol=1e-10, atol=1e-12):
        return "the output is not that of all tokens, in the order of the ranks, times A"

    parts = torch.stack([grad @ A.T for grad, A in zip(grads, columns, strict=True)])
    right, mine = parts.sum(0)[:, tokens], parts[rank][:, tokens]
    if wrong := _differs("x", leaf.grad, right, {"what the other ranks add": mine}):
        return wrong
    rows, mine = whole.flatten(0, 1), own_x[rank].flatten(0, 1)
    right, mine = rows.T @ grads[rank].flatten(0, 1), mine.T @ grads[rank][:, tokens].flatten(0, 1)
    if wrong := _differs("A", model.columns.grad, right, {"the tokens of the other ranks": mine}):
        return wrong

    more = min(kept)
    if more > 1.5:  # a copy of its own tokens may be there; those of two other ranks may not
        return f"all is right, but besides x it keeps {more:.1f} times the size of x for backward"
    return ""


def _differs(
    name: str, found: torch.Tensor | None, right: torch.Tensor, lacks: dict[str, torch.Tensor]
) -> str:
    if found is None:
        return f"{name} gets no gradient"
    if found.shape == right.shape and torch.allclose(found, right, rtol=1e-10, atol=1e-12):
        return ""
    for what, part in lacks.items():
        if found.shape == part.shape and torch.allclose(found, part, rtol=1e-10, atol=1e-12):
            return f"the gradient of {name} lacks {what}"
    return f"the gradient of {name} is not that of one process"
