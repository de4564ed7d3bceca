"""Answers to the puzzles and the exercise of the lesson beyond_gradients."""

import torch
import torch.distributed as dist

import minidist as md
from minidist.course.checks import beyond_gradients as check


def go(anchors, gradients, parameters, outer):
    """The outer step with these gradients; the parameters follow."""
    for anchor, gradient in zip(anchors, gradients, strict=True):
        anchor.grad = gradient
    outer.step()
    follow(parameters, anchors)


@torch.no_grad()
def follow(parameters, anchors):
    for parameter, anchor in zip(parameters, anchors, strict=True):
        parameter.copy_(anchor)


def differences(parameters, anchors):
    return [a.detach() - p.detach() for p, a in zip(parameters, anchors, strict=True)]


def mean(tensor):
    tensor = tensor / dist.get_world_size()
    dist.all_reduce(tensor)
    return tensor


def one_by_one(parameters, anchors, outer):
    go(anchors, [mean(d) for d in differences(parameters, anchors)], parameters, outer)


def mean_first(parameters, anchors, outer):
    means = [mean(p.detach()) for p in parameters]
    go(anchors, [a.detach() - m for a, m in zip(anchors, means, strict=True)], parameters, outer)


def on_rank_0(parameters, anchors, outer):
    """Only rank 0 steps, and sends the anchors to all."""
    found = differences(parameters, anchors)
    for difference in found:
        dist.reduce(difference, 0)
    if dist.get_rank() == 0:
        go(anchors, [d / dist.get_world_size() for d in found], parameters, outer)
    for anchor in anchors:
        dist.broadcast(anchor.data, 0)
    follow(parameters, anchors)


def one_memory(parameters, anchors, outer):
    """The next steps move the anchors, too."""
    one_by_one(parameters, anchors, outer)
    for parameter, anchor in zip(parameters, anchors, strict=True):
        parameter.data = anchor.data


def local_sgd(parameters, anchors, outer):
    md.averaging.average(parameters)


def wrong_way(parameters, anchors, outer):
    go(anchors, [-mean(d) for d in differences(parameters, anchors)], parameters, outer)


def summed(parameters, anchors, outer):
    found = differences(parameters, anchors)
    for difference in found:
        dist.all_reduce(difference)
    go(anchors, found, parameters, outer)


def not_copied(parameters, anchors, outer):
    for anchor, difference in zip(anchors, differences(parameters, anchors), strict=True):
        anchor.grad = mean(difference)
    outer.step()


def go_alone(parameters, anchors, outer):
    go(anchors, differences(parameters, anchors), parameters, outer)


def mean_of_steps(parameters, anchors, outer):
    """Right for SGD, which is linear; not for Adam."""
    go_alone(parameters, anchors, outer)
    for anchor in anchors:
        anchor.data.copy_(mean(anchor.detach()))
    follow(parameters, anchors)


def without_momentum(parameters, anchors, outer):
    fresh = torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True)
    go(anchors, [mean(d) for d in differences(parameters, anchors)], parameters, fresh)


ANSWERS = {
    check.worth_it: ([4.25, 68 / 16], [68 / 28, 96 / 28, 8, 17, 68 / 84, "4.25 s"]),
    check.gathered_bits: ([64, 64.0], [32, 8, 16, 128, 63, "64 ranks"]),
    check.meeting: (
        [one_by_one, mean_first, on_rank_0],
        [
            local_sgd,
            wrong_way,
            summed,
            not_copied,
            go_alone,
            mean_of_steps,
            without_momentum,
            one_memory,
        ],
    ),
}
