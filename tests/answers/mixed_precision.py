"""Answers to the puzzles and the exercise of the lesson mixed_precision."""

import torch
import torch.distributed as dist

from minidist.course.checks import mixed_precision as check


def unscaled(optimizer, scale):
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    gradients = [gradient for gradient in gradients if gradient is not None]
    for gradient in gradients:
        gradient /= scale
    return gradients


def is_bad(gradients):
    return not all(gradient.isfinite().all() for gradient in gradients)


def by_max(optimizer, scale):
    found = torch.tensor(float(is_bad(unscaled(optimizer, scale))))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    if found:
        return scale / 2
    optimizer.step()
    return scale


def by_gather(optimizer, scale):
    flags = [None] * dist.get_world_size()
    dist.all_gather_object(flags, bool(is_bad(unscaled(optimizer, scale))))
    if any(flags):
        optimizer.zero_grad()
        return torch.tensor(scale / 2)
    optimizer.step()
    return torch.tensor(scale)


def alone(optimizer, scale):
    if is_bad(unscaled(optimizer, scale)):
        return scale / 2
    optimizer.step()
    return scale


def hasty(optimizer, scale):
    found = torch.tensor([float(is_bad(unscaled(optimizer, scale)))])
    if not found:
        optimizer.step()
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return scale / 2 if found else scale


def only_those_who_found_call(optimizer, scale):
    found = torch.tensor([float(is_bad(unscaled(optimizer, scale)))])
    if found:
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return scale / 2
    optimizer.step()
    return scale


def blind_to_nan(optimizer, scale):
    largest = max(each.abs().max() for each in unscaled(optimizer, scale) if each.numel())
    found = torch.tensor(float(largest == float("inf")))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    if found:
        return scale / 2
    optimizer.step()
    return scale


def first_only(optimizer, scale):
    gradients = unscaled(optimizer, scale)
    found = torch.tensor([float(is_bad(gradients[:1]))])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    if found:
        return scale / 2
    optimizer.step()
    return scale


def last_only(optimizer, scale):
    """Each gradient of the loop overwrites what the one before has found."""
    for gradient in unscaled(optimizer, scale):
        found = torch.tensor([float(is_bad([gradient]))])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    if found:
        return scale / 2
    optimizer.step()
    return scale


def made_finite(optimizer, scale):
    gradients = unscaled(optimizer, scale)
    found = torch.tensor(float(is_bad(gradients)))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    for gradient in gradients:
        gradient.nan_to_num_(0, 0, 0)
    optimizer.step()
    return scale / 2 if found else scale


def never_lowered(optimizer, scale):
    by_max(optimizer, scale)
    return scale


def nothing_returned(optimizer, scale):
    by_max(optimizer, scale)


ANSWERS = {
    check.stuck: ([256, 256.0, torch.tensor(256.0)], [1000, 128, 257, 512, 255, "256"]),
    check.need_agreement: (
        [{"sharded", "pipeline", "tensor"}, ["tensor", "sharded", "pipeline"]],
        [
            set(),
            {"sharded"},
            {"ddp", "sharded", "pipeline", "tensor"},
            "sharded",
            {"zero"},
            [[]],
        ],
    ),
    check.agreed: (
        [by_max, by_gather],
        [
            alone,
            hasty,
            only_those_who_found_call,
            blind_to_nan,
            first_only,
            last_only,
            made_finite,
            never_lowered,
            nothing_returned,
            lambda optimizer, scale: scale,
        ],
    ),
}
