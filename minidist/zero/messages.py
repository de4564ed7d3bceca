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
LARGE = 2**18  # bytes of a rank's part


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
    """Begin to put all shards of several tensors into their places, (N n,) each. `own` (S,) has
    this rank's, end to end. Returns the function that waits."""
    ranks, kind = dist.get_world_size(group), dist.get_backend(group)
    sizes = [len(place) // ranks for place in places]
    parts = own.split(sizes)
    if kind == "shm" and len(places) > 1:  # it writes each where it belongs
        shm: Any = group
        work = shm.all_gather_single_coalesced(list(places), list(parts))
        return lambda: _wait([work])
    # Others have one place for what they get. A large one is the tensor's own; a copy of many small
    # ones costs less than a message for each.
    alone = [kind == _BY_SHARD and part.nbytes >= LARGE for part in parts]
    if not any(alone) and len(places) == 1:
        alone = [True]
    waits = [
        all_gather(place, group, part)
        for place, part, large in zip(places, parts, alone, strict=True)
        if large
    ]
    small = [i for i, large in enumerate(alone) if not large]
    gathered = own.new_empty(ranks * sum(sizes[i] for i in small))
    if small:
        mine = own if len(small) == len(parts) else torch.cat([parts[i] for i in small])
        waits.append(all_gather(gathered, group, mine))

    def wait() -> None:
        for arrive in waits:
            arrive()
        each = gathered.view(ranks, -1).split([sizes[i] for i in small], 1) if small else ()
        for i, shards in zip(small, each, strict=True):
            places[i].view(ranks, -1).copy_(shards)

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
