"""The puzzles and the exercise of the lesson ddp_in_practice."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from minidist.course import zoo
from minidist.course.checks.verdict import NotYet, check, function, on_ranks, puzzle, shown
from minidist.distributed_data_parallel import DistributedDataParallel
from minidist.instruments.parity import relative_difference

SHARES = [[4, 4], [7, 1], [5, 1, 2], [3, 0, 6]]  # images of each rank


steps_of_an_epoch = puzzle(__name__, "steps_of_an_epoch")
memory_on_eight = puzzle(__name__, "memory_on_eight")


@check
def backward_of_all(answer: object) -> str:
    """Leaves the gradient of the mean over the images of all ranks, however they are shared."""
    backward_of_all = function(answer)
    for rows in SHARES:
        results = on_ranks(_trial, backward_of_all, rows, world_size=len(rows))
        for rank, wrong in enumerate(results):
            if wrong:
                raise NotYet(f"with {_listed(rows)} images on the ranks, rank {rank} {wrong}.")
    return f"also with {_listed(SHARES[-1])} images."


def _listed(rows: list[int]) -> str:
    *first, last = map(str, rows)
    return f"{', '.join(first)} and {last}"


def _trial(backward_of_all: Callable[..., Any], rows: list[int]) -> str:
    """What is wrong on this rank, if anything: the first of it. It goes on, as others wait."""
    generator, total, wrong = torch.Generator().manual_seed(0), sum(rows), list[str]()
    single = zoo.mlp(64, 16, 10, dtype=torch.float64)
    model = DistributedDataParallel(zoo.mlp(64, 16, 10, dtype=torch.float64))
    seen = [0]  # images of a forward pass
    model.module.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    for _ in range(2):
        images = torch.randn(total, 64, generator=generator, dtype=torch.float64)
        labels = torch.randint(10, (total,), generator=generator)
        single.zero_grad()
        model.zero_grad()
        F.cross_entropy(single(images), labels).backward()
        rank = dist.get_rank()
        result = backward_of_all(model, images.split(rows)[rank], labels.split(rows)[rank])
        ours = [p.grad for p in model.parameters() if p.grad is not None]
        wanted = [p.grad for p in single.parameters() if p.grad is not None]
        if not ours and isinstance(result, torch.Tensor) and result.requires_grad:
            wrong.append(f"gets {shown(result)}: call backward() yourself")
        wrong += _complaints(ours, wanted, len(rows), total)
    if max(seen) > max(rows):  # as many as another has may be padding
        wrong.append(f"computes {max(seen)} images: each rank computes its own only")
    return wrong[0] if wrong else ""


def _complaints(
    ours: list[torch.Tensor], wanted: list[torch.Tensor], world_size: int, total: int
) -> list[str]:
    if len(ours) < len(wanted):
        return ["has no gradients"]
    for ratio, hint in {
        1 / world_size: "DDP has divided by the number of ranks already",
        total: "divide by the number of all images",
    }.items():
        if _same(ours, [ratio * gradient for gradient in wanted]):
            return [f"has {ratio:g} × the gradient: {hint}"]
    return [] if _same(ours, wanted) else ["has other gradients than one process"]


def _same(ours: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    # A factor such as 1/3 may have been a tensor of float32.
    return all(relative_difference(a, b) < 1e-6 for a, b in zip(ours, wanted, strict=True))
