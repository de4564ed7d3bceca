"""Answers to the puzzles and the exercise of the lesson pipeline_schedules."""

import torch

from minidist.course.checks import pipeline_schedules as check
from minidist.pipeline import instructions as do


def with_warmup(rank, m, warmup):
    warmup = min(warmup, m)
    mine = [do.Forward(rank, i) for i in range(warmup)]
    for i in range(warmup, m):
        mine += [do.Forward(rank, i), do.Backward(rank, i - warmup)]
    return mine + [do.Backward(rank, i) for i in range(m - warmup, m)]


def twice_the_warmup(rank, N, m):
    return with_warmup(rank, m, 2 * (N - rank - 1))


def by_count(rank, N, m):
    """A generator: backward as soon as as many are kept as may be."""
    done = 0
    for i in range(m):
        yield do.Forward(rank, i)
        if i - done + 1 == 2 * (N - rank) - 1:
            yield do.Backward(rank, done)
            done += 1
    for i in range(done, m):
        yield do.Backward(rank, i)


def in_two_parts(rank, N, m):
    """Backward for the inputs, at once followed by that for the weights."""
    for step in twice_the_warmup(rank, N, m):
        if isinstance(step, do.Backward):
            yield do.BackwardInputs(rank, step.microbatch)
            yield do.BackwardWeights(rank, step.microbatch)
        else:
            yield step


def one_f_one_b(rank, N, m):
    return with_warmup(rank, m, N - rank - 1)


def one_too_many(rank, N, m):
    return with_warmup(rank, m, 2 * (N - rank) - 1)


def gpipe(rank, N, m):
    return with_warmup(rank, m, m)


def naive(rank, N, m):
    return with_warmup(rank, m, 0)


def without_the_last(rank, N, m):
    return twice_the_warmup(rank, N, m)[:-1]


def backward_first(rank, N, m):
    return twice_the_warmup(rank, N, m)[::-1]


def for_four_ranks(rank, N, m):
    return with_warmup(rank, m, 2 * (4 - rank - 1))


def pairs(rank, N, m):
    return [("F", i) for i in range(m)] + [("B", i) for i in range(m)]


STUCK_LAST = "do.SendGradient(1, 0)"
ANSWERS = {
    check.stuck_at: (
        [[do.SendActivation(0, 1), do.SendGradient(1, 0)], ("SendActivation(0, 1)", STUCK_LAST)],
        [
            [do.SendActivation(0, 0), do.SendGradient(1, 0)],
            [do.SendActivation(0, 1), do.ReceiveActivation(1, 1)],
            [do.ReceiveGradient(0, 0), do.SendGradient(1, 0)],
            [do.SendActivation(0, 1), do.Forward(1, 1)],
            [do.SendGradient(1, 0), do.SendActivation(0, 1)],
            [do.SendActivation(0, 1)],
            "SendActivation(0, 1)",
            496,
        ],
    ),
    check.recomputed_time: (
        [4 / 3, 1.3333333, torch.tensor(4 / 3, dtype=torch.float64)],
        [2, 1.5, 1 / 3, 1, 1.33, "4/3"],
    ),
    check.far_away: (
        [twice_the_warmup, by_count, in_two_parts],
        [
            one_f_one_b,
            one_too_many,
            gpipe,
            naive,
            without_the_last,
            backward_first,
            for_four_ranks,
            pairs,
        ],
    ),
}
