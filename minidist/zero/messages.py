"""The two collectives of ZeRO (lesson: zero), on a flat tensor of N shards: x is (N S,).

A reduce_scatter and an all_gather of Ψ elements each send Ψ(N-1)/N from every rank: together what
the all_reduce of DistributedDataParallel sends.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from minidist.common.single import all_gather_single, reduce_scatter_single

# Gloo makes an all_gather of copies, and a reduce_scatter of a whole all_reduce. N broadcasts, or N
# reductions, of a shard each do the same up to four times faster.
_BY_SHARD = "gloo"


def all_gather(
    x: torch.Tensor, group: dist.ProcessGroup, own: torch.Tensor | None = None
) -> Callable[[], None]:
    """Begin to give every rank all shards. Each has its `own` (S,), in its place in x if that is
    None. Returns the function that waits."""
    shards = x.chunk(dist.get_world_size(group))
    place = shards[dist.get_rank(group)]
    if dist.get_backend(group) == _BY_SHARD:
        if own is not None and own.data_ptr() != place.data_ptr():
            place.copy_(own)
        works = [
            dist.broadcast(shard, group=group, group_src=rank, async_op=True)
            for rank, shard in enumerate(shards)
        ]
    else:
        own = place if own is None else own
        works = [all_gather_single(x, own, group)]
    return lambda: _wait(works)


def all_gather_each(
    places: Sequence[torch.Tensor], group: dist.ProcessGroup, own: torch.Tensor
) -> Callable[[], None]:
    """Begin to put all shards of several tensors into their places, (N n,) each, in one message.
    `own` (S,) has this rank's, end to end. Returns the function that waits."""
    if len(places) == 1:
        return all_gather(places[0], group, own)
    ranks = dist.get_world_size(group)
    sizes = [len(place) // ranks for place in places]
    if dist.get_backend(group) == "shm":  # it writes each where it belongs
        shm: Any = group
        work = shm.all_gather_single_coalesced(list(places), list(own.split(sizes)))
        return lambda: _wait([work])
    gathered = own.new_empty(ranks * len(own))
    arrive = all_gather(gathered, group, own)

    def wait() -> None:
        arrive()
        for place, shards in zip(places, gathered.view(ranks, -1).split(sizes, 1), strict=True):
            place.view(ranks, -1).copy_(shards)

    return wait


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Begin to add up the ranks' tensors. Returns the function that waits, and gives this rank's
    shard of the sum: (S,), in memory of its own. What is left in x is not to be used."""
    shards = x.chunk(dist.get_world_size(group))
    own = shards[dist.get_rank(group)]
    total = torch.empty_like(own)
    if by_shard := dist.get_backend(group) == _BY_SHARD:
        works = [
            dist.reduce(shard, group=group, group_dst=rank, async_op=True)
            for rank, shard in enumerate(shards)
        ]
    else:
        works = [reduce_scatter_single(total, x, group)]

    def wait() -> torch.Tensor:
        _wait(works)
        return total.copy_(own) if by_shard else total

    return wait


def _wait(works: list[dist.Work | None]) -> None:
    for work in works:
        assert work is not None
        work.wait()
