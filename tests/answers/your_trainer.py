"""Answers to the puzzles and the exercise of the lesson your_trainer."""

import torch
import torch.distributed as dist

from minidist.course.checks import your_trainer as check


def two_sums(shards, replicated, data, pipeline):
    cut, whole = torch.zeros(2, dtype=torch.float64)
    for each in shards:
        cut += each.square().sum()
    for each in replicated:
        whole += each.square().sum()
    dist.all_reduce(cut, group=data)
    total = cut + whole
    dist.all_reduce(total, group=pipeline)
    return total.sqrt()


def a_share_of_what_is_whole(shards, replicated, data, pipeline):
    """What is whole counts an N-th on each rank; so all is summed alike."""
    shares = [sum(each.pow(2).sum() for each in replicated) / data.size()] if replicated else []
    total = torch.stack([*(each.pow(2).sum() for each in shards), *shares]).sum()
    for group in pipeline, data:
        dist.all_reduce(total, group=group)
    return float(total) ** 0.5


def all_over_data(shards, replicated, data, pipeline):
    total = torch.stack([each.square().sum() for each in (*shards, *replicated)]).sum()
    dist.all_reduce(total, group=data)
    dist.all_reduce(total, group=pipeline)
    return total.sqrt()


def this_rank(shards, replicated, data, pipeline):
    return torch.cat([*shards, *replicated]).norm()


def no_root(shards, replicated, data, pipeline):
    return two_sums(shards, replicated, data, pipeline) ** 2


def where_something_is_whole(shards, replicated, data, pipeline):
    """Only the first stage calls the second sum."""
    cut = torch.stack([each.square().sum() for each in shards]).sum()
    dist.all_reduce(cut, group=data)
    if replicated:
        cut += sum(each.square().sum() for each in replicated)
        dist.all_reduce(cut, group=pipeline)
    return cut.sqrt()


def in_place(shards, replicated, data, pipeline):
    for each in shards:
        each.square_()
    return two_sums(shards, replicated, data, pipeline)


AVERAGE, JOIN, UNSCALE, CLIP, STEP = (
    *("average along data", "join along tensor", "unscale", "norm and clip", "step"),
)
ANSWERS = {
    check.unscaled_late: (["too short", "Too short"], ["too long", "nothing"]),
    check.order: (
        [[UNSCALE, AVERAGE, CLIP, JOIN, STEP], (UNSCALE, AVERAGE, CLIP, JOIN, STEP)],
        [
            [AVERAGE, UNSCALE, CLIP, JOIN, STEP],
            [AVERAGE, UNSCALE, JOIN, CLIP, STEP],
            [AVERAGE, CLIP, UNSCALE, JOIN, STEP],
            [UNSCALE, CLIP, AVERAGE, JOIN, STEP],
            [AVERAGE, UNSCALE, CLIP, STEP, JOIN],
            [AVERAGE, UNSCALE, CLIP, STEP],
        ],
    ),
    check.norm_of_stages: (
        [two_sums, a_share_of_what_is_whole],
        [all_over_data, this_rank, no_root, where_something_is_whole, in_place],
    ),
}
