"""What the collectives cost, from formulas alone (lesson: collectives).

The α-β model: a message of n bytes takes α + nβ seconds, whoever else is sending. α is the
latency, β the inverse of the bandwidth. What a rank computes meanwhile (the additions of a
reduction) is left out, and so is the agreement before each call.

Latency counts for each message here, as for one who waits for it. A rank that has several to send
in a row need not: on an `md.Link` they follow each other, and arrive one latency after they have
left. So flat algorithms are faster there by all latencies but one, and trees, where p is no power
of two, by one each way.
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

    With p ranks, n bytes and lg the logarithm to base 2:

    | operation | algorithm | messages | bytes |
    |---|---|---|---|
    | broadcast, reduce | flat | p-1 | (p-1)n |
    | | tree | ⌈lg p⌉ | ⌈lg p⌉n |
    | all_reduce | naive | 2(p-1) | 2(p-1)n |
    | | ring | 2(p-1) | 2(p-1)/p n |
    | | tree | 2⌈lg p⌉ | 2⌈lg p⌉n |
    | | recursive_doubling | lg p | lg p n |
    | | halving_doubling | 2 lg p | 2(p-1)/p n |
    | scatter, gather | flat | p-1 | (p-1)/p n |
    | all_gather, reduce_scatter | ring | p-1 | (p-1)/p n |
    | all_to_all | pairwise | p-1 | (p-1)/p n |
    | barrier | dissemination | ⌈lg p⌉ | ⌈lg p⌉ |

    Where p is not a power of two, recursive and halving-doubling all_reduce run on the largest
    power of two below it, and pay two messages of n bytes more for the surplus ranks.

    Raises ValueError for unknown names, a world size below 1 or a negative size. Sources: Thakur,
    Rabenseifner and Gropp (2005), "Optimization of Collective Communication Operations in MPICH";
    the ring: Patarasuk and Yuan (2009).
    Lesson: collectives.
    """
    _check(operation, algorithm, world_size, nbytes)
    p, n = world_size, nbytes
    rounds = (p - 1).bit_length()  # ⌈lg p⌉
    most = (p - 1) / p * n  # all blocks but one
    match operation, algorithm:
        case "broadcast" | "reduce", "flat":
            return Cost(p - 1, (p - 1) * n)
        case "broadcast" | "reduce", "tree":
            return Cost(rounds, rounds * n)
        case "all_reduce", "naive":
            return Cost(2 * (p - 1), 2 * (p - 1) * n)
        case "all_reduce", "ring":
            return Cost(2 * (p - 1), 2 * most)
        case "all_reduce", "tree":
            return Cost(2 * rounds, 2 * rounds * n)
        case "all_reduce", "recursive_doubling":
            core, fold = _core(p)
            steps = core.bit_length() - 1 + fold
            return Cost(steps, steps * n)
        case "all_reduce", "halving_doubling":
            core, fold = _core(p)
            steps = 2 * (core.bit_length() - 1)
            return Cost(steps + fold, 2 * (core - 1) / core * n + fold * n)
        case "barrier", _:
            return Cost(rounds, rounds)
        case _:  # scatter, gather, all_gather, reduce_scatter, all_to_all
            return Cost(p - 1, most)


def total(operation: str, algorithm: str, world_size: int, numel: int, itemsize: int = 4) -> Cost:
    """What all ranks together send in a collective: the sum of `sent` over the ranks.

    Where ranks share their cores, which carry every message, it tells better than the critical path
    which algorithm is faster. Lesson: communication.
    """
    _check(operation, algorithm, world_size, numel)
    ranks = range(world_size)
    each = [sent(operation, algorithm, world_size, rank, numel, itemsize) for rank in ranks]
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
    """Exactly what `rank` sends in a collective, by formula. Empty messages are not sent.
    Lesson: collectives.

    `numel` counts the elements of the whole vector, as `cost` defines it, each of `itemsize`
    bytes. Where it is cut into blocks, they are those of `torch.tensor_split`: the first
    numel % world_size of them have one element more. `rank` and `root` are ranks of the group.

    Without the agreement before each call. Raises ValueError for unknown names and for numbers
    out of range.
    """
    _check(operation, algorithm, world_size, numel)
    p, r = world_size, rank
    if not 0 <= rank < p or not 0 <= root < p:
        raise ValueError(f"rank {rank} and root {root} must be in 0..{p - 1}")
    if operation == "barrier":
        return Cost((p - 1).bit_length(), (p - 1).bit_length())
    sizes = [size for size in _messages(operation, algorithm, p, r, numel, root) if size]
    return Cost(len(sizes), sum(sizes) * itemsize)


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
            core, _fold = _core(p)
            if r >= core:
                return [n]  # to the twin
            steps = [1 << k for k in range(core.bit_length() - 1)]
            back = [n] if r + core < p else []  # to the twin
            if algorithm == "recursive_doubling":
                return [n] * len(steps) + back
            own = _blocks(n, core)
            # The halving gives away the partner's half, the doubling sends our own.
            halves = [_half(own, r ^ d, d) for d in steps] + [_half(own, r, d) for d in steps]
            return halves + back
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
    """The elements of the `distance` blocks, aligned, among which `rank`'s own one lies."""
    first = rank // distance * distance
    return sum(block[first : first + distance])


def _children(place: int, p: int) -> int:
    """How many children place 0..p-1 of a binomial tree has: place + 1, + 2, + 4, ... below its
    own lowest bit, as far as they exist."""
    limit = place & -place or p
    return sum(1 for k in range(p.bit_length()) if 1 << k < limit and place + (1 << k) < p)


def _core(p: int) -> tuple[int, int]:
    """The largest power of two in p, and the messages that the surplus ranks add: 0 or 2."""
    core = 1 << (p.bit_length() - 1)
    return core, 0 if core == p else 2


def _check(operation: str, algorithm: str, world_size: int, size: float) -> None:
    if operation not in ALGORITHMS:
        raise ValueError(f"operation must be one of {', '.join(ALGORITHMS)}, not {operation!r}")
    if algorithm not in ALGORITHMS[operation]:
        names = ", ".join(ALGORITHMS[operation])
        raise ValueError(f"algorithm of {operation} must be one of {names}, not {algorithm!r}")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size}")
    if size < 0:
        raise ValueError(f"a size must not be negative, as {size} is")
