"""Answers to the puzzles and the exercise of the lesson mixed_parallelism."""

import torch
import torch.distributed as dist

from minidist.course.checks import mixed_parallelism as check


def squares(parts):
    return sum((part.gradient.square().sum() for part in parts), torch.zeros((), dtype=DOUBLE))


DOUBLE = torch.float64


def by_two_sums(parts, data, pipeline, tensor):
    own = [part for part in parts if not part.elsewhere]
    shards = squares(part for part in own if part.cut)
    dist.all_reduce(shards, group=tensor)
    total = shards + squares(part for part in own if not part.cut)
    dist.all_reduce(total, group=pipeline)
    return total.sqrt()


def by_division(parts, data, pipeline, tensor):
    """What is whole counts a part on each rank; then everything is summed over everything."""
    total = torch.zeros((), dtype=DOUBLE)
    for gradient, cut, elsewhere in parts:
        if not elsewhere:
            total += gradient.square().sum() / (1 if cut else tensor.size())
    total /= data.size()
    dist.all_reduce(total)  # all ranks
    return total.sqrt().item()


def by_rank_0_of_tensor(parts, data, pipeline, tensor):
    """What is whole counts on one rank only; norms are gathered, not summed."""
    mine = [p for p in parts if not p.elsewhere and (p.cut or tensor.rank() == 0)]
    total = squares(mine).view(1)
    for group in (tensor, pipeline):
        everyone = [torch.zeros(1, dtype=DOUBLE) for _ in range(group.size())]
        dist.all_gather(everyone, total, group=group)
        total = torch.stack(everyone).sum(0)
    return total.sqrt()


def own(parts, data, pipeline, tensor):
    return squares(parts).sqrt()


def embedding_twice(parts, data, pipeline, tensor):
    return by_two_sums([part._replace(elsewhere=False) for part in parts], data, pipeline, tensor)


def all_cut(parts, data, pipeline, tensor):
    return by_two_sums([part._replace(cut=True) for part in parts], data, pipeline, tensor)


def nothing_cut(parts, data, pipeline, tensor):
    return by_two_sums([part._replace(cut=False) for part in parts], data, pipeline, tensor)


def everything(parts, data, pipeline, tensor):
    total = squares(parts)
    dist.all_reduce(total)
    return total.sqrt()


def over_data_too(parts, data, pipeline, tensor):
    total = by_two_sums(parts, data, pipeline, tensor) ** 2
    dist.all_reduce(total, group=data)
    return total.sqrt()


def without_root(parts, data, pipeline, tensor):
    return by_two_sums(parts, data, pipeline, tensor) ** 2


def a_pair(parts, data, pipeline, tensor):
    return 1.0, 2.0


def cut_over_stages(parts, data, pipeline, tensor):
    """The two groups the wrong way round."""
    return by_two_sums(parts, data, tensor, pipeline)


def only_over_tensor(parts, data, pipeline, tensor):
    own = [part for part in parts if not part.elsewhere]
    shards = squares(part for part in own if part.cut)
    dist.all_reduce(shards, group=tensor)
    return (shards + squares(part for part in own if not part.cut)).sqrt()


def in_place(parts, data, pipeline, tensor):
    """The norm is right, and the gradients are their squares."""
    for part in parts:
        part.gradient.square_()
    roots = [part._replace(gradient=part.gradient.sqrt()) for part in parts]
    return by_two_sums(roots, data, pipeline, tensor)


ANSWERS = {
    check.replicas_left: (
        [(3, 2), [3, 2], torch.tensor([3, 2]), (3.0, 2.0)],
        [(3, 0), (2, 3), (3, 3), (0, 2), (4, 4), 3, (3,), "3 2", (3, 1)],
    ),
    check.mesh: (
        [(4, 2, 8), [4, 2, 8], torch.tensor([4, 2, 8]), (4.0, 2.0, 8.0)],
        [(8, 1, 8), (4, 1, 16), (1, 8, 8), (2, 4, 8), (4, 16, 1), (4, 4, 4), (8, 2, 4), (4, 2)],
    ),
    check.norm: (
        [by_two_sums, by_division, by_rank_0_of_tensor],
        [
            own,
            embedding_twice,
            all_cut,
            nothing_cut,
            everything,
            over_data_too,
            without_root,
            a_pair,
            cut_over_stages,
            only_over_tensor,
            in_place,
        ],
    ),
}
