"""Answers to the puzzles and the exercise of the lesson networks."""

import torch
import torch.distributed as dist

from minidist import collectives
from minidist.course.checks import networks as check


def gathered(x, group, all_gather=dist.all_gather):
    pieces = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    all_gather(pieces, x, group=group)
    return torch.stack(pieces)


def across_then_within(x, within, across):
    return gathered(gathered(x, across), within).transpose(0, 1).flatten()


def with_our_collectives(x, within, across):
    of_nodes = gathered(x, across, collectives.all_gather)
    return torch.stack(list(gathered(of_nodes, within)), dim=1).flatten()


def by_leaders(x, within, across):
    """Rank 0 of each node sends for all of its node."""
    own = gathered(x, within).flatten()
    whole = torch.empty(own.numel() * across.size(), dtype=x.dtype)
    if dist.get_rank(within) == 0:
        whole = gathered(own, across).flatten()
    dist.broadcast(whole, group=within, group_src=0)
    return whole


def flat(x, within, across):
    return gathered(x, None).flatten()


def within_then_across(x, within, across):
    return gathered(gathered(x, within), across).flatten()


def in_the_wrong_order(x, within, across):
    return gathered(gathered(x, across), within).flatten()


def of_own_node(x, within, across):
    return gathered(x, within).flatten()


def a_table(x, within, across):
    return gathered(gathered(x, across), within).transpose(0, 1)


def summed(x, within, across):
    dist.all_reduce(x)
    return x.repeat(dist.get_world_size())


ANSWERS = {
    check.flat_rings: (["B"], ["A", "C", "yes", 2, ["A", "B"]]),
    check.tokens: ([500, 500.0], [4000, 250, 2000, 1500, 160_000, "500"]),
    check.hierarchical_all_gather: (
        [across_then_within, with_our_collectives, by_leaders],
        [
            flat,
            within_then_across,
            in_the_wrong_order,
            of_own_node,
            a_table,
            summed,
            lambda x, within, across: None,
        ],
    ),
}
