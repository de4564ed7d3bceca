"""The puzzles and the exercises of the lesson data_parallel."""

import math
from typing import Any

import torch

from minidist.course.checks.verdict import NotYet, check, puzzle, require_right, shown

# The numbers of rows of the outputs to gather.
SIZES = [[4], [2, 2], [3, 3, 3, 1], [3, 1, 2], [2, 0, 1]]


device_0_sends = puzzle(__name__, "device_0_sends")


@check
def weights_of_losses(answer: Any) -> str:
    """By what to multiply four mean losses, of 3, 3, 3 and 1 images, to get the mean of all."""
    try:
        weights = [float(weight) for weight in answer]
    except Exception:
        raise NotYet(f"give a list of four numbers, not {shown(answer)}.") from None
    if len(weights) != 4:
        raise NotYet(f"give four numbers, not {len(weights)}.")
    hints = {
        (0.25,) * 4: "then the one image of the last share counts three times as much as another",
        (3.0, 3.0, 3.0, 1.0): "that is the sum of the losses. Divide by the number of images",
        (0.1,) * 4: "the loss of a share of three images is the mean of three",
        (1.0,) * 4: "that is the sum of four means",
    }
    if _close(weights, (0.3, 0.3, 0.3, 0.1)):
        return "each share counts by its number of images, of 10."
    said = [hint for wrong, hint in hints.items() if _close(weights, wrong)]
    raise NotYet(f"{said[0] if said else 'each share counts by its number of images'}.")


def _close(ours: list[float], wanted: tuple[float, ...]) -> bool:
    return all(math.isclose(a, b, abs_tol=1e-6) for a, b in zip(ours, wanted, strict=True))


@check
def gather(answer: Any) -> None:
    """An autograd Function that joins outputs, with a backward of its own."""
    _require_right(_gather, answer, "Gather")


def _require_right(trial: Any, answer: Any, name: str) -> None:
    if not isinstance(answer, type) or not issubclass(answer, torch.autograd.Function):
        raise NotYet(f"give the class {name} itself, not {shown(answer)}.")
    require_right(trial, answer, world_size=1, of_rank="")


def _gather(gather: Any) -> str:
    """What is wrong, if anything."""
    generator = torch.Generator().manual_seed(0)
    for sizes in SIZES:
        outputs = [torch.randn(rows, 5, generator=generator).requires_grad_() for rows in sizes]
        weight = torch.randn(sum(sizes), 5, generator=generator)
        joined, wanted = gather.apply(*outputs), torch.cat(outputs)
        gather.apply(torch.ones(1), torch.ones(1))  # what it keeps must be in its own ctx
        on = f"with outputs of {', '.join(map(str, sizes))} rows,"
        if not isinstance(joined, torch.Tensor) or not torch.equal(joined, wanted):
            return f"{on} forward gives other values than torch.cat"
        if not joined.requires_grad:
            return f"{on} autograd cannot go back through what comes out"
        try:
            (joined * weight).sum().backward()
        except RuntimeError as error:
            if "invalid gradient" not in str(error):
                raise
            return f"{on} an output gets a gradient of another shape than its own"
        for i, right in enumerate(weight.split(sizes)):
            gradient = outputs[i].grad
            if gradient is None:
                return f"{on} output {i} gets no gradient"
            if not torch.equal(gradient, right):
                return f"{on} output {i} gets another gradient than from torch.cat"
    return ""


@check
def broadcast(answer: Any) -> None:
    """An autograd Function that copies a parameter, with a backward of its own."""
    _require_right(_broadcast, answer, "Broadcast")


def _broadcast(broadcast: Any) -> str:
    """What is wrong, if anything."""
    generator = torch.Generator().manual_seed(0)
    for used, unused in ((1, 0), (4, 0), (3, 1)):
        n = used + unused
        on = f"with {n} {'copy' if n == 1 else 'copies'}"
        on += f", {unused} of them not used," if unused else ","
        parameter = torch.randn(5, generator=generator, requires_grad=True)
        copies = broadcast.apply(parameter, n)
        if not isinstance(copies, tuple) or len(copies) != n:
            return f"{on} forward must return a tuple of {n}"
        if not all(isinstance(x, torch.Tensor) and x.equal(parameter) for x in copies):
            return f"{on} forward gives other values than the parameter's"
        if len({x.data_ptr() for x in copies}) < n:
            return f"{on} two of them share their memory"
        if not all(x.requires_grad for x in copies):
            return f"{on} autograd cannot go back through what comes out"
        weights = [torch.randn(5, generator=generator) for _ in range(used)]
        sum((x * w).sum() for x, w in zip(copies, weights, strict=False)).backward()
        total, found = torch.stack(weights).sum(0), parameter.grad
        if found is None:
            return f"{on} the parameter gets no gradient"
        if used > 1 and torch.allclose(found, total / n):
            return f"{on} the parameter gets the mean of their gradients, not their sum"
        if not torch.allclose(found, total):
            return f"{on} the parameter gets another gradient than the sum of theirs"
    return ""
