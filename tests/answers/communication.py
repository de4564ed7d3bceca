"""Answers to the puzzles and the exercise of the lesson communication."""

import torch
import torch.distributed as dist

from minidist import collectives
from minidist.course.checks import communication as check


def swap(outgoing, incoming, partner):
    sending = dist.isend(outgoing, partner)
    dist.recv(incoming, partner)
    sending.wait()


def halves_then_back(x):
    rank, distance, held = dist.get_rank(), dist.get_world_size() // 2, []
    mine = x
    while distance:
        low, high = mine.chunk(2)
        keep, give = (high, low) if rank & distance else (low, high)
        arrived = torch.empty_like(keep)
        swap(give, arrived, rank ^ distance)
        keep += arrived
        held.append((keep, give, rank ^ distance))
        mine, distance = keep, distance // 2
    for keep, give, partner in reversed(held):
        swap(keep, give, partner)


def recursive(x, ranks=None):
    """By recursion, with send and recv in turns."""
    ranks = range(dist.get_world_size()) if ranks is None else ranks
    half = len(ranks) // 2
    if not half:
        return
    place = ranks.index(dist.get_rank())
    low = place < half
    keep, give = x.chunk(2) if low else x.chunk(2)[::-1]
    partner, arrived = ranks[(place + half) % len(ranks)], torch.empty_like(keep)
    one = (dist.send, give) if low else (dist.recv, arrived)
    other = (dist.recv, arrived) if low else (dist.send, give)
    for call, tensor in (one, other):
        call(tensor, partner)
    keep += arrived
    recursive(keep, ranks[:half] if low else ranks[half:])
    for call, tensor in ((dist.send, keep), (dist.recv, give))[:: 1 if low else -1]:
        call(tensor, partner)


def of_the_library(x):
    collectives.all_reduce(x, algorithm="halving_doubling")


def ring(x):
    collectives.all_reduce(x, algorithm="ring")


def recursive_doubling(x):
    collectives.all_reduce(x, algorithm="recursive_doubling")


def without_messages(x):
    dist.all_reduce(x)


def halving_alone(x):
    rank, distance, mine = dist.get_rank(), dist.get_world_size() // 2, x
    while distance:
        low, high = mine.chunk(2)
        keep, give = (high, low) if rank & distance else (low, high)
        arrived = torch.empty_like(keep)
        swap(give, arrived, rank ^ distance)
        keep += arrived
        mine, distance = keep, distance // 2


def halving_then_all_gather(x):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    halving_alone(x)
    mine = x.chunk(world_size)[rank].clone()
    pieces = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(pieces, mine)
    x.copy_(torch.cat(pieces))


def one_step(x):  # right on two ranks
    if dist.get_world_size() > 1:
        arrived = torch.empty_like(x)
        swap(x.clone(), arrived, dist.get_rank() ^ 1)
        x += arrived


def returned(x):
    y = x.clone()
    halves_then_back(y)
    return y


ANSWERS = {
    check.packed: ([25_000, 2.5e4], [22_500, 225_000, 2_025_000, 25, 250_000, "25 kB"]),
    check.what_helps: (
        ["CBA", "C, B, A", "cba"],
        ["ABC", "BCA", "CAB", "C", "ABCD", 3, ["C", "B"]],
    ),
    check.halving_doubling: (
        [halves_then_back, recursive],
        [
            of_the_library,
            ring,
            recursive_doubling,
            without_messages,
            halving_alone,
            halving_then_all_gather,
            one_step,
            returned,
            lambda x: x,
        ],
    ),
}
