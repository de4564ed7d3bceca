"""Answers to the puzzles and the exercise of the lesson collectives."""

import torch
import torch.distributed as dist

from minidist.course.checks import collectives as check


def chain(x):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        before = torch.empty_like(x)
        dist.recv(before, rank - 1)
        x += before
    if rank + 1 < world_size:
        dist.send(x, rank + 1)


def doubling(x):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    distance = 1
    while distance < world_size:
        sending = None
        if rank + distance < world_size:
            sending = dist.isend(x.clone(), rank + distance)
        if rank >= distance:
            before = torch.empty_like(x)
            dist.recv(before, rank - distance)
            x += before
        if sending is not None:
            sending.wait()
        distance *= 2
    return x


def by_all_gather(x):
    everything = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(everything, x)
    x.copy_(sum(everything[: dist.get_rank() + 1]))


def by_a_table(x):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    table = torch.zeros(world_size, *x.shape, dtype=x.dtype)
    table[rank] = x
    dist.all_reduce(table)
    x.copy_(table[: rank + 1].sum(0))


def total(x):
    dist.all_reduce(x)


def exclusive(x):
    mine = x.clone()
    chain(x)
    x -= mine


def returned(x):
    y = x.clone()
    chain(y)
    return y


def from_the_right(x):
    everything = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(everything, x)
    x.copy_(sum(everything[dist.get_rank() :]))


def only_the_neighbour(x):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine, before = x.clone(), torch.empty_like(x)
    if rank + 1 < world_size:
        sending = dist.isend(mine, rank + 1)
    if rank > 0:
        dist.recv(before, rank - 1)
        x += before
    if rank + 1 < world_size:
        sending.wait()


def receive_first(x):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    before = torch.empty_like(x)
    if world_size > 1:
        dist.recv(before, (rank - 1) % world_size)
        dist.send(x + before, (rank + 1) % world_size)


NAMED = {  # what an answer is told
    check.scan: {
        chain: "with one message for each rank.",
        doubling: "One message for each rank would do.",
        by_a_table: "One message for each rank would do.",
    },
}
ANSWERS = {
    check.which: (
        [
            ["broadcast", "all_gather", "reduce_scatter", "all_to_all"],
            (dist.broadcast, dist.all_gather_single, dist.reduce_scatter_single, dist.all_to_all),
            ["Broadcast", "all-gather", "dist.reduce_scatter_tensor", "all to all"],
            ["Broadcast", "AllGather", "reducescatter", "alltoall"],
        ],
        [
            ["broadcast", "all_gather", "all_reduce", "all_to_all"],
            ["broadcast", "all_gather", "AllReduce", "all_to_all"],
            ["scatter", "all_gather", "reduce_scatter", "all_to_all"],
            ["broadcast", "gather", "reduce_scatter", "all_to_all"],
            ["broadcast", "all_gather", "reduce_scatter", "scatter"],
            ["broadcast", "all_gather", "reduce_scatter"],
            ["", "", "", ""],
            [1, 2, 3, 4],
            "broadcast",
        ],
    ),
    check.whole_gradient: ([5, 5.0, torch.tensor([5.0])], [6, 12, 20, 7, 4, "5"]),
    check.scan: (
        [chain, doubling, by_all_gather, by_a_table],
        [
            total,
            exclusive,
            returned,
            from_the_right,
            only_the_neighbour,
            receive_first,
            lambda x: x,
            lambda x: x.unsqueeze_(0),
        ],
    ),
}
