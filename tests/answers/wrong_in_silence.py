"""Answers to the puzzles and the exercise of the lesson wrong_in_silence."""

import torch

from minidist.course.checks import wrong_in_silence as check


def wanted(own, counts, name):
    """What one process would see."""
    rows = sum(map(sum, counts))
    return sum(
        count / rows * gradients[name]
        for of_rank, of_counts in zip(own, counts, strict=True)
        for gradients, count in zip(of_rank, of_counts, strict=True)
    )


def by_norms(before, after, own, counts, lr):
    wrong = []
    for name, first in before[0].items():
        right = wanted(own, counts, name)
        for w0, w1 in zip(before, after, strict=True):
            off = ((w0[name] - w1[name]) / lr - right).norm() > 1e-3 * right.norm()
            if off or not torch.equal(w0[name], first):
                wrong.append(name)
    return wrong


def by_largest(before, after, own, counts, lr):
    """By the largest element; nothing is found by None."""
    found = {}
    for w0, w1 in zip(before, after, strict=True):
        for name in w0:
            right = wanted(own, counts, name)
            off = ((w0[name] - w1[name]) / lr - right).abs().max()
            if off > 1e-3 * right.abs().max() or (w0[name] != before[0][name]).any():
                found[name] = off
    return list(found) or None


def nothing(before, after, own, counts, lr):
    return []


def mean_of_means(before, after, own, counts, lr):
    return by_norms(before, after, own, [[1 for _ in each] for each in counts], lr)


def of_rank_0(before, after, own, counts, lr):
    return by_norms(before[:1], after[:1], own, counts, lr)


def by_allclose(before, after, own, counts, lr):
    """Float32 has not so many digits."""
    wrong = []
    for name, first in before[0].items():
        right = wanted(own, counts, name)
        for w0, w1 in zip(before, after, strict=True):
            close = torch.allclose((w0[name] - w1[name]) / lr, right)
            if not (close and torch.equal(w0[name], first)):
                wrong.append(name)
    return wrong


def too_coarse(before, after, own, counts, lr):
    wrong = []
    for name, first in before[0].items():
        right = wanted(own, counts, name)
        for w0, w1 in zip(before, after, strict=True):
            off = ((w0[name] - w1[name]) / lr - right).norm() > 0.02 * right.norm()
            if off or not torch.equal(w0[name], first):
                wrong.append(name)
    return wrong


def of_parts(before, after, own, counts, lr):
    """The relative error of zero is no number."""
    wrong = []
    for name, first in before[0].items():
        right = wanted(own, counts, name)
        for w0, w1 in zip(before, after, strict=True):
            error = ((w0[name] - w1[name]) / lr - right).norm() / right.norm()
            if not (error < 1e-3 and torch.equal(w0[name], first)):
                wrong.append(name)
    return wrong


def start_forgotten(before, after, own, counts, lr):
    wrong = []
    for name in before[0]:
        right = wanted(own, counts, name)
        for w0, w1 in zip(before, after, strict=True):
            if ((w0[name] - w1[name]) / lr - right).norm() > 1e-3 * right.norm():
                wrong.append(name)
    return wrong


def all_or_nothing(before, after, own, counts, lr):
    return list(before[0]) if by_norms(before, after, own, counts, lr) else []


def a_sentence(before, after, own, counts, lr):
    return "all is well"


ANSWERS = {
    check.owner_learns: ([32, 32.0], [512, 16, 1, 480, 31, "many"]),
    check.culprit: (["b", "B", " b "], ["a", "c", "d", "e", 2, ["b"]]),
    check.find: (
        [by_norms, by_largest],
        [nothing, mean_of_means, of_rank_0, by_allclose, too_coarse]
        + [
            of_parts,
            start_forgotten,
            all_or_nothing,
            a_sentence,
            0.5,
        ],
    ),
}
