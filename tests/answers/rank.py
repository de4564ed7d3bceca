"""Answers to the puzzles and the exercise of the lesson rank."""

import torch
import torch.distributed as dist

from minidist import collectives
from minidist.course.checks import rank as check


def neighbours():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return rank, world_size, (rank + 1) % world_size, (rank - 1) % world_size


def even_first(x):
    rank, world_size, right, left = neighbours()
    if world_size == 1:
        return x
    received = torch.empty_like(x)
    for turn in (0, 1):
        if rank % 2 == turn:
            dist.send(x, right)
        else:
            dist.recv(received, left)
    return received


def one_breaks_the_circle(x):
    rank, world_size, right, left = neighbours()
    received = x.clone()
    if world_size > 1 and rank == 0:
        dist.recv(received, left)
        dist.send(x, right)
    elif world_size > 1:
        dist.send(x, right)
        dist.recv(received, left)
    return received


def immediate(x):
    _, world_size, right, left = neighbours()
    received = torch.zeros_like(x)
    if world_size == 1:
        return x.clone()
    sending = dist.isend(x, right)
    dist.recv(received, left)
    sending.wait()
    return received


def batched(x):
    _, world_size, right, left = neighbours()
    if world_size == 1:
        return x
    received = torch.empty_like(x)
    work = [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, received, left)]
    for each in dist.batch_isend_irecv(work):
        each.wait()
    return received


def by_all_gather(x):
    _, world_size, _, left = neighbours()
    everything = [torch.empty_like(x) for _ in range(world_size)]
    dist.all_gather(everything, x)
    return everything[left]


def by_ours(x):
    _, world_size, _, left = neighbours()
    everything = [torch.empty_like(x) for _ in range(world_size)]
    collectives.all_gather(everything, x)
    return everything[left]


def all_send_first(x):
    _, world_size, right, left = neighbours()
    received = torch.empty_like(x)
    if world_size > 1:
        dist.send(x, right)
        dist.recv(received, left)
        return received
    return x


def does_not_wait_to_have_sent(x):
    _, world_size, right, left = neighbours()
    received = torch.empty_like(x)
    if world_size == 1:
        return x
    dist.isend(x.clone(), right)
    dist.recv(received, left)
    return received


def does_not_wait_to_have_received(x):
    _, world_size, right, left = neighbours()
    received = torch.empty_like(x)
    if world_size == 1:
        return x
    receiving = dist.irecv(received, left)
    dist.send(x, right)
    return received if receiving else x


def no_branch_for_one(x):
    _, _, right, left = neighbours()
    received = torch.empty_like(x)
    sending = dist.isend(x, right)
    dist.recv(received, left)
    sending.wait()
    return received


def to_the_left(x):
    _, world_size, right, left = neighbours()
    if world_size == 1:
        return x
    received = torch.empty_like(x)
    sending = dist.isend(x, left)
    dist.recv(received, right)
    sending.wait()
    return received


def into_x(x):
    x.copy_(by_all_gather(x))
    return x


def flat(x):
    return by_all_gather(x).flatten()


NAMED = {  # what an answer is told
    check.shift: {all_send_first: "its neighbour never receives. Perhaps all send first."}
}
ANSWERS = {
    check.two_tokens: ([120, 120.0, torch.tensor(120)], [80, 110, 220, 240, 0.12, 90, "120 ms"]),
    check.twins: (
        [
            [[0, 4], [1, 5], [2, 6], [3, 7]],
            ((4, 0), (7, 3), (1, 5), (2, 6)),
            [range(local, 8, 4) for local in range(4)],
            torch.tensor([[0, 4], [1, 5], [2, 6], [3, 7]]),
            [[0, 7], [1, 6], [2, 5], [3, 4]],
        ],
        [
            [[0, 1, 2, 3], [4, 5, 6, 7]],
            [[0, 1], [2, 3], [4, 5], [6, 7]],
            [[0, 2, 4, 6], [1, 3, 5, 7]],
            [[0, 1, 2, 4], [3, 5, 6, 7]],
            [[3, 5, 6, 7], [0, 1, 2, 4]],
            [list(range(8))],
            [[0, 4], [1, 5]],
            [[0.5, 4], [1, 5], [2, 6], [3, 7]],
            ["04", "15", "26", "37"],
            [0, 4, 1, 5, 2, 6, 3, 7],
            "0 4 1 5 2 6 3 7",
        ],
    ),
    check.shift: (
        [even_first, one_breaks_the_circle, immediate, batched],
        [
            by_all_gather,
            by_ours,
            all_send_first,
            does_not_wait_to_have_sent,
            does_not_wait_to_have_received,
            no_branch_for_one,
            to_the_left,
            into_x,
            flat,
            lambda x: x,
            lambda x: torch.zeros_like(x),
            lambda x: x.tolist(),
        ],
    ),
}
