"""The algorithms of the lesson collectives, each a few lines on top of send and receive.

All of them work on flat tensors. `p` is the number of ranks, `r` our own rank, both within the
group; `whole` is the vector of n elements, `block` a list of p pieces of it, one for each rank.
Neighbours wrap round: `r + 1` is the right-hand and `r - 1` the left-hand neighbour on the ring.
`expect` announces what will arrive, and from whom; `exchange` sends while one of these arrives.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from minidist.collectives.peers import Peers
from minidist.collectives.reduce_op import Reduction

Tensors = Sequence[Tensor]


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, ... below `limit`."""
    return [1 << k for k in range((limit - 1).bit_length())]


def broadcast_flat(peers: Peers, whole: Tensor, root: int) -> None:
    if peers.rank == root:
        for other in range(1, peers.size):
            peers.send(whole, root + other)
    else:
        peers.recv(whole, root)


def broadcast_tree(peers: Peers, whole: Tensor, root: int) -> None:
    #        0              round 1: 0 -> 4
    #      / | \            round 2: 0 -> 2, 4 -> 6
    #     4  2  1           round 3: 0 -> 1, 2 -> 3, 4 -> 5, 6 -> 7
    #    / \  \             whoever has the vector passes it on: 2^k ranks have it after k rounds
    #   6   5  3
    #   7
    if peers.rank != root:
        peers.recv(whole, peers.parent(root))
    for child in peers.children(root):
        peers.send(whole, child)


def reduce_flat(peers: Peers, whole: Tensor, root: int, op: Reduction) -> None:
    if peers.rank == root:
        arrived = torch.empty_like(whole)  # (n,)
        for other in range(1, peers.size):
            op(whole, peers.recv(arrived, root + other), out=whole)
        op.finish(whole, peers.size)
    else:
        peers.send(whole, root)


def reduce_tree(peers: Peers, whole: Tensor, root: int, op: Reduction) -> None:
    # The tree of the broadcast, from the leaves to the root: the smallest subtree is ready first.
    total = whole
    for child in reversed(peers.children(root)):
        arrived = peers.recv(torch.empty_like(whole), child)  # (n,) sum over the child's subtree
        total = op(total, arrived, out=whole if peers.rank == root else arrived)
    if peers.rank == root:
        op.finish(whole, peers.size)
    else:
        peers.send(total, peers.parent(root))


def scatter_flat(peers: Peers, own: Tensor, block: Tensors, root: int) -> None:
    if peers.rank == root:
        for other in range(1, peers.size):
            peers.send(block[(root + other) % peers.size], root + other)
        own.copy_(block[root])
    else:
        peers.recv(own, root)


def gather_flat(peers: Peers, own: Tensor, block: Tensors, root: int) -> None:
    if peers.rank == root:
        for other in range(1, peers.size):
            peers.recv(block[(root + other) % peers.size], root + other)
        block[root].copy_(own)
    else:
        peers.send(own, root)


def all_gather_ring(peers: Peers, own: Tensor, block: Tensors) -> None:
    # p = 3: each block walks round the ring; rank r passes on what arrived in the step before.
    #   rank 0 sends A, then C;  rank 1 sends B, then A;  rank 2 sends C, then B
    p, r = peers.size, peers.rank
    arrivals = peers.expect((block[(r - 1 - s) % p], r - 1) for s in range(p - 1))
    block[r].copy_(own)
    for s, arrival in enumerate(arrivals):
        peers.exchange(block[(r - s) % p], r + 1, arrival)


def reduce_scatter_ring(peers: Peers, own: Tensor, block: Tensors, op: Reduction) -> None:
    # The other way round: what travels is a partial sum, and every rank adds its own block to it
    # as it comes by. The input blocks stay as they are.
    #   p = 3, block A:  rank 1 sends A1;  rank 2 sends A1 + A2;  rank 0 adds A0 and keeps it
    p, r = peers.size, peers.rank
    mine = [block[(r - 2 - s) % p] for s in range(p - 1)]
    partial = block[(r - 1) % p]
    for s, arrival in enumerate(peers.expect((torch.empty_like(x), r - 1) for x in mine)):
        arrived = peers.exchange(partial, r + 1, arrival)
        partial = op(arrived, mine[s], out=arrived)
    own.copy_(partial)
    op.finish(own, p)


def all_reduce_naive(peers: Peers, whole: Tensor, op: Reduction) -> None:
    # What one writes first: rank 0 gathers, one rank after another, and sends the sum to each.
    reduce_flat(peers, whole, 0, op)
    broadcast_flat(peers, whole, 0)


def all_reduce_tree(peers: Peers, whole: Tensor, op: Reduction) -> None:
    reduce_tree(peers, whole, 0, op)
    broadcast_tree(peers, whole, 0)


def all_reduce_ring(peers: Peers, whole: Tensor, op: Reduction) -> None:
    # p = 3, blocks A B C. Each block travels round the ring once to be summed, once to be shared:
    #   step   rank 0 sends    rank 1 sends    rank 2 sends
    #    0     C               A               B               add what arrives
    #    1     B + B2          C + C0          A + A1          add what arrives: rank r owns block r
    #    2     A (complete)    B (complete)    C (complete)    keep what arrives
    #    3     C (complete)    A (complete)    B (complete)    keep what arrives
    p, r = peers.size, peers.rank
    block = whole.tensor_split(p)  # p views of n/p elements; the first n % p have one more
    place = [block[(r - 2 - s) % p] for s in range(2 * (p - 1))]  # of what arrives at step s
    # A complete block arrives only after it has passed through us as a partial sum, so its place
    # may be announced now, although we still read and write there.
    into = [*map(torch.empty_like, place[: p - 1]), *place[p - 1 :]]
    for s, arrival in enumerate(peers.expect((x, r - 1) for x in into)):
        arrived = peers.exchange(block[(r - 1 - s) % p], r + 1, arrival)
        if s < p - 1:
            op(arrived, place[s], out=place[s])
    op.finish(whole, p)


def all_reduce_recursive_doubling(peers: Peers, whole: Tensor, op: Reduction) -> None:
    #   distance 1:  0 <-> 1   2 <-> 3      each has the sum over 2 ranks
    #   distance 2:  0 <-> 2   1 <-> 3      each has the sum over 4 ranks
    def double(core: int) -> None:
        r = peers.rank
        partners = [r ^ distance for distance in powers_of_two(core)]
        arrivals = peers.expect((torch.empty_like(whole), partner) for partner in partners)
        for partner, arrival in zip(partners, arrivals, strict=True):
            arrived = peers.exchange(whole, partner, arrival)  # (n,)
            # Both partners compute low + high, in this order, and so get the same bits.
            low, high = (whole, arrived) if r < partner else (arrived, whole)
            op(low, high, out=whole)

    _fold(peers, whole, op, double)


def all_reduce_halving_doubling(peers: Peers, whole: Tensor, op: Reduction) -> None:
    # core = 4, blocks A B C D, seen from rank 0:
    #   distance 2:  gives CD to rank 2, adds rank 2's AB     halving: n/2, n/4, ... elements
    #   distance 1:  gives B to rank 1,  adds rank 1's A      A is complete here
    #   distance 1:  sends A to rank 1,  keeps rank 1's B     doubling: n/4, n/2, ... elements
    #   distance 2:  sends AB to rank 2, keeps rank 2's CD
    def halve_and_double(core: int) -> None:
        r, distances = peers.rank, powers_of_two(core)
        at = [0, *accumulate(len(block) for block in whole.tensor_split(core))]

        def half(rank: int, d: int) -> Tensor:
            """The d blocks among which `rank`'s own one lies."""
            first = rank & -d
            return whole[at[first] : at[first + d]]

        partial = [(torch.empty_like(half(r, d)), r ^ d) for d in reversed(distances)]
        complete = [(half(r ^ d, d), r ^ d) for d in distances]
        arrivals = iter(peers.expect(partial + complete))
        for d in reversed(distances):
            mine = half(r, d)
            op(mine, peers.exchange(half(r ^ d, d), r ^ d, next(arrivals)), out=mine)
        for d in distances:
            peers.exchange(half(r, d), r ^ d, next(arrivals))

    _fold(peers, whole, op, halve_and_double)


def _fold(peers: Peers, whole: Tensor, op: Reduction, inner: Callable[[int], None]) -> None:
    # The two algorithms above want a power of two. The ranks beyond the largest one, the surplus,
    # hand their vector to a twin in the core, and get the result back at the end.
    #   p = 6:  core 0 1 2 3, surplus 4 5;  4 -> 0, 5 -> 1;  core;  0 -> 4, 1 -> 5
    p, r = peers.size, peers.rank
    core = 1 << (p.bit_length() - 1)
    if r >= core:
        peers.send(whole, r - core)
        peers.recv(whole, r - core)
        return
    has_twin = r + core < p
    if has_twin:
        op(whole, peers.recv(torch.empty_like(whole), r + core), out=whole)
    inner(core)
    op.finish(whole, p)
    if has_twin:
        peers.send(whole, r + core)


def all_to_all_pairwise(peers: Peers, outputs: Tensors, inputs: Tensors) -> None:
    # Step s: everyone sends to the rank s to its right and hears from the rank s to its left, so
    # that at every step each rank is the target of exactly one message.
    p, r = peers.size, peers.rank
    arrivals = peers.expect((outputs[(r - s) % p], r - s) for s in range(1, p))
    for s, arrival in enumerate(arrivals, 1):
        peers.exchange(inputs[(r + s) % p], r + s, arrival)
    outputs[r].copy_(inputs[r])


def barrier_dissemination(peers: Peers) -> None:
    # After the step of distance d, a rank has heard, directly or through others, of the 2d ranks
    # r, r-1, ..., r-2d+1: after ⌈lg p⌉ steps of all. Any p will do. The token is one byte.
    token = torch.zeros(1, dtype=torch.uint8, device=peers.device)
    distances = powers_of_two(peers.size)
    arrivals = peers.expect((torch.empty_like(token), peers.rank - d) for d in distances)
    for d, arrival in zip(distances, arrivals, strict=True):
        peers.exchange(token, peers.rank + d, arrival)
