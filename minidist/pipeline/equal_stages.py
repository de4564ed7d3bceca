"""Stages of equal cost, as nearly as whole layers allow."""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate


def balance(costs: Sequence[float], stages: int) -> list[int]:
    """Cut a row of costs into `stages` pieces, none empty, so that the largest sum is smallest.
    Returns the lengths of the pieces. With all costs equal, the pieces are as long as each other.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"{len(costs)} layers cannot be cut into {stages} stages")
    sums = [0, *accumulate(costs)]

    @cache
    def best(end: int, pieces: int) -> tuple[float, float, int]:
        """Of the first `end` costs: the largest sum; the sum of squares, smaller for pieces that
        are more alike; and where the last piece begins."""
        if pieces == 1:
            return sums[end], sums[end] ** 2, 0
        return min(
            (max(best(cut, pieces - 1)[0], last), best(cut, pieces - 1)[1] + last**2, cut)
            for cut in range(pieces - 1, end)
            for last in [sums[end] - sums[cut]]
        )

    lengths, end = [], len(costs)
    for pieces in range(stages, 0, -1):
        cut = best(end, pieces)[2]
        lengths.append(end - cut)
        end = cut
    return lengths[::-1]
