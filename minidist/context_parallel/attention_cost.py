"""What attention over cut tokens costs: bytes, balance, time.

b = B T Hkv D is how many numbers the keys of the whole sequence have, g = H / Hkv and
f = (N - 1) / N. For each layer a rank sends

| | forward | backward |
|---|---|---|
| naive ring | 2 b f | 4 b f + 2 b / N |
| ring | 2 b f | 4 b f |
| gathered | 2 b f | 2 b f |
| ulysses | 2 b f / N (g + max(1, N / Hkv)) | the same |

numbers. Lesson: long_sequences.
"""

from minidist.context_parallel.cuts import Cut


def sent(way: str, ranks: int, b: float, heads: int, kv_heads: int) -> tuple[float, float]:
    """Numbers that a rank sends forward, and backward, if it has the N-th part of the tokens."""
    f = (ranks - 1) / ranks
    if way == "ulysses":
        each = 2 * b * f / ranks * (heads / kv_heads + max(1, ranks / kv_heads))
        return each, each
    backward = {"naive": 4 * b * f + 2 * b / ranks, "ring": 4 * b * f, "gathered": 2 * b * f}
    return 2 * b * f, backward[way]


def work(kind: str, length: int, ranks: int) -> list[list[float]]:
    """Pairs of tokens that each rank computes at each step of the ring: [rank][step]."""
    cut = Cut.of(kind, length, ranks)
    blocks = [[cut.block(r, (r - step) % ranks) for step in range(ranks)] for r in range(ranks)]
    return [[block.work if block else 0.0 for block in row] for row in blocks]


def ring_time(pairs: list[list[float]], seconds_a_pair: float, message: float) -> float:
    """Seconds of a forward pass, until the last rank is ready. A rank begins a step when it has
    computed the one before, and has the keys: they leave the left neighbour when that begins the
    step before. pairs: as `work` gives them. message: seconds of one hop."""
    ranks = len(pairs)
    begun = [0.0] * ranks
    for step in range(ranks):
        done = [begun[r] + pairs[r][step] * seconds_a_pair for r in range(ranks)]
        if step < ranks - 1:
            begun = [max(done[r], begun[r - 1] + message) for r in range(ranks)]
    return max(done)


def hides_at(
    flops: float, nbytes_a_second: float, itemsize: int, heads: int, kv_heads: int, causal: bool
) -> float:
    """Tokens c of a rank from which on a block of keys and values travels behind computing: it has
    2 c Hkv D numbers, and needs 4 c² H D operations, half as many in a causal zigzag."""
    return itemsize * flops * kv_heads / (2 * nbytes_a_second * heads) * (2 if causal else 1)
