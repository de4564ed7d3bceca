"""all_gather and reduce_scatter between one tensor and its shards.

With a list of shards, NCCL copies all of them once more, and gloo takes up to three times as long.
Torch 2.13 has new names for these two, and warns of the old ones.
"""

import torch
import torch.distributed as dist

ALL_GATHER, REDUCE_SCATTER = "all_gather_single", "reduce_scatter_single"
if not hasattr(dist, ALL_GATHER):
    ALL_GATHER, REDUCE_SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"


def all_gather_single(
    whole: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup | None
) -> dist.Work:
    """Begin to give every rank the shards (S, …) of all N ranks: whole is (N S, …)."""
    # Looked up at each call: what counts traffic stands in place of torch's functions.
    work: dist.Work = getattr(dist, ALL_GATHER)(whole, own, group=group, async_op=True)
    return work


def reduce_scatter_single(
    own: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup | None
) -> dist.Work:
    """Begin to add up the ranks' tensors (N S, …): own (S, …) gets this rank's shard."""
    work: dist.Work = getattr(dist, REDUCE_SCATTER)(own, whole, group=group, async_op=True)
    return work
