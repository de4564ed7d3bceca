"""What the collectives cost, from formulas alone (lesson: communication).

The α-β model: a message of n bytes takes α + nβ seconds, whoever else is sending. α is the
latency, β the inverse of the bandwidth. What a rank computes meanwhile (the additions of a
reduction) is left out, and so is the agreement before each call.

Limits: latency counts for each message. On an `md.Link` those of one sender follow each other, so
flat algorithms are faster there by all latencies but one, and some trees by one each way.
"""

from typing import NamedTuple

# operation: its algorithms, the default one first
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "broadcast": ("tree", "flat"),
    "reduce": ("tree", "flat"),
    "all_reduce": ("ring", "naive", "tree", "recursive_doubling", "halving_doubling"),
    "scatter": ("flat",),
    "gather": ("flat",),
    "all_gather": ("ring",),
    "reduce_scatter": ("ring",),
    "all_to_all": ("pairwise",),
    "barrier": ("dissemination",),
}


class Cost(NamedTuple):
    """What takes time: so many `messages`, with `nbytes` in them together. Of `cost` they are those
    of the critical path, one after another; of `total` those of all ranks; of `sent` of one."""

    messages: int
    nbytes: float

    def seconds(self, alpha: float, beta: float) -> float:
        """Time in the α-β model: alpha in seconds a message, beta in seconds a byte."""
        return self.messages * alpha + self.nbytes * beta


def cost(operation: str, algorithm: str, world_size: int, nbytes: float) -> Cost:
    """The cost of a collective of `world_size` ranks over a vector of `nbytes`.

    The vector is the tensor of broadcast, reduce and all_reduce; for the others, all blocks
    together: what the root scatters or gathers, what every rank has after an all_gather or
    before a reduce_scatter or all_to_all. A barrier has none; its messages are one byte each.

    Sources: Thakur, Rabenseifner and Gropp (2005), "Optimization of Collective Communication
    Operations in MPICH"; halving-doubling: Rabenseifner (2004); the ring: Patarasuk and Yuan
    (2009); the barrier: Hensgen, Finkel and Manber (1988). Raises ValueError for unknown names.
    Lesson: communication.
    """
    _require(operation, algorithm)
    p, n = world_size, nbytes
    lg = (p - 1).bit_length()  # ⌈lg p⌉, the logarithm to base 2
    core, steps, fold = _core(p)  # recursive doubling and halving run on a power of two
    blocks = (p - 1) / p * n  # all but one
    halves = 2 * (core - 1) / core * n
    messages_and_bytes = {
        ("broadcast", "flat"): (p - 1, (p - 1) * n),
        ("broadcast", "tree"): (lg, lg * n),
        ("reduce", "flat"): (p - 1, (p - 1) * n),
        ("reduce", "tree"): (lg, lg * n),
        ("all_reduce", "naive"): (2 * (p - 1), 2 * (p - 1) * n),
        ("all_reduce", "tree"): (2 * lg, 2 * lg * n),
        ("all_reduce", "ring"): (2 * (p - 1), 2 * blocks),
        ("all_reduce", "recursive_doubling"): (steps + fold, (steps + fold) * n),
        ("all_reduce", "halving_doubling"): (2 * steps + fold, halves + fold * n),
        ("scatter", "flat"): (p - 1, blocks),
        ("gather", "flat"): (p - 1, blocks),
        ("all_gather", "ring"): (p - 1, blocks),
        ("reduce_scatter", "ring"): (p - 1, blocks),
        ("all_to_all", "pairwise"): (p - 1, blocks),
        ("barrier", "dissemination"): (lg, lg),
    }
    return Cost(*messages_and_bytes[operation, algorithm])


def total(operation: str, algorithm: str, world_size: int, numel: int, itemsize: int = 4) -> Cost:
    """What all ranks together send: the sum of `sent`. Where ranks share their cores, which carry
    every message, it tells better than `cost` which algorithm is faster. Lesson: communication."""
    p = world_size
    each = [sent(operation, algorithm, p, rank, numel, itemsize) for rank in range(p)]
    return Cost(sum(one.messages for one in each), sum(one.nbytes for one in each))


def sent(
    operation: str,
    algorithm: str,
    world_size: int,
    rank: int,
    numel: int,
    itemsize: int = 4,
    root: int = 0,
) -> Cost:
    """Exactly what `rank` sends in a collective, by formula. Lesson: long_sequences.

    `numel` counts the elements of the whole vector, as `cost` defines it, each of `itemsize`
    bytes; blocks are those of `torch.tensor_split`. `rank` and `root` are ranks of the group.
    Empty messages are not sent. Raises ValueError for unknown names.
    """
    _require(operation, algorithm)
    if operation == "barrier":
        return cost(operation, algorithm, world_size, 0)
    each = _messages(operation, algorithm, world_size, rank, numel, root)
    return Cost(sum(1 for size in each if size), sum(each) * itemsize)


def _messages(operation: str, algorithm: str, p: int, r: int, n: int, root: int) -> list[int]:
    """The sizes of the messages that rank r sends, in elements."""
    block = _blocks(n, p)
    match operation, algorithm:
        case "broadcast", "flat":
            return [n] * (p - 1) if r == root else []
        case "broadcast", "tree":
            return [n] * _children((r - root) % p, p)
        case "reduce", _:
            return [] if r == root else [n]
        case "all_reduce", "naive":
            return [n] * (p - 1) if r == 0 else [n]
        case "all_reduce", "tree":
            return [n] * (_children(r, p) + (r != 0))
        case "all_reduce", "ring":
            return _all_but(block, r) + _all_but(block, r + 1)
        case "all_reduce", _:
            core, steps, _fold = _core(p)
            if r >= core:
                return [n]  # to the twin
            back = [n] if r + core < p else []  # to the twin
            if algorithm == "recursive_doubling":
                return [n] * steps + back
            own, distances = _blocks(n, core), [1 << k for k in range(steps)]
            # The halving gives away the partner's half, the doubling sends our own.
            return [_half(own, rank, d) for d in distances for rank in (r ^ d, r)] + back
        case "scatter", _:
            return _all_but(block, r) if r == root else []
        case "gather", _:
            return [] if r == root else [block[r]]
        case "all_gather", _:
            return _all_but(block, r + 1)
        case _:  # reduce_scatter, all_to_all
            return _all_but(block, r)


def _blocks(n: int, p: int) -> list[int]:
    return [n // p + (i < n % p) for i in range(p)]


def _all_but(block: list[int], index: int) -> list[int]:
    return [size for i, size in enumerate(block) if i != index % len(block)]


def _half(block: list[int], rank: int, distance: int) -> int:
    """The elements of the `distance` blocks among which `rank`'s own one lies."""
    first = rank // distance * distance
    return sum(block[first : first + distance])


def _children(place: int, p: int) -> int:
    """How many of place + 1, + 2, + 4, ... below its own lowest bit are in 0..p-1: its children."""
    limit = place & -place or p
    return sum(1 for k in range(p.bit_length()) if 1 << k < limit and place + (1 << k) < p)


def _core(p: int) -> tuple[int, int, int]:
    """The largest power of two in p; its logarithm; messages that surplus ranks add: 0 or 2."""
    steps = p.bit_length() - 1
    return 1 << steps, steps, 0 if 1 << steps == p else 2


def _require(operation: str, algorithm: str) -> None:
    if algorithm not in ALGORITHMS.get(operation, ()):
        raise ValueError(f"no {operation!r} by {algorithm!r}; there are {ALGORITHMS}")
