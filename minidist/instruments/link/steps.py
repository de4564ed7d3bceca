"""The messages that a collective is made of, step by step, on an emulated link.

The ranks exchange the data through shared memory, whatever the collective; the time that they
charge is that of these messages. What a rank sends in a step it sends as soon as it has all that
came to it in the steps before. They are the algorithms of the lesson on collectives, p ranks of
which `root` is one; `nbytes` is the whole vector.
"""

from collections.abc import Sequence

Step = list[tuple[int, int, float]]  # (sender, receiver, bytes): messages that leave at once


def ring(p: int, nbytes: float, rounds: int = 1) -> list[Step]:
    """Each rank passes a block to the next one, until all blocks have been with all: one round for
    an all_gather or a reduce_scatter, two for an all_reduce."""
    return [[(r, (r + 1) % p, nbytes / p) for r in range(p)]] * (rounds * (p - 1))


def tree(p: int, nbytes: float, root: int) -> list[Step]:
    """A broadcast: each rank that has the vector sends it to the rank at distance d, which halves
    from step to step."""
    return [
        [((root + v) % p, (root + v + d) % p, nbytes) for v in range(0, p - d, 2 * d)]
        for d in reversed(_powers(p))
    ]


def flat(p: int, nbytes: float, root: int) -> list[Step]:
    """A scatter: the root sends each rank its block."""
    return [[(root, (root + r) % p, nbytes / p) for r in range(1, p)]]


def back(steps: Sequence[Step]) -> list[Step]:
    """The other way: a reduce from a broadcast, a gather from a scatter."""
    return [[(r, s, nbytes) for s, r, nbytes in step] for step in reversed(steps)]


def pairwise(sizes: Sequence[Sequence[float]]) -> list[Step]:
    """An all_to_all, of so many bytes from each rank to each: in step d, rank r sends to rank r + d
    (mod p)."""
    p = len(sizes)
    return [[(r, (r + d) % p, sizes[r][(r + d) % p]) for r in range(p)] for d in range(1, p)]


def dissemination(p: int) -> list[Step]:
    """A barrier: after the step of distance d, a rank has heard of 2d ranks."""
    return [[(r, (r + d) % p, 0) for r in range(p)] for d in _powers(p)]


def _powers(p: int) -> list[int]:
    """1, 2, 4, ... below p."""
    return [1 << k for k in range((p - 1).bit_length())]
