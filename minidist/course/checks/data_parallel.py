"""The puzzle and the exercise of the lesson data_parallel."""

from typing import Any

import torch

from minidist.course.checks.verdict import NotYet, check, require_right, shown

# The numbers of rows of the outputs to gather.
SIZES = [[4], [2, 2], [3, 3, 3, 1], [3, 1, 2], [2, 0, 1]]


@check
def running_mean(answer: Any) -> None:
    """What a BatchNorm's running mean has seen after one pass on two devices."""
    said = answer.strip().lower() if isinstance(answer, str) else ""
    if said not in ("nothing", "share", "batch"):
        raise NotYet(f'give "nothing", "share" or "batch", not {shown(answer)}.')
    if said == "nothing":
        raise NotYet("a count is a new attribute of the replica; a buffer is written in place.")
    if said == "batch":
        raise NotYet("no replica has seen the whole batch.")


@check
def gather(answer: Any) -> None:
    """An autograd Function that joins outputs, with a backward of its own."""
    if not isinstance(answer, type) or not issubclass(answer, torch.autograd.Function):
        raise NotYet(f"give the class Gather itself, not {shown(answer)}.")
    require_right(_gather, answer, world_size=1, of_rank="")


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
