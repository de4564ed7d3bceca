"""The puzzles and the exercise of the lesson ddp_in_practice."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from minidist.course import zoo
from minidist.course.checks.verdict import NotYet, check, function, hints, number, on_ranks, shown
from minidist.distributed_data_parallel import DistributedDataParallel
from minidist.instruments.parity import relative_difference

SHARES = [[4, 4], [7, 1], [5, 1, 2], [3, 0, 6]]  # images of each rank


@check
@hints(
    'The formula is under "What fills a rank\'s memory?". Leave out the activations and what'
    " lasts briefly.",
    "Adam keeps two numbers for each parameter. What does momentum keep, and which of all that "
    "does DDP divide among the GPUs?",
    "Add up the bytes of all numbers that belong to one parameter. A billion bytes are a GB, so "
    "multiply by the billions of parameters.",
)
def memory_of_a_replica(answer: object) -> str:
    """GB on each of 8 GPUs: 7 billion parameters, momentum, float32, without activations."""
    number(
        answer,
        84,
        "GB",
        {
            10.5: "DDP does not divide anything among the GPUs: each holds a replica",
            112: "Adam keeps two numbers for each parameter, momentum one; and one copy of the "
            "gradients is enough",
            672: "that is all 8 GPUs together",
            28: "those are the parameters alone",
            56: "momentum is a number for each parameter, besides the parameter and its gradient",
            12: "that is the memory of one billion parameters",
            84e9: "give GB",
        },
    )
    return "12 bytes for each parameter, on every GPU. It does not fit into 80 GB."


@check
@hints(
    'Look under "Does each image come once?" at what a `DistributedSampler` gives to each rank.',
    "The ranks take a step together, so count the steps of one rank. How many images has it?",
    "Divide its images by the size of a batch, and round up: the last batch is smaller, and"
    " a step as well.",
)
def steps_of_an_epoch(answer: object) -> str:
    """Steps of each of 8 ranks: 1,000 images, a DistributedSampler, batches of 32 on a rank."""
    number(
        answer,
        4,
        "steps",
        {
            32: "that is one rank alone; here 8 ranks share the images",
            31: "that is one rank alone; here 8 ranks share the images",
            3: "the last batch is smaller, but it is a step, too",
            125: "that is the number of images of a rank",
            256: "that is the number of steps of all ranks together, for a batch of 1",
        },
    )
    return "125 images for each rank make three batches of 32 and one of 29."


@check
@hints(
    'It went wrong under "Break it: shares of different sizes". Remember that DDP divides '
    "by the number of ranks, not of images.",
    "Begin with the sum of the losses of this rank's images, not with their mean. To know "
    "how many images all ranks have, they must tell each other.",
    "Two numbers scale the sum: one that the ranks find together, and one that undoes what DDP "
    "does to it. A rank without images goes backward, too: its sum is zero.",
)
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
    ratios = {
        1 / world_size: "DDP has divided by the number of ranks already",
        world_size: "it is multiplied by the number of ranks",
        total: "divide by the number of all images",
        total / world_size: "that is the sum over the images, divided by the number of ranks",
    }
    for ratio, hint in ratios.items():
        if ratio != 1 and _same(ours, [ratio * gradient for gradient in wanted]):
            return [f"has {ratio:g} × the gradient: {hint}"]
    return [] if _same(ours, wanted) else ["has other gradients than one process"]


def _same(ours: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    # A factor such as 1/3 may have been a tensor of float32.
    return all(relative_difference(a, b) < 1e-6 for a, b in zip(ours, wanted, strict=True))
