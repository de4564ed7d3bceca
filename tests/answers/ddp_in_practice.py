"""Answers to the puzzles and the exercise of the lesson ddp_in_practice."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from minidist.course.checks import ddp_in_practice as check


def all_images(labels):
    total = torch.tensor(len(labels))
    dist.all_reduce(total)
    return total


def weighted_loss(model, images, labels):
    loss = F.cross_entropy(model(images), labels, reduction="sum")
    (loss * dist.get_world_size() / all_images(labels)).backward()


def weighted_gradients(model, images, labels):
    F.cross_entropy(model(images), labels, reduction="sum").backward()
    for parameter in model.parameters():
        parameter.grad *= dist.get_world_size() / all_images(labels)


def without_ddps_average(model, images, labels):
    with model.no_sync():
        F.cross_entropy(model(images), labels, reduction="sum").backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= all_images(labels)


def on_all_images(model, images, labels):
    """Every rank computes the gradient of all images."""
    shares = [None] * dist.get_world_size()
    dist.all_gather_object(shares, (images, labels))
    images, labels = (torch.cat(each) for each in zip(*shares, strict=True))
    F.cross_entropy(model(images), labels).backward()


def padded(model, images, labels):
    """As many rows on each rank, those too many with weight 0."""
    most = torch.tensor(len(labels))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    more = int(most) - len(labels)
    images, ours = torch.cat([images, torch.zeros(more, 64).double()]), len(labels)
    losses = F.cross_entropy(model(images)[:ours], labels, reduction="sum")
    (losses * dist.get_world_size() / all_images(labels)).backward()


def share_of_the_images(model, images, labels):
    """Forgets that DDP divides by the number of ranks."""
    loss = F.cross_entropy(model(images), labels) if len(labels) else model(images).sum()
    (loss * len(labels) / all_images(labels)).backward()


def not_averaged(model, images, labels):
    with model.no_sync():
        loss = F.cross_entropy(model(images), labels, reduction="sum")
        (loss / all_images(labels)).backward()


def plain(model, images, labels):
    F.cross_entropy(model(images), labels).backward()


def summed(model, images, labels):
    F.cross_entropy(model(images), labels, reduction="sum").backward()


def divided_by_all(model, images, labels):
    loss = F.cross_entropy(model(images), labels, reduction="sum")
    (loss / all_images(labels)).backward()


def left_out(model, images, labels):
    if len(labels):
        weighted_loss(model, images, labels)


def no_backward(model, images, labels):
    return F.cross_entropy(model(images), labels, reduction="sum") / all_images(labels)


ANSWERS = {
    check.steps_of_an_epoch: ([32, 32.0], [31, 31.25, 125, 1000, 4, 33, "32"]),
    check.memory_on_eight: ([25, 25.0], [7.5, 60, 42.5, 5, 20, 25e9, 65, "25 GB"]),
    check.backward_of_all: (
        [weighted_loss, weighted_gradients, without_ddps_average, padded],
        [
            plain,
            summed,
            divided_by_all,
            share_of_the_images,
            not_averaged,
            on_all_images,
            left_out,
            no_backward,
            lambda model, images, labels: None,
        ],
    ),
}
