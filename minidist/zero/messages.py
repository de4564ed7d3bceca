"""The two collectives of ZeRO (lesson 8), on a flat tensor of N shards: x is (N S,).

A reduce_scatter and an all_gather of Ψ elements each send Ψ(N-1)/N from every rank: together what
the all_reduce of lesson 4 sends.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

# Gloo makes an all_gather of copies, and a reduce_scatter of a whole all_reduce. N broadcasts, or N
# reductions, of a shard each do the same up to four times faster.
_BY_SHARD = "gloo"

# Between one tensor and its shards: with a list of shards NCCL would copy all of them once more.
# By their names of torch 2.13, where the older ones warn.
ALL_GATHER, REDUCE_SCATTER = (
    next(name for name in names if hasattr(dist, name))
    for names in (
        ("all_gather_single", "all_gather_into_tensor"),
        ("reduce_scatter_single", "reduce_scatter_tensor"),
    )
)


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
        works = [getattr(dist, ALL_GATHER)(x, own, group=group, async_op=True)]
    return lambda: _wait(works)


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
        works = [getattr(dist, REDUCE_SCATTER)(total, x, group=group, async_op=True)]

    def wait() -> torch.Tensor:
        _wait(works)
        return total.copy_(own) if by_shard else total

    return wait


def _wait(works: list[dist.Work | None]) -> None:
    for work in works:
        assert work is not None
        work.wait()
