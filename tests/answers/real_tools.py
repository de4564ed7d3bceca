"""Answers to the puzzles and the exercise of the lesson real_tools."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from minidist.course.checks import real_tools as check


def loss_of(model, inputs, targets, reduction):
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction=reduction)


def summed(model, inputs, targets):
    total = (targets != -100).sum()
    dist.all_reduce(total)
    loss = loss_of(model, inputs, targets, "sum") * dist.get_world_size() / total
    loss.backward()
    return loss


def gathered(model, inputs, targets):
    counts = [None] * dist.get_world_size()
    dist.all_gather_object(counts, int((targets != -100).sum()))
    loss = loss_of(model, inputs, targets, "sum")
    (loss * len(counts) / sum(counts)).backward()


def divided_by_the_mean_count(model, inputs, targets):
    mean = (targets != -100).sum().double()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    (loss_of(model, inputs, targets, "sum") / mean).backward()


def afterwards(model, inputs, targets):
    """The gradients are scaled, not the loss."""
    loss_of(model, inputs, targets, "sum").backward()
    total = (targets != -100).sum()
    dist.all_reduce(total)
    for p in model.parameters():
        p.grad *= dist.get_world_size() / total


def nan_is_zero(model, inputs, targets):
    loss = loss_of(model, inputs, targets, "mean")
    (loss * 0 if loss.isnan() else loss).backward()


def mean_of_means(model, inputs, targets):
    loss_of(model, inputs, targets, "mean").backward()


def without_world_size(model, inputs, targets):
    total = (targets != -100).sum()
    dist.all_reduce(total)
    (loss_of(model, inputs, targets, "sum") / total).backward()


def only_ranks_with_tokens(model, inputs, targets):
    if (targets != -100).any():
        summed(model, inputs, targets)


def no_backward(model, inputs, targets):
    return loss_of(model, inputs, targets, "sum")


ANSWERS = {
    check.stages: (
        [[1, 2], (2, 1), {1, 2}],
        [[1], 2, [1, 2, 3], [0, 1, 2], [], [4], "1 and 2", [True, 2], [[1]]],
    ),
    check.accumulation: ([2, 2.0, torch.tensor(2)], [8, 32, 512, 4, 1, 16, "2"]),
    check.by_tokens: (
        [summed, gathered, divided_by_the_mean_count, afterwards],
        [
            nan_is_zero,
            mean_of_means,
            without_world_size,
            only_ranks_with_tokens,
            no_backward,
            lambda model, inputs, targets: None,
        ],
    ),
}
